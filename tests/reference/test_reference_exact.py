"""The answer is the exact one, rounded once: every bit against rational and 60-digit decimal arithmetic."""

import dataclasses
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from exact_attention import attention, fraction, round_to_word
from reference_problem import COMMON, DTYPES, Batch, attend, bits, lay

from paged.backends.protocol import AttentionExtras
from paged.common import AttentionSpec

SINKS = jnp.asarray([0.5, -2.0, 3.0, 0.0], jnp.float32)
PLAIN = AttentionSpec(scale=0.3)
NONE = AttentionExtras()
CAPPED = AttentionSpec(scale=0.3, window=5, soft_cap=1.7)


def expected_words(batch: Batch, spec: AttentionSpec, extras: AttentionExtras) -> tuple[np.ndarray, np.ndarray]:
    """Words of output and LSE of every token that sees something, by `exact_attention`."""
    outs, lses = [], []
    for queries, keys, values in zip(batch.queries, batch.keys, batch.values):
        group = queries.shape[1] // keys.shape[1]
        for i, query in enumerate(queries):
            position = len(keys) - len(queries) + i
            seen = slice(max(0, position + 1 - (spec.window or 10**9)), position + 1 if spec.causal else len(keys))
            for head in range(query.shape[0]):
                out, lse = attention(
                    query[head],
                    keys[seen, head // group],
                    values[seen, head // group],
                    scale=spec.scale,
                    soft_cap=spec.soft_cap,
                    sink=None if extras.sinks is None else float(extras.sinks[head]),
                    key_scale=1.0 if extras.key_scale is None else float(extras.key_scale),
                    value_scale=1.0 if extras.value_scale is None else float(extras.value_scale),
                )
                outs.append([round_to_word(x, batch.dtype) for x in out])
                lses.append(round_to_word(lse, "float32"))
    shape = (-1, batch.queries[0].shape[1])
    return np.array(outs).reshape(*shape, batch.values[0].shape[2]), np.array(lses).reshape(shape)


def assert_exact(batch: Batch, spec: AttentionSpec, extras: AttentionExtras) -> None:
    out, lse = attend(lay(batch, num_pages=24, pad=COMMON), spec, extras)
    count = sum(len(q) for q in batch.queries)
    expected = expected_words(batch, spec, extras)
    assert np.count_nonzero(bits(out[:count]) != expected[0]) == 0
    assert np.count_nonzero(bits(lse[:count]) != expected[1]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [PLAIN, CAPPED], ids=["plain", "window-cap-sinks"])
def test_bits_equal_exact_arithmetic(dtype, spec):
    batch = Batch.random([3, 1, 2], [9, 12, 2], dims=(8, 6), dtype=dtype, seed=11)
    assert_exact(batch, spec, AttentionExtras(sinks=SINKS if spec is CAPPED else None))


def test_bits_equal_exact_arithmetic_for_quantised_pages():
    batch = Batch.random([3, 1], [9, 6], dims=(8, 6), kv_dtype="float8_e4m3fn", seed=12)
    extras = AttentionExtras(key_scale=jnp.float32(0.3), value_scale=jnp.float32(1.7))
    assert_exact(batch, dataclasses.replace(CAPPED, causal=False), extras)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_cancellation_are_decided_exactly(dtype):
    """Equal keys make equal weights, so the answer is a plain mean: half of the means of two are ties.

    A sum whose order depends on where a key lies would give equal keys unequal logits, and round ties by accident.
    """
    batch = Batch.random([1, 1, 1], [2, 4, 16], heads=(4, 2), dims=(40, 64), dtype=dtype, seed=13)
    keys = [np.repeat(k[:1], len(k), axis=0) for k in batch.keys]
    values = [v.copy() for v in batch.values]
    values[2] = np.concatenate([v := values[2][:8], np.negative(v)])  # sums to zero
    batch = dataclasses.replace(batch, keys=keys, values=values)
    out, _ = attend(lay(batch, num_pages=24, pad=COMMON), PLAIN)
    ties = 0
    for row, seen in enumerate(values):
        for head in range(4):
            for e in range(64):
                mean = sum((fraction(x) for x in seen[:, head // 2, e]), Fraction(0)) / len(seen)
                word = round_to_word(mean, dtype)
                assert bits(out[row, head, e]) == word
                ties += row == 0 and fraction(np.asarray(out[row, head, e])) != mean
    assert ties > 50
    assert (bits(out[2]) == 0).all()  # and +0 at that


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_visible_token_is_returned_verbatim(dtype):
    """Every finite number, subnormals included: compilers flush those in a cast. −0 is a computed zero here, so +0."""
    random = np.random.default_rng(5)
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    sign = 1 << (31 if dtype == "float32" else 15)
    count = 8 * 2 * 2048
    words = np.arange(count) if dtype != "float32" else random.integers(0, infinity, count)
    words = np.where(words < infinity, words, words - infinity)
    words[:64] = np.arange(64)  # the smallest subnormals, and zero
    words = (words | np.where(random.random(count) < 0.5, sign, 0)).astype(np.uint32 if sign > 2**16 else np.uint16)
    values = words.view(jnp.dtype(dtype)).reshape(8, 1, 2, 2048)
    batch = Batch.random([1] * 8, [1] * 8, heads=(2, 2), dims=(2, 2048), dtype=dtype)
    out, _ = attend(lay(dataclasses.replace(batch, values=list(values)), size=1), PLAIN)
    expected = np.where(words == sign, 0, words).reshape(8, 2, 2048)
    np.testing.assert_array_equal(bits(out), expected)


def test_large_logits_lose_nothing():
    """Logits of ±10⁶ (cancelling in q·k, too) leave weights that only exact products and a float64 sum can tell."""
    batch = Batch.random([2], [6], dims=(8, 6), dtype="float32", seed=14)
    keys = batch.keys[0].copy()
    keys[:, :, 1] = -keys[:, :, 0]
    keys[:, :, :2] *= 2.0**20
    query = batch.queries[0].copy()
    query[:, :, 1] = query[:, :, 0]
    assert_exact(dataclasses.replace(batch, queries=[query], keys=[keys]), PLAIN, NONE)


@pytest.mark.parametrize("width", [72, 96])
def test_scenario_m16_head_dims_that_are_no_power_of_two(width):
    assert_exact(Batch.random([1], [3], heads=(2, 1), dims=(width, width), dtype="float32", seed=15), PLAIN, NONE)
