"""Movement: bits kept, nothing else touched, and the donated pool left where it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_compiled import addresses, new_tokens, pool_sized, scanned_step, small_step
from reference_problem import BACKEND, DTYPES, Batch, attend, bits, lay, poison

from paged.backends.moves import layer_slots, storage_dtype
from paged.backends.protocol import AttentionExtras, KvArrays, Rung
from paged.common import AttentionSpec, StorageLayout
from paged.common.dtypes import ELEMENT_BYTES
from paged.reference import attend as definition
from paged.reference.move import append

SPEC = AttentionSpec(scale=0.3)


def random_pool(dtype: str, *, num_layers=3, num_pages=9, seed=0) -> tuple[StorageLayout, KvArrays]:
    """Words of every kind: signalling NaNs, infinities, −0."""
    layout = StorageLayout(
        num_layers=num_layers,
        num_pages=num_pages,
        tokens_per_page=4,
        num_kv_heads=2,
        head_dim=8,
        value_head_dim=6,
        dtype=dtype,
    )
    random = np.random.default_rng(seed)

    def draw(x):
        return jnp.asarray(random.integers(0, 1 << (8 * x.dtype.itemsize), x.shape, dtype=np.uint64).astype(x.dtype))

    return layout, jax.tree.map(draw, poison(layout))


def elements(words: np.ndarray, dtype: str) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(words), jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BYTES))
def test_append_moves_every_word_and_padding_moves_none(dtype):
    layout, pool = random_pool(dtype)
    random = np.random.default_rng(1)
    limit = layout.slots_per_layer
    slots = np.array([4, 35, -1, 17, 9, -1, limit, -limit, 2**31 - 1], np.int32)
    word = storage_dtype(dtype, "words")
    new = [random.integers(0, np.iinfo(word).max, (9, 2, d), dtype=word, endpoint=True) for d in (8, 6)]
    for x in new:
        x[0, 0, 0] = 1 << (8 * word.itemsize - 1)  # −0
    expected = [np.array(pool.keys), np.array(pool.values)]
    run = jax.jit(
        lambda pool, key, value, slots, layer: append(
            pool, key, value, layer_slots(slots, layer, num_pages=9, tokens_per_page=4)
        ),
        donate_argnums=0,
    )
    for layer in range(3):
        pool = run(pool, *(elements(x, dtype) for x in new), jnp.asarray(slots), jnp.int32(layer))
        for stored, x in zip(expected, new):
            for token in (0, 1, 3, 4):
                stored[9 * layer + slots[token] // 4, slots[token] % 4] = x[token]
        assert np.count_nonzero(np.asarray(pool.keys) != expected[0]) == 0
        assert np.count_nonzero(np.asarray(pool.values) != expected[1]) == 0


def test_scrub_and_copy_pages():
    _, pool = random_pool("bfloat16")
    before = [np.array(pool.keys), np.array(pool.values)]
    pages = jnp.asarray([5, -1, 26, 13], jnp.int32)
    scrubbed = jax.jit(BACKEND.scrub)(pool, pages)
    for stored, old in zip((scrubbed.keys, scrubbed.values), before):
        expected = old.copy()
        expected[[5, 26, 13]] = 0
        np.testing.assert_array_equal(np.asarray(stored), expected)
    # Every source is read before any target is written: 5 and 6 change places. Padding names no page on either side.
    source, target = jnp.asarray([5, 6, 26, -1, 3], jnp.int32), jnp.asarray([6, 5, 1, -1, -1], jnp.int32)
    moved = jax.jit(BACKEND.copy_pages)(pool, source, target)
    for stored, old in zip((moved.keys, moved.values), before):
        expected = old.copy()
        expected[[6, 5, 1]] = old[[5, 6, 26]]
        np.testing.assert_array_equal(np.asarray(stored), expected)


def test_padding_of_one_layer_reaches_no_other():
    """Three layers and padding: every slot outside the owned ones and the sentinel pages is byte-identical."""
    batch, laid = small_step("bfloat16")
    layout = laid.layout
    words = np.random.default_rng(2).integers(0, 2**16, (*laid.pool.keys.shape[:3], 24), dtype=np.uint16)
    before = dataclasses.replace(laid.pool, keys=jnp.asarray(words[..., :16]), values=jnp.asarray(words[..., 16:]))
    key, value = new_tokens(batch, laid)
    step = scanned_step(laid.table, SPEC, num_layers=3)
    after, _ = jax.jit(step)(before, laid.query, key, value, laid.arrays)
    slots = laid.table.write_slots[laid.table.write_slots >= 0]
    assert len(slots) == 6
    assert (laid.table.write_slots < 0).sum() == 5
    owned = np.zeros((3, layout.num_pages, layout.tokens_per_page), bool)
    owned[:, slots // 4, slots % 4] = True
    owned[:, 0] = True
    owned = owned.reshape(-1, layout.tokens_per_page)
    for new, old in ((after.keys, before.keys), (after.values, before.values)):
        np.testing.assert_array_equal(np.asarray(new)[~owned], np.asarray(old)[~owned])
        assert not np.array_equal(np.asarray(new)[owned], np.asarray(old)[owned])


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn"])
def test_a_donated_pool_keeps_its_address_and_is_never_copied(dtype):
    kept = dtype in DTYPES
    batch, laid = small_step(dtype if kept else "float32")
    if not kept:
        layout = dataclasses.replace(laid.layout, dtype=dtype)
        laid = dataclasses.replace(laid, layout=layout, pool=poison(layout))
    arguments = (laid.pool, laid.query, *new_tokens(batch, laid), laid.arrays)
    step = scanned_step(laid.table, SPEC, num_layers=3)
    sizes = {laid.pool.keys.size, laid.pool.values.size}
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    found = sum((pool_sized(compiled, n) for n in sizes), start=pool_sized(compiled, -1))
    assert set(found) <= {"scatter", "fusion"}
    assert found["scatter"] == found["fusion"] == 2
    assert compiled.memory_analysis().alias_size_in_bytes >= laid.pool.keys.nbytes + laid.pool.values.nbytes
    if dtype == "float32":  # the check can fail: without donation there must be copies
        careless = jax.jit(step).lower(*arguments).compile()
        assert any(pool_sized(careless, n)["copy"] for n in sizes)
    before = addresses(laid.pool)
    pool, _ = compiled(*arguments)
    assert addresses(pool) == before
    assert laid.pool.keys.is_deleted()


def test_a_token_attends_to_what_the_same_step_appended():
    batch, laid = small_step("bfloat16")
    key, value = new_tokens(batch, laid)
    slots = laid.table.write_slots[laid.table.write_slots >= 0]
    pool = jax.tree.map(lambda x: x.at[slots // 4, slots % 4].set(x[0, 0]), laid.pool)  # NaN, as the sentinel holds
    step = scanned_step(laid.table, SPEC, num_layers=1)
    _, (out, _) = jax.jit(step)(pool, laid.query, key, value, laid.arrays)
    expected, _ = attend(laid, SPEC)
    assert not np.isnan(np.asarray(expected).astype(np.float32)).any()
    np.testing.assert_array_equal(bits(out[0]), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_is_float64_and_the_caller_never_sees_it(dtype):
    laid = lay(Batch.random([2], [9], dtype=dtype))
    arrays = BACKEND.plan_arrays(Rung.of(laid.table), laid.arrays)
    arguments = (laid.query, laid.pool, jnp.int32(0), arrays)
    enabled = jax.config.jax_enable_x64
    spec = AttentionSpec(scale=0.3, soft_cap=2.0)
    traced = jax.make_jaxpr(lambda *a: definition.attend(*a, spec, AttentionExtras()))(*arguments)
    assert jax.config.jax_enable_x64 is enabled is False
    computed: dict[str, set[str]] = {}
    for name, avals in operations(traced.jaxpr):
        for aval in avals:
            if jnp.issubdtype(aval.dtype, jnp.floating):
                computed.setdefault(name, set()).add(aval.dtype.name)
    for name in ("mul", "add", "exp", "log", "tanh", "div", "sub", "max", "reduce_max"):
        assert computed[name] == {"float64"}
    # A library chooses the order of a sum by its shape; ours are trees of plain additions.
    assert not {"dot_general", "reduce_sum", "cumsum"} & set(computed)
    assert [v.aval.dtype.name for v in traced.jaxpr.outvars] == [dtype, "float32"]
    assert jnp.arange(3).dtype == jnp.int32


def operations(jaxpr):
    """Name and output types of every primitive, inside loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name, [v.aval for v in equation.outvars]
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
        ):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                yield from operations(inner)
