"""Numbers of backend `cpu`: element types bit by bit, e^x down to subnormal numbers, tanh under a soft cap."""

import jax.numpy as jnp
import numpy as np
import pytest

from paged.backends.cpu import ops
from paged.backends.protocol import AttentionExtras, KvArrays, TableArrays
from paged.common import AttentionSpec

WIDE = 512


def rows_of(lengths):
    """One query a row, every row on one page of its own: page r is row r's."""
    count = len(lengths)
    each = np.arange(count + 1, dtype=np.int32)
    return TableArrays(
        kv_lens=jnp.asarray(lengths, jnp.int32),
        last_page_len=jnp.asarray(lengths, jnp.int32),
        query_offsets=jnp.asarray(each),
        page_offsets=jnp.asarray(each),
        page_ids=jnp.asarray(each[:-1]),
        write_slots=jnp.full(count, -1, jnp.int32),
    )


def words(values):
    """An array of any element type as unsigned words."""
    return jnp.asarray(np.ascontiguousarray(values).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[values.itemsize]))


def only_value(values, dtype="float32"):
    """Attention of queries of `dtype` that see one position each: its value. `values` is (rows, width)."""
    rows, width = values.shape
    pool = KvArrays(
        words(np.zeros((rows, 1, 1, 8), values.dtype)),
        words(values.reshape(rows, 1, 1, width)),
        words_of=values.dtype.name,
    )
    query, table = jnp.zeros((rows, 1, 8), dtype), rows_of([1] * rows)
    out, lse = ops.attend(query, pool, 0, table, AttentionSpec(scale=1.0), AttentionExtras())
    assert not np.asarray(lse).any()
    return np.asarray(out).reshape(rows, width)


def same_numbers(found, wanted):
    """Bit for bit but for the sign of zero, which a sum loses, and for which NaN it is."""
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    found, wanted = found[~nan].astype(np.float32), wanted[~nan].astype(np.float32)
    np.testing.assert_array_equal((found + np.float32(0)).view(np.uint32), (wanted + np.float32(0)).view(np.uint32))


@pytest.mark.parametrize("dtype", ops.KINDS[1:])
def test_every_element_is_read_as_the_number_it_is(dtype):
    kind = jnp.dtype(dtype)
    count = 2 ** (8 * kind.itemsize)
    patterns = np.arange(count).astype({1: np.uint8, 2: np.uint16}[kind.itemsize]).view(kind)
    values = patterns.reshape(-1, min(WIDE, count))
    same_numbers(only_value(values), values.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outputs_are_rounded_to_nearest_with_ties_to_even(dtype):
    """Every number of the type, the ties above it, and the floats on both sides of each."""
    every = np.arange(2**16).astype(np.uint16).view(jnp.dtype(dtype)).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    ties = (every[1:].astype(np.float64) + every[:-1]) / 2
    near = ties.astype(np.float32)  # exact: one bit more than the type has
    floats = np.concatenate([every, near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, -np.float32(9))])
    top = np.float32(65504 if dtype == "float16" else 3.3895314e38)
    edges = [top, np.nextafter(top, np.float32(np.inf)), 65519.996, 65520.0, 3.4028235e38, np.inf, -np.inf, np.nan]
    floats = np.concatenate([floats, np.asarray(edges, np.float32)])
    values = np.zeros(-(-floats.size // WIDE) * WIDE, np.float32)
    values[: floats.size] = floats
    values = values.reshape(-1, WIDE)
    with np.errstate(over="ignore"):
        wanted = values.astype(jnp.dtype(dtype))
    same_numbers(only_value(values, dtype), wanted)


def two_positions(logits, values, spec):
    """Softmax of (0, logit) over two positions with `values` (0, value); a row for each logit."""
    rows = len(logits)
    keys, stored = np.zeros((rows, 2, 1, 8), np.float32), np.zeros((rows, 2, 1, 8), np.float32)
    keys[:, 1, 0, 0], stored[:, 1, 0, 0] = logits, values
    query = jnp.zeros((rows, 1, 8), jnp.float32).at[:, :, 0].set(1)
    pool = KvArrays(words(keys), words(stored), words_of="float32")
    out, lse = ops.attend(query, pool, 0, rows_of([2] * rows), spec, AttentionExtras())
    return np.asarray(out)[:, 0, 0].astype(np.float64), np.asarray(lse)[:, 0].astype(np.float64)


def test_weights_are_exponentials_to_the_last_places_subnormal_ones_included():
    logits = np.linspace(-103.9, 0, 20000, dtype=np.float32)
    scale = np.where(logits < -40, np.float32(2.0**120), np.float32(1))  # what a small weight is seen through
    found, lse = two_positions(logits, scale, AttentionSpec(scale=1.0))
    exact = np.exp(logits.astype(np.float64))
    wanted = exact * scale / (1 + exact)
    ulp = np.maximum(2.0 ** np.floor(np.log2(exact) - 23), 2.0**-149) / exact
    assert (np.abs(found - wanted) <= wanted * (1.1 * ulp + 2.0**-22)).all()
    subnormal = exact < 2.0**-126
    assert subnormal.sum() > 3000
    assert (found[subnormal] > 0).all()
    np.testing.assert_allclose(lse, np.log1p(exact), rtol=2.0**-22, atol=2.0**-22)


def test_a_soft_cap_is_a_tanh():
    logits = np.linspace(-60, 60, 20001, dtype=np.float32)
    for cap in (1.0, 30.0):
        capped = cap * np.tanh(logits.astype(np.float64) / cap)
        _, lse = two_positions(logits, np.ones_like(logits), AttentionSpec(scale=1.0, soft_cap=cap))
        np.testing.assert_allclose(lse, np.logaddexp(0, capped), rtol=2.0**-21, atol=cap * 2.0**-22 + 2.0**-22)
