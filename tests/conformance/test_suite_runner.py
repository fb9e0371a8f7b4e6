"""The runner in this process: statuses, relations that bite, structural checks with what they must catch."""

import dataclasses
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from toy_backend import Toy, axis_rank

from conformance import execute, relations, structure
from conformance.case import Case
from conformance.catalogue import load, parse_case
from conformance.runner import CHECKS, Session, parse_mesh
from conformance.vectors import generate
from paged.common import Capabilities
from paged.common.errors import InvalidInputError

TINY = Path(__file__).parent / "tiny"
GEOMETRY = {
    "dtype": "bfloat16", "page": 4, "num_pages": 16, "kv_heads": 4, "q_heads": 8, "head_dim": 32, "scale": 0.5,
    "layers": 2, "layer": 1,
}  # fmt: skip
ROWS = {"query_lens": [2, 1, 3], "kv_lens": [7, 9, 11]}


def case(name="attend/x", *, generator="generic", tier=3, clause="attend.1", needs=(), **params):
    moves = generator.startswith(("append", "scrub", "copy"))
    rows = {} if moves else ROWS
    shape = {k: v for k, v in GEOMETRY.items() if not (moves and k in ("q_heads", "scale"))}
    entry = {
        "id": name,
        "tier": tier,
        "level": "core",
        "generator": generator,
        "clause": [clause],
        "needs": list(needs),
    }
    return parse_case(entry | {"params": {**shape, **rows, **params}}, "test")


def relation(name, **params):
    return case(f"self/{name}", tier=4, clause="invariant.1", relation=name, **params)


@dataclasses.dataclass(frozen=True)
class Wrapped(Toy):
    """Toy attention with one thing changed by `change(call)`."""

    change: str = ""

    @property
    def capabilities(self) -> Capabilities:
        declared = super().capabilities
        if self.change == "finite":
            return dataclasses.replace(declared, poison="finite")
        if self.change == "no-lse":
            return dataclasses.replace(declared, features=declared.features - {"lse", "window", "prefill", "sinks"})
        if self.change == "rows":
            return dataclasses.replace(declared, promises=declared.promises | {"batch_invariant"})
        if self.change == "typed":
            return dataclasses.replace(declared, pool_storage="typed")
        if self.change == "per-layer":
            return dataclasses.replace(declared, pool_layout="per_layer")
        return declared

    def attend(self, query, pool, page_base, static, arrays, spec, extras):
        out, lse = super().attend(query, pool, page_base, static, arrays, spec, extras)
        if self.change.startswith("rows"):  # a bit that depends on how many rows there are
            out = jnp.where(static.rows % 2 == 0, out, jnp.nextafter(out, jnp.full_like(out, np.inf)))
        if self.change == "junk":  # what a padding token asks enters the others
            out = out + query[-1, 0, 0]
        if self.change == "chance":
            wrong = io_callback(lambda: np.int32(next(_calls)), jax.ShapeDtypeStruct((), jnp.int32))
            out = jnp.where(wrong % 3 == 0, out, out + wrong.astype(out.dtype))
        if self.change == "mesh":
            out = jnp.where(axis_rank_or_0("tensor") > 0, out[:, ::-1], out)
        if self.change == "empty-part":  # 0 / 0 of its own making in short rows
            out = jnp.where((arrays.kv_lens.min() < 8), jnp.full_like(out, np.nan), out)
        if self.change == "page-ids":
            out = out + arrays.page_ids[0].astype(out.dtype)
        if self.change == "finite":  # reads what it may read: the sentinel, times zero
            out = out + jnp.zeros_like(out) * jnp.nan_to_num(out)
        return out, (None if self.change == "no-lse" else lse)

    def append(self, pool, key, value, slots, static, arrays):
        if self.change == "append":
            slots = jnp.where(slots == jnp.max(slots), -1, slots)
        if self.change == "replica":
            rank = axis_rank("fsdp").astype(key.dtype)
            key = key + rank
        pool = super().append(pool, key, value, slots, static, arrays)
        if self.change == "elsewhere":  # a slot of the other layer
            keys = pool.keys.at[3, 1].set(jnp.zeros((), pool.keys.dtype))
            pool = dataclasses.replace(pool, keys=keys)
        return pool


_calls = itertools.count()


def axis_rank_or_0(axis):
    try:
        return axis_rank(axis)
    except NameError:
        return jnp.int32(0)


def test_a_failure_that_comes_and_goes_is_blamed_on_chance():
    result = run(case(), "chance")
    result = run(case(), "chance") if result.status == "pass" else result
    assert (result.status, result.clause) == ("fail", "invariant.1"), result.diagnosis
    assert "not the same twice" in result.diagnosis


def test_what_is_right_on_one_device_is_blamed_on_the_mesh():
    what = case(mesh={"tensor": 2}, kv_axes=["tensor"])
    assert run(case(), "mesh").status == "pass"
    result = run(what, "mesh")
    assert (result.status, result.clause) == ("fail", "sharded.1"), result.diagnosis
    assert "right on one device and wrong over tensor" in result.diagnosis


def test_a_nan_that_was_read_nowhere_is_blamed_on_the_arithmetic():
    result = run(case(), "empty-part")
    assert (result.status, result.clause) == ("fail", "attend.1"), result.diagnosis
    assert "with zeros in all those places too" in result.diagnosis


def run(what: Case, change: str = ""):
    return Session(Wrapped(change=change)).run(what)


@pytest.mark.parametrize("change", ["", "finite", "no-lse", "typed", "per-layer"])
def test_every_kind_of_declaration_passes(change):
    for what in (
        case(),
        case(generator="append_slots", tier=1, tokens=9),
        case(generator="copy_pages", tier=1, pages=4),
        case(generator="scrub", tier=1, pages=4),
    ):
        result = run(what, change)
        assert result.status == "pass", result.diagnosis
        assert result.elements > 0


@pytest.mark.parametrize("name", list(relations.RELATIONS))
def test_every_relation_passes_and_compares_something(name):
    exact = name not in ("repeat", "relabel", "poison", "warm", "masked_nan")  # no promise: on exact vectors
    more = {"window": 3} if name == "masked_nan" else {}
    result = run(relation(name, generator="address" if exact else "generic", **more))
    assert result.status == "pass", result.diagnosis
    assert result.decided == result.elements > 0


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("batch", "rows", "bits moved when each row ran alone"),
        ("padding", "rows", "bits moved when padding was added (tokens)"),
        ("padding", "junk", "bits moved when padding tokens held something else"),
        ("padding", "rows-unpromised", ""),
        ("relabel", "page-ids", "bits moved when physical pages were renumbered"),
        ("warm", "append", ""),
    ],
)
def test_a_relation_that_is_broken_is_told(name, change, said):
    result = run(relation(name), change)
    assert result.status == ("fail" if said else "pass")
    assert said in result.diagnosis


def test_a_step_that_writes_where_it_must_not_is_no_pass_though_the_output_is_right():
    result = run(case(), "elsewhere")
    assert (result.status, result.clause) == ("fail", "append.3")
    assert run(case(), "append").status == "fail"


def test_not_claimed_and_unknown_things():
    assert run(case(needs=["promise:chunk_invariant"])).status == "not-claimed"
    for params, said in [
        ({"check": "speed"}, "params.check must be one of"),
        ({"relation": "likeness"}, "params.relation must be one of"),
        ({"mesh": {"tensor": 0}, "kv_axes": ["tensor"]}, "params.mesh"),
        ({"mesh": {"tensor": 2}}, "params.kv_axes"),
        ({"mesh": {"tensor": 2}, "kv_axes": ["model"]}, "model"),
        ({"mesh": {"tensor": 64}, "kv_axes": ["tensor"]}, "no device"),
        ({"surprise": 1}, "surprise"),
    ]:
        result = run(case(**params))
        assert result.status == "error"
        assert said in result.diagnosis


def test_copies_that_differ_on_an_axis_without_heads_are_caught():
    what = case(mesh={"tensor": 2, "fsdp": 2}, kv_axes=["tensor"])
    assert run(what).status == "pass"
    result = run(what, "replica")
    assert (result.status, result.clause) == ("fail", "sharded.2")
    assert "copies of" in result.diagnosis
    assert "slice(" not in result.diagnosis
    assert re.search(r"first at (pool row|token) \d+, (slot|head) \d+, ", result.diagnosis)


def test_structural_checks_pass_and_donation_sees_a_pool_that_is_copied(monkeypatch):
    assert set(CHECKS) == {"donation", "collectives", "over_sharded", "refusals"}
    mesh = {"mesh": {"tensor": 2, "fsdp": 2}, "kv_axes": ["tensor"]}
    for name in CHECKS:
        what = case(check=name, clause="sharded.4", num_pages=64, **mesh)
        assert run(what).status == "pass", run(what).diagnosis
        assert run(what).elements > 0
    monkeypatch.setattr(execute, "run_attend", jax.jit(execute.layer_step, static_argnums=0))
    broken = run(case(check="donation", clause="sharded.4", **mesh))
    assert (broken.status, broken.clause) == ("fail", "sharded.4")


def test_a_collective_between_append_and_attention_is_found(monkeypatch):
    what = case(check="collectives", clause="sharded.3", num_pages=64, mesh={"tensor": 2}, kv_axes=["tensor"])
    session = Session(structure._Collecting(Wrapped(), ("tensor",)))  # type: ignore[arg-type]
    result = session.run(what)
    assert (result.status, result.clause) == ("fail", "sharded.3")
    assert "all-reduce" in result.diagnosis


def test_a_refusal_under_another_name_is_caught(monkeypatch):
    what = case(check="refusals", clause="refuse.1")
    assert run(what, "no-lse").elements > run(what).elements
    monkeypatch.setattr(structure, "check_step", lambda *a, **k: None)
    assert run(what).status == "fail"
    assert "was accepted" in run(what).diagnosis


def test_a_mesh_is_bounded():
    for mesh in ({}, {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, {"a": 65}, {"a": 1.5}, [2]):
        with pytest.raises(InvalidInputError, match=r"params\.mesh"):
            parse_mesh({"mesh": mesh, "kv_axes": ["a"]})


def test_written_slots_are_spoilt_before_the_step_and_padding_is_never_written():
    what = case(rung={"rows": 4, "tokens": 9, "listed_pages": 12, "max_query_len": 3, "max_kv_len": 12})
    problem = generate(what, "any_bits").problem
    keys, values, new_keys, new_values = execute.split_step(problem, "any_bits")
    changed = (keys != problem.keys).any(axis=(2, 3))
    assert changed.sum() == 6 == (values != problem.values).any(axis=(2, 3)).sum()
    assert new_keys.shape == (9, 4, 32)
    assert (new_keys[6:] == execute.poison_word("bfloat16", "any_bits")).all()
    assert (new_values[6:] == execute.poison_word("bfloat16", "any_bits")).all()


def test_relations_draw_from_the_case_alone():
    problem = generate(case(), "any_bits").problem
    first, second = (relations.build("relabel", i, problem, Wrapped().capabilities) for i in ("a", "a"))
    other = relations.build("relabel", "b", problem, Wrapped().capabilities)
    ids = [r.variants[0].calls[0].problem.table.page_ids.tolist() for r in (first, second, other)]
    assert ids[0] == ids[1] != ids[2]


def test_the_tiny_catalogue_is_sound():
    for what in load(TINY).cases:
        assert Session(Wrapped()).run(what).status == "pass"
