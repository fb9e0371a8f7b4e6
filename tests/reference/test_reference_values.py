"""Values worked out by hand, and scenarios from the field that the reference has to get right."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from reference_problem import BACKEND, COMMON, Batch, attend, bits, lay, poison, table_arrays

from paged.backends.protocol import AttentionExtras, Rung
from paged.common import AttentionSpec, StorageLayout, build_page_table

PLAIN = AttentionSpec(scale=1.0)


def means(value_rows, *, query_lens, heads=(1, 1), dtype="float32", kv_dtype=None) -> Batch:
    """Rows with query 0, so that attention is the mean of the visible values; `value_rows[r]` has one per token."""
    kv_dtype = kv_dtype or dtype
    numbers = [np.asarray(v, np.float32).reshape(-1, 1, 1) for v in value_rows]
    values = [np.tile(v, (1, heads[1], 2)).astype(jnp.dtype(kv_dtype)) for v in numbers]
    return Batch(
        queries=[np.zeros((q, heads[0], 2), jnp.dtype(dtype)) for q in query_lens],
        keys=[np.ones_like(v) for v in values],
        values=values,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


def one_token(logits, values) -> Batch:
    """One query [1, 0] over keys whose first element is the wanted q·k."""
    batch = means([values], query_lens=[1])
    key = np.zeros_like(batch.keys[0])
    key[:, 0, 0] = logits
    return dataclasses.replace(batch, queries=[np.array([[[1, 0]]], np.float32)], keys=[key])


def answers(batch: Batch, spec=PLAIN, extras=None, *, size=4) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE, the padding cut off after it was found to be zero and −∞."""
    out, lse = attend(lay(batch, size=size, num_pages=24, pad=COMMON), spec, extras)
    count = sum(len(q) for q in batch.queries)
    assert (bits(out[count:]) == 0).all()
    assert (lse[count:] == -np.inf).all()
    return out[:count], lse[:count]


def outputs(batch: Batch, spec=PLAIN, extras=None, *, size=4) -> list[float]:
    return answers(batch, spec, extras, size=size)[0][:, 0, 0].astype(np.float64).tolist()


def test_scenario_l1_full_last_page():
    table = build_page_table(query_lens=[1], kv_lens=[8], pages=[[10, 11]], tokens_per_page=4, num_pages=12)
    assert table.last_page_len.tolist() == [4]
    assert table.write_slots.tolist() == [47]
    layout = StorageLayout(num_layers=1, num_pages=12, tokens_per_page=4, num_kv_heads=1, head_dim=2, dtype="float32")
    pool = poison(layout)
    keys, values = np.array(pool.keys).view(np.float32), np.array(pool.values).view(np.float32)
    keys[10], values[10] = 0, np.arange(4).reshape(4, 1, 1)
    keys[11, :3], values[11, :3] = 0, np.arange(4, 7).reshape(3, 1, 1)
    pool = dataclasses.replace(pool, keys=jnp.asarray(bits(keys)), values=jnp.asarray(bits(values)))
    static = BACKEND.static_plan(Rung.of(table), PLAIN)
    arrays = BACKEND.plan_arrays(static, table_arrays(table))
    new = jnp.full((1, 1, 2), 7, jnp.float32)
    pool = BACKEND.append(pool, jnp.zeros_like(new), new, jnp.asarray(table.write_slots), static, arrays)
    query = jnp.ones((1, 1, 2), jnp.float32)
    out, lse = BACKEND.attend(query, pool, 0, static, arrays, PLAIN, AttentionExtras())
    assert np.asarray(out).tolist() == [[[3.5, 3.5]]]  # the mean of 0 .. 7, its own token included
    assert np.asarray(lse).tolist() == [[np.float32(math.log(8))]]


def test_scenario_l3_two_requests_shorter_than_one_page():
    batch = Batch.random([1], [1], dtype="float16").rows(0, 0)
    out, lse = answers(batch, size=2)
    assert np.count_nonzero(out[0]) == out[0].size
    np.testing.assert_array_equal(bits(out[0]), bits(out[1]))
    np.testing.assert_array_equal(bits(lse[0]), bits(lse[1]))


def test_scenario_l7_large_pages():
    out, _ = attend(lay(means([range(300)], query_lens=[1]), size=256), PLAIN)
    assert out.tolist() == [[[149.5, 149.5]]]


def test_scenario_l13_empty_row():
    batch = Batch.random([1, 2], [3, 0], dtype="float16")
    for extras in (AttentionExtras(), AttentionExtras(sinks=jnp.ones(4, jnp.float32))):
        out, lse = answers(batch, PLAIN, extras)
        assert (bits(out[1:]) == 0).all()
        assert (lse[1:] == -np.inf).all()
        alone = answers(batch.rows(0), PLAIN, extras)
        np.testing.assert_array_equal(bits(out[:1]), bits(alone[0]))
        np.testing.assert_array_equal(bits(lse[:1]), bits(alone[1]))


def test_scenario_l14_row_without_query_tokens():
    batch = means([[1, 3], [5, 5, 5], [2, 4, 9]], query_lens=[1, 0, 2])
    assert outputs(batch) == [2.0, 3.0, 5.0]


@pytest.mark.parametrize(("query_lens", "kv_lens"), [([0], [3]), ([], [])])
def test_a_step_without_tokens_or_rows_or_pages(query_lens, kv_lens):
    laid = lay(Batch.random([1], [3]), num_pages=8)
    pages = [[1]] * len(kv_lens)
    table = build_page_table(query_lens=query_lens, kv_lens=kv_lens, pages=pages, tokens_per_page=4, num_pages=8)
    out, lse = attend(dataclasses.replace(laid, query=laid.query[:0], table=table), PLAIN)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_scenario_a1_page_ids_beyond_16_bits_and_offsets_beyond_31():
    layout = StorageLayout(
        num_layers=1, num_pages=131_074, tokens_per_page=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    slot = 131_072 * 16
    assert layout.page_and_offset(slot) == (131_072, 0)
    assert 131_072 * 16 * 8 * 128 == 2**31  # the element's offset, which nothing of ours ever forms
    # The same page numbers in a pool that fits a test: page 131,072 holds ones, every other page nines.
    small = dataclasses.replace(layout, tokens_per_page=1, num_kv_heads=1, head_dim=2)
    table = build_page_table(
        query_lens=[1], kv_lens=[1], pages=[[131_072]], tokens_per_page=1, num_pages=small.num_pages
    )
    nines = jnp.full((small.num_pages, 1, 1, 2), 0x4110, jnp.uint16)
    pool = dataclasses.replace(poison(dataclasses.replace(small, num_pages=2)), keys=nines, values=nines)
    static = BACKEND.static_plan(Rung.of(table), PLAIN)
    arrays = BACKEND.plan_arrays(static, table_arrays(table))
    ones = jnp.ones((1, 1, 2), jnp.bfloat16)
    pool = BACKEND.append(pool, ones, ones, jnp.asarray(table.write_slots), static, arrays)
    out, _ = BACKEND.attend(ones, pool, 0, static, arrays, PLAIN, AttentionExtras())
    assert np.asarray(out).astype(np.float32).tolist() == [[[1, 1]]]
    assert np.count_nonzero(np.asarray(pool.values) != 0x4110) == 2


def test_scenario_m1_scale_is_applied_once():
    batch = one_token([4, 0], [1, 0])  # logits [2, 0]
    assert outputs(batch, AttentionSpec(scale=0.5)) == [pytest.approx(0.880797, abs=1e-6)]
    _, lse = answers(batch, AttentionSpec(scale=0.5))
    assert lse[0, 0] == np.float32(math.log(math.exp(2) + 1))


def test_the_scale_is_the_nearest_float32():
    scale = 128**-0.5
    _, lse = answers(one_token([1000, 0], [1, 0]), AttentionSpec(scale=scale))
    assert lse[0, 0] == np.float32(1000 * float(np.float32(scale)))  # beside it, e^-88 is nothing
    assert lse[0, 0] != np.float32(1000 * scale)


def test_scenario_m2_cap_after_scale_and_before_mask():
    capped = AttentionSpec(scale=0.5, soft_cap=1.0)
    assert outputs(one_token([4, 0], [1, 0]), capped) == [pytest.approx(0.723927, abs=1e-6)]  # 1 / (1 + e^-tanh 2)
    # Two tokens, both queries 0: the first must not see the second, whose lane a cap after the mask would make −1.
    assert outputs(means([[0, 1]], query_lens=[2]), capped) == [0.0, 0.5]


def test_scenario_m3_window_counts_the_token_itself():
    window = AttentionSpec(scale=1.0, window=3)
    prefill = outputs(means([range(6)], query_lens=[6]), window)
    assert prefill == [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]
    assert outputs(means([range(6)], query_lens=[1]), window) == [4.0]


def test_without_causality_the_past_side_alone_is_cut():
    batch = means([range(6)], query_lens=[3])
    assert outputs(batch, AttentionSpec(scale=1.0, causal=False)) == [2.5] * 3
    assert outputs(batch, AttentionSpec(scale=1.0, causal=False, window=2)) == [3.5, 4.0, 4.5]


def test_scenario_m8_sink_is_counted_once():
    spec = AttentionSpec(scale=0.125, soft_cap=1.0)
    batch = means([[1, 1]], query_lens=[1])
    out, lse = answers(batch, spec, AttentionExtras(sinks=jnp.zeros(1, jnp.float32)), size=1)
    assert out.tolist() == [[[np.float32(2 / 3)] * 2]]
    assert lse.tolist() == [[np.float32(math.log(3))]]
    # Neither scaled nor capped, and larger than any logit: the weights are 1 / (2 + e^3).
    large = AttentionExtras(sinks=jnp.full(1, 3, jnp.float32))
    assert outputs(batch, spec, large, size=1) == [pytest.approx(2 / (2 + math.exp(3)), rel=1e-7)]


def test_scenario_m9_sink_with_quantised_pages():
    extras = AttentionExtras(sinks=jnp.zeros(1, jnp.float32), key_scale=jnp.float32(0.25), value_scale=jnp.float32(0.5))
    batch = means([[2, 2]], query_lens=[1], kv_dtype="float8_e4m3fn")
    assert outputs(batch, PLAIN, extras) == [float(np.float32(2 / 3))]


def test_scenario_m13_lse_of_nothing():
    out, lse = answers(means([[], []], query_lens=[2, 1]))
    assert (bits(out) == 0).all()
    assert (lse == -np.inf).all()


def test_scenario_m14_lse_is_natural():
    # Value 0 alone, values 1 three times: LSE ln 1 and ln 3, so the first part weighs 1/4 in a merge.
    out, lse = answers(means([[0], [1, 1, 1]], query_lens=[1, 1]))
    parts = np.exp(lse[:, 0].astype(np.float64))
    assert parts[0] / parts.sum() == pytest.approx(0.25, rel=1e-7)
    assert (parts * out[:, 0, 0]).sum() / parts.sum() == pytest.approx(0.75, rel=1e-7)
    assert lse[0, 0] == 0
    assert not np.signbit(lse[0, 0])


@pytest.mark.parametrize("heads", [(6, 2), (48, 2)])
def test_scenario_m15_query_head_reads_its_group(heads):
    values = np.tile(np.arange(heads[1], dtype=np.float32).reshape(1, -1, 1), (3, 1, 2))
    batch = dataclasses.replace(means([[0, 0, 0]], query_lens=[1], heads=heads), values=[values])
    out, _ = attend(lay(batch), PLAIN)
    group = heads[0] // heads[1]
    assert out[0, :, 0].tolist() == [h // group for h in range(heads[0])]


def test_scenario_f1_the_encoding_is_part_of_the_dtype():
    expected = {"float8_e4m3fn": (1.0, 0.0), "float8_e4m3fnuz": (0.5, None)}
    for kv_dtype, (one, zero) in expected.items():
        batch = means([[1], [1]], query_lens=[1, 1], kv_dtype=kv_dtype)
        words = [np.full((1, 1, 2), word, np.uint8).view(batch.values[0].dtype) for word in (0x38, 0x80)]
        got = outputs(dataclasses.replace(batch, values=words))
        assert got[0] == one
        assert math.isnan(got[1]) if zero is None else got[1] == zero and not np.signbit(got[1])


def test_scenario_f2_scales_of_both_kinds():
    extras = AttentionExtras(key_scale=jnp.float32(0.25), value_scale=jnp.float32(0.5))
    batch = one_token([8, 0], [2, 0])
    stored = {n: [x.astype(np.int8) for x in getattr(batch, n)] for n in ("keys", "values")}
    quantised = dataclasses.replace(batch, kv_dtype="int8", **stored)
    assert outputs(quantised, PLAIN, extras) == [pytest.approx(0.880797, abs=1e-6)]  # logits [2, 0], values [1, 0]
