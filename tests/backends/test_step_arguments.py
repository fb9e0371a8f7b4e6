"""What `attention_step` hands to a backend: one argument object, on every path (requirement B3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import random_table

from paged.backends import moves, step
from paged.backends.metadata import table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, Rung
from paged.backends.registry import get_backend
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, plan_step, to_element
from paged.common import AttentionSpec, Capabilities, Range
from paged.common.errors import InvalidInputError, UnsupportedError

PAGES, SIZE, HEADS, WIDTH = 12, 4, 4, 8
SPEC = AttentionSpec(scale=0.375, window=3)
ANYTHING = Capabilities(
    dtypes=frozenset({"float32"}),
    kv_dtypes=frozenset({"float32", "bfloat16"}),
    page_sizes=Range(1, 64),
    head_dims=frozenset({WIDTH}),
    group_sizes=Range(1, 8),
    features=frozenset({"window", "sinks", "lse", "soft_cap"}),
    numerics="N0",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Recorder:
    """A backend that notes what it is called with and computes next to nothing."""

    capabilities: Capabilities = ANYTHING
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    name: str = "recorder"

    def static_plan(self, rung, spec):
        return ("static", rung)

    def plan_arrays(self, static, table):
        return {"lens": table.kv_lens}

    def append(self, pool, key, value, slots, static, arrays):
        self.calls.append(
            {"slots": slots, "key": key, "value": value, "static": static, "arrays": arrays, "words_of": pool.words_of}
        )
        return moves.scatter_append(pool, key, value, slots)

    def attend(self, query, pool, page_base, static, arrays, spec, extras):
        self.calls[-1] |= {"query": query, "page_base": page_base, "spec": spec, "extras": extras, "attend": static}
        return query, query[..., 0]

    def scrub(self, pool, pages):
        return moves.scrub(pool, pages)

    def copy_pages(self, pool, source, target):
        return moves.copy_pages(pool, source, target)


def arguments(layers=3, dtype=jnp.float32):
    table = random_table(np.random.default_rng(0), [1, 3], [9, 3], tokens_per_page=SIZE, num_pages=PAGES)
    table = table.pad(rows=3, tokens=6, listed_pages=8, max_query_len=3, max_kv_len=16)
    shape = (layers * PAGES, SIZE, HEADS, WIDTH)
    tokens = [jnp.asarray(np.random.default_rng(1).standard_normal((6, h, WIDTH)), jnp.float32) for h in (8, 4, 4)]
    return table, KvArrays(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)), tokens


def run(recorder, *, sharding=None, layer=1, extras=None, pool=None):
    table, made, tokens = arguments()
    plan = plan_step(recorder, table_arrays(table), Rung.of(table), SPEC)
    extras = AttentionExtras() if extras is None else extras
    return attention_step(recorder, plan, pool or made, *tokens, layer=layer, extras=extras, sharding=sharding)


def test_scenario_s6_both_paths_get_the_same_arguments(monkeypatch):
    built = []
    build = step.kernel_arguments
    monkeypatch.setattr(step, "kernel_arguments", lambda *a, **k: built.append(build(*a, **k)) or built[-1])
    sinks = jnp.arange(8, dtype=jnp.float32)
    sharding = KvSharding(jax.make_mesh((2, 2), ("data", "tensor")), ("tensor",))
    calls = []
    for where in (None, sharding):
        recorder = Recorder()
        run(recorder, sharding=where, extras=AttentionExtras(sinks=sinks))
        assert len(recorder.calls) == 1
        calls += recorder.calls
    assert len(built) == 2, "one argument object a step, whatever the path"
    assert jax.tree.structure(built[0]) == jax.tree.structure(built[1])
    jax.tree.map(np.testing.assert_array_equal, built[0], built[1])
    for call in calls:
        assert call["spec"] is SPEC
        assert call["spec"].scale == 0.375
        assert call["static"] == call["attend"] == ("static", built[0].static[1])
    assert calls[0].keys() == calls[1].keys()
    assert calls[1]["query"].shape == (6, 4, WIDTH), "under sharding a backend sees one device's heads"
    assert calls[1]["key"].shape == (6, 2, WIDTH)
    assert calls[1]["extras"].sinks.shape == (4,)
    assert calls[1]["slots"].shape == (6,)
    np.testing.assert_array_equal(calls[0]["extras"].sinks, sinks)


def test_scenario_b1_a_provider_is_a_name_and_nothing_else_changes():
    for backend in (Recorder(), get_backend("xla")):
        table, pool, tokens = arguments()
        if backend.capabilities.pool_storage == "words":
            words = (array.view(jnp.uint32) for array in (pool.keys, pool.values))
            pool = KvArrays(*words, words_of="float32")
        plan = jax.eval_shape(lambda t: plan_step(backend, t, Rung.of(table), SPEC), table_arrays(table))  # noqa: B023
        out, lse, after = jax.eval_shape(
            lambda plan, pool, *x: attention_step(backend, plan, pool, *x, layer=0),  # noqa: B023
            plan,
            pool,
            *tokens,
        )
        assert (out.shape, lse.shape) == ((6, 8, WIDTH), (6, 8))
        assert jax.tree.structure(after) == jax.tree.structure(pool)


def test_the_layer_moves_slots_and_pages_of_a_stacked_pool():
    table = arguments()[0]
    for layer in (0, 2, jnp.int32(2)):
        recorder = Recorder()
        run(recorder, layer=layer)
        call = recorder.calls[0]
        assert call["page_base"].dtype == jnp.int32
        assert int(call["page_base"]) == int(layer) * PAGES
        moved = np.where(table.write_slots < 0, -1, table.write_slots + int(layer) * PAGES * SIZE)
        np.testing.assert_array_equal(call["slots"], moved)


def test_a_per_layer_pool_has_no_offset():
    recorder = Recorder(dataclasses.replace(ANYTHING, pool_layout="per_layer"))
    table, pool, _ = arguments(layers=1)
    run(recorder, layer=2, pool=pool)
    assert int(recorder.calls[0]["page_base"]) == 0
    np.testing.assert_array_equal(recorder.calls[0]["slots"], table.write_slots)


def test_keys_and_values_are_rounded_to_the_pool_once():
    recorder = Recorder()
    _, pool, (_, key, value) = arguments(dtype=jnp.bfloat16)
    run(recorder, pool=pool)
    np.testing.assert_array_equal(recorder.calls[0]["key"], key.astype(jnp.bfloat16))
    np.testing.assert_array_equal(recorder.calls[0]["value"], value.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8"])
def test_eight_bit_types_are_scaled_clamped_and_rounded_to_nearest_even(name):
    dtype = jnp.dtype(name)
    grid = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid) & (grid >= (-127 if name == "int8" else -np.inf))])
    middles = (grid[1:] + grid[:-1]) / 2
    exact = np.concatenate([grid, middles, np.nextafter(middles.astype(np.float32), np.float32(np.inf)), [1e6, -1e6]])
    scale = np.float32(0.25)
    found = jax.jit(lambda x, s: to_element(x, dtype, s))(jnp.asarray(exact * scale, jnp.float32), scale)
    exact = np.clip(exact, grid[0], grid[-1])
    above = np.searchsorted(grid, exact).clip(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    # Neighbours alternate between even and odd last bits of the encoding; zero is even.
    even = (np.arange(len(grid)) - np.searchsorted(grid, 0.0)) % 2 == 0
    tie = np.where(even[above], high, low)
    nearest = np.where(exact - low < high - exact, low, np.where(exact - low > high - exact, high, tie))
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), nearest)


def test_a_scale_on_sixteen_bits_is_refused():
    recorder = Recorder(dataclasses.replace(ANYTHING, features=ANYTHING.features | {"kv_scales"}))
    with pytest.raises(InvalidInputError, match="belong to 8-bit pools; this pool holds float32"):
        run(recorder, extras=AttentionExtras(key_scale=jnp.float32(2)))


def test_undeclared_options_are_refused_while_tracing():
    recorder = Recorder(dataclasses.replace(ANYTHING, features=frozenset({"window"})))
    with pytest.raises(UnsupportedError, match="'sinks'"):
        run(recorder, extras=AttentionExtras(sinks=jnp.zeros(8)))
    with pytest.raises(UnsupportedError, match="'kv_scales'"):
        run(recorder, extras=AttentionExtras(value_scale=jnp.float32(2)))
    table = arguments()[0]
    with pytest.raises(UnsupportedError, match="'soft_cap'"):
        plan_step(recorder, table_arrays(table), Rung.of(table), AttentionSpec(scale=1.0, soft_cap=2.0))
    assert recorder.calls == []


def test_shapes_that_do_not_fit_the_plan_are_refused():
    recorder = Recorder()
    table, pool, (query, key, value) = arguments()
    plan = plan_step(recorder, table_arrays(table), Rung.of(table), SPEC)
    words = KvArrays(pool.keys.view(jnp.uint32), pool.values.view(jnp.uint32), words_of="float32")
    odd = KvArrays(pool.keys[1:], pool.values[1:])
    for (p, q, k, v), message in (
        ((odd, query, key, value), "pool of 35 pages of 4 tokens does not fit a plan for layers of 12 pages"),
        ((pool, query[:5], key[:5], value[:5]), "query has 5 tokens; the plan is for 6"),
        ((pool, query, key[:, :2], value[:, :2]), r"key has \(heads, head dim\) \(2, 8\); the pool stores \(4, 8\)"),
        ((pool, query[:, :6], key, value), r"query \(t, h, d\) \(6, 6, 8\) does not fit"),
        ((words, query, key, value), "stores pools as typed; this pool has words_of='float32'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            attention_step(recorder, plan, p, q, k, v, layer=0)
    assert recorder.calls == []
