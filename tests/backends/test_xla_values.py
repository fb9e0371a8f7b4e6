"""Plain float32 attention against a float64 loop: options, element types, page sizes, ragged batches, poison."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import elements, expected_attention, owned_slots, random_table, words

from paged.backends.metadata import pack_table, unpack_table
from paged.backends.protocol import AttentionExtras, KvArrays
from paged.backends.registry import get_backend
from paged.backends.step import plan_step
from paged.common import AttentionSpec

XLA = get_backend("xla")
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Options, heads (query, KV, width, value width), element types of query and pool, page size, sinks: between them every
# option, both kinds of item, head counts that are no power of two, blocks that end inside a page.
CASES = {
    "causal": (AttentionSpec(scale=0.3), (9, 3, 64, 64), "float32", "float32", 16, False),
    "window-cap-sinks": (
        AttentionSpec(scale=0.3, window=21, soft_cap=1.5),
        (8, 4, 32, 16),
        "bfloat16",
        "bfloat16",
        4,
        True,
    ),
    "bidirectional": (
        AttentionSpec(scale=-0.3, causal=False, window=140),
        (2, 2, 8, 8),
        "float16",
        "float16",
        256,
        False,
    ),
    "eight-bit": (AttentionSpec(scale=0.3), (10, 1, 72, 80), "bfloat16", "float8_e4m3fn", 1, True),
}
ROWS = {"query_lens": [1, 0, 2, 45, 1, 0, 1], "kv_lens": [300, 7, 131, 45, 1, 0, 129]}


@functools.partial(jax.jit, static_argnums=(4, 5))
def attend(query, pool, vector, extras, rung, spec):
    plan = plan_step(XLA, unpack_table(vector, rung), rung, spec)
    return XLA.attend(query, pool, jnp.int32(rung.num_pages), plan.static, plan.arrays, spec, extras)


@pytest.mark.parametrize("name", CASES)
def test_values_and_poison(name):
    spec, (heads, kv_heads, width, value_width), dtype, kv_dtype, size, sinks = CASES[name]
    rng = np.random.default_rng(len(name))
    pages = sum(-(-n // size) for n in ROWS["kv_lens"]) + 4
    table = random_table(rng, **ROWS, tokens_per_page=size, num_pages=pages)
    table = table.pad(rows=9, tokens=56, listed_pages=pages + 3, max_query_len=56, max_kv_len=512)
    owned = np.concatenate([np.zeros_like(owned_slots(table)), owned_slots(table)])  # two layers; the second is read
    pools = [rng.standard_normal((2 * pages, size, kv_heads, w)) * 2 for w in (width, value_width)]
    stored = [words(pool, kv_dtype) for pool in pools]
    nan = words(np.full(1, np.nan), kv_dtype)[0]
    query = jnp.asarray(rng.standard_normal((56, heads, width)), dtype)
    scales = (0.5, 0.75) if kv_dtype.startswith("float8") else (None, None)
    extras = AttentionExtras(
        jnp.asarray(rng.standard_normal(heads), jnp.float32) if sinks else None,
        *(None if scale is None else jnp.float32(scale) for scale in scales),
    )
    vector, rung = pack_table(table)
    run = lambda *arrays: [  # noqa: E731
        np.asarray(x)
        for x in attend(query, KvArrays(*arrays, words_of=kv_dtype), jnp.asarray(vector), extras, rung, spec)
    ]
    poisoned = run(*(jnp.asarray(np.where(owned[..., None, None], array, nan)) for array in stored))
    zeroed = run(*(jnp.asarray(np.where(owned[..., None, None], array, 0)) for array in stored))
    for one, other in zip(poisoned, zeroed):
        np.testing.assert_array_equal(words(one, one.dtype.name), words(other, other.dtype.name))

    keys, values = (elements(a, kv_dtype) * (s or 1.0) for a, s in zip(stored, scales))
    exact, exact_lse = expected_attention(
        np.asarray(query.astype(jnp.float32)),
        keys,
        values,
        table,
        spec,
        page_base=pages,
        sinks=None if extras.sinks is None else np.asarray(extras.sinks),
    )
    out, lse = zeroed
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), np.float32)
    empty = np.isneginf(exact_lse)
    assert empty.any()
    assert (words(out, dtype)[empty] == 0).all(), "what sees nothing is +0, padding included (scenario N4)"
    assert np.isneginf(lse[empty]).all()
    error = abs(out.astype(np.float64) - exact)
    assert (error <= ROUNDING[dtype] * abs(exact) + 2.0**-19 * abs(values[owned]).max()).all(), error.max()
    # An error of 2^-24 in each of some hundred partial sums of q·k moves a logit, and with it the LSE.
    assert (abs(lse[~empty] - exact_lse[~empty]) <= 2.0**-17 * (1 + abs(exact_lse[~empty]))).all()


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_computed_zero_is_positive(scale):
    """Values are the smallest negative ones and a sink takes nearly all weight, so that outputs round to zero."""
    table = random_table(np.random.default_rng(0), [3, 1], [40, 33], tokens_per_page=16, num_pages=8)
    vector, rung = pack_table(table)
    stored = (jnp.asarray(words(np.full((16, 16, 2, 8), value), "float16")) for value in (0.0, -(2.0**-24)))
    sinks = AttentionExtras(sinks=jnp.full(4, 20.0, jnp.float32))
    query = jnp.ones((4, 4, 8), jnp.float16)
    pool = KvArrays(*stored, words_of="float16")
    out, lse = attend(query, pool, jnp.asarray(vector), sinks, rung, AttentionSpec(scale=scale))
    assert (words(np.asarray(out), "float16") == 0).all()
    np.testing.assert_allclose(lse, 20.0, rtol=1e-6)
