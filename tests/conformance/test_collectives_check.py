"""The check of clause sharded.3 on compiled steps: a collective is seen wherever a backend puts it, and only then.

The pool is of typed 16-bit floats: XLA's CPU compiler converts it around every scatter and reads pages early, so that
most of these collectives are scheduled behind the last reader of the pool.
"""

import dataclasses

import jax.numpy as jnp
import pytest
from jax import lax
from toy_backend import Toy

from conformance import hlo, structure
from conformance.catalogue import parse_case
from conformance.runner import Session

AXIS = "tensor"
CASE = parse_case(
    {
        "id": "sharded/x",
        "tier": 0,
        "level": "sharded",
        "generator": "generic",
        "clause": ["sharded.3"],
        "needs": [],
        "params": {
            "dtype": "bfloat16", "page": 4, "num_pages": 16, "kv_heads": 4, "q_heads": 8, "head_dim": 32, "scale": 0.5,
            "query_lens": [2, 1, 3], "kv_lens": [7, 9, 11], "mesh": {AXIS: 2}, "kv_axes": [AXIS],
            "check": "collectives",
        },
    },
    "test",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Talking(Toy):
    """Toy attention over a typed pool; `where` says which collective it has."""

    where: str = ""
    layout: str = "stacked"

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, pool_storage="typed", pool_layout=self.layout)

    def append(self, pool, key, value, slots, static, arrays):
        if self.where == "psum of the keys":
            key = unless_nan(lax.psum(key, AXIS), key)
        return super().append(pool, key, value, slots, static, arrays)

    def attend(self, query, pool, page_base, rung, table, spec, extras):
        mark = pool.keys[0, 0, 0, 0].astype(jnp.float32)
        match self.where:
            case "psum of a mark into the query":
                query = query + lax.psum(mark, AXIS).astype(query.dtype)
            case "permuted page":
                keys = pool.keys.at[1].set(lax.ppermute(pool.keys[1], AXIS, [(0, 1), (1, 0)]))
                pool = dataclasses.replace(pool, keys=keys)
            case "psum in a loop":
                add = lambda _, x: x + lax.psum(x, AXIS)  # noqa: E731
                query = query + lax.fori_loop(0, rung.rows, add, mark).astype(query.dtype)
            case "its place on the axis":
                query = query + (lax.axis_index(AXIS) * 0 + lax.psum(1, AXIS)).astype(query.dtype)
            case "a layer that needs no offset":
                page_base = 0
        out, lse = super().attend(query, pool, page_base, rung, table, spec, extras)
        match self.where:
            case "maximum of the LSE":
                lse = unless_nan(lax.pmax(lse, AXIS), lse)
            case "scattered sum of the output":
                part = lax.psum_scatter(out.astype(jnp.float32), AXIS, scatter_dimension=1, tiled=True)
                out = unless_nan(jnp.repeat(part, 2, axis=1), out)
        return out, lse


def unless_nan(told, own):
    """`own`, as far as the values go; the compiler cannot know."""
    return jnp.where(jnp.isnan(told), jnp.zeros_like(own), own)


@pytest.mark.parametrize(
    ("where", "opcode"),
    [
        ("psum of a mark into the query", "all-reduce"),
        ("psum of the keys", "all-reduce"),
        ("permuted page", "collective-permute"),
        ("psum in a loop", "all-reduce"),
        ("maximum of the LSE", "all-reduce"),
        ("scattered sum of the output", "reduce-scatter"),
    ],
)
def test_a_collective_is_seen_wherever_it_is(where, opcode):
    result = Session(Talking(where=where)).run(CASE)
    assert (result.status, result.clause) == ("fail", "sharded.3"), result.diagnosis
    assert opcode in result.diagnosis


@pytest.mark.parametrize(
    ("where", "layout"),
    [("its place on the axis", "stacked"), ("a layer that needs no offset", "per_layer")],
)
def test_a_step_without_one_passes(where, layout):
    result = Session(Talking(where=where, layout=layout)).run(CASE)
    assert result.status == "pass", result.diagnosis


def test_a_reader_that_sees_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(structure.hlo, "collectives", lambda text: [])
    result = Session(Talking(where="psum of the keys")).run(CASE)
    assert result.status == "error"
    assert "does not see a collective planted after the append" in result.diagnosis


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("%s = (s32[], s32[]) all-reduce-start(%m), to_apply=%add", True),
        ("%s = bf16[8] all-gather-done(%g)", True),
        ("%s = bf16[8] all-to-all(%m), dimensions={0}", True),
        ("%s = (f32[8], u32[], token[]) send(%m, %t), channel_id=1", True),
        ("%s = bf16[8] fusion(%m), calls=%all-reduce.1", False),
        ('%s = f32[8] add(%m, %m), metadata={op_name="all-reduce(%m)"}', False),
        ("%all-reduce.7 = f32[8] copy(%m)", False),
    ],
)
def test_a_collective_is_told_by_its_opcode(line, seen):
    assert bool(hlo.collectives(f"ENTRY %main (m: f32[8]) -> f32[8] {{\n  {line}\n}}\n")) is seen


def test_a_computation_that_seems_to_end_early_hides_nothing():
    config = '%k = f32[8] custom-call(%m), custom_call_target="k", backend_config="a\n}\nb"'
    text = f"ENTRY %main (m: f32[8]) -> f32[8] {{\n  {config}\n  ROOT %s = f32[8] all-reduce(%k), to_apply=%add\n}}\n"
    assert [one.name for one in hlo.collectives(text)] == ["s"]
