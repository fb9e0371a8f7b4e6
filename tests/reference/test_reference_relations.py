"""What must not matter does not: no bit moves, neither of the answer nor of the float64 value behind it.

Equal float64 words are more than the promise asks, and need no luck: a value near a rounding tie would betray any other
order of summation only once in millions of elements.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_problem import BACKEND, COMMON, DTYPES, Batch, attend, attend_float64, bits, lay

from paged.backends.protocol import AttentionExtras, Rung
from paged.common import AttentionSpec
from paged.reference import attend as definition

SPEC = AttentionSpec(scale=0.3, window=90, soft_cap=1.7)
EXTRAS = AttentionExtras(sinks=jnp.asarray(np.linspace(-1, 1, 6, dtype=np.float32)))
QUERY_LENS, KV_LENS = [130, 1, 37, 0, 1], [130, 77, 150, 33, 9]
FIRST = np.cumsum([0, *QUERY_LENS])
WIDE = {"rows": 7, "tokens": 176, "listed_pages": 140, "max_query_len": 200, "max_kv_len": 512}
PAGES = 110


@pytest.fixture(scope="module", params=DTYPES)
def batch(request) -> Batch:
    return Batch.random(QUERY_LENS, KV_LENS, heads=(6, 2), dims=(40, 24), dtype=request.param)


@pytest.fixture(scope="module")
def answer(batch):
    """Float64 words of the batch at its own, unpadded shapes."""
    return attend_float64(lay(batch, num_pages=PAGES), SPEC, EXTRAS)


def padded(batch: Batch, **options):
    """Float64 words of the tokens that are no padding, in a program of wider shapes."""
    words = attend_float64(lay(batch, **{"num_pages": PAGES, "pad": WIDE, **options}), SPEC, EXTRAS)
    return tuple(x[: sum(len(q) for q in batch.queries)] for x in words)


def assert_same(got, expected) -> None:
    for a, b in zip(got, expected):
        assert a.shape == b.shape
        assert np.count_nonzero(a != b) == 0


def test_the_same_call_twice(batch, answer):
    assert_same(attend_float64(lay(batch, num_pages=PAGES), SPEC, EXTRAS), answer)


def test_padding(batch, answer):
    laid = lay(batch, num_pages=PAGES, pad=WIDE)
    out, lse = attend_float64(laid, SPEC, EXTRAS)
    count = FIRST[-1]
    assert_same((out[:count], lse[:count]), answer)
    assert (out[count:] == 0).all()
    assert (lse[count:].view(np.float64) == -np.inf).all()


def test_scenario_b5_page_numbers(batch, answer):
    for seed in (1, 2):
        assert_same(padded(batch, seed=seed), answer)


def test_scenario_b5_order_of_rows(batch, answer):
    order = [4, 2, 0, 3, 1]
    moved = padded(batch.rows(*order))
    at = np.cumsum([0, *(QUERY_LENS[r] for r in order)])
    for i, row in enumerate(order):
        assert_same([x[at[i] : at[i + 1]] for x in moved], [x[FIRST[row] : FIRST[row + 1]] for x in answer])


def test_neighbours(batch, answer):
    for rows in ((0,), (1, 4), (2,)):
        expected = [np.concatenate([x[FIRST[r] : FIRST[r + 1]] for r in rows]) for x in answer]
        assert_same(padded(batch.rows(*rows)), expected)


def test_a_row_alone_at_shapes_of_its_own(batch, answer):
    assert_same(attend_float64(lay(batch.rows(4)), SPEC, EXTRAS), [x[FIRST[4] : FIRST[5]] for x in answer])


def test_chunks(batch, answer):
    for start, stop in ((0, 1), (1, 8), (8, 130), (129, 130)):
        assert_same(padded(batch.cut(0, start, stop)), [x[start:stop] for x in answer])


def test_page_size(batch, answer):
    size = {"float32": 1, "float16": 3, "bfloat16": 256}[batch.dtype]
    assert_same(attend_float64(lay(batch, size=size), SPEC, EXTRAS), answer)


def test_a_prefix_filled_by_another_request(batch, answer):
    """The second row's first 100 tokens are the first row's: in pages of its own, or in the other's."""
    both = batch.rows(0).and_rows(batch.cut(0, 100, 130))
    expected = [np.concatenate([x[:130], x[100:130]]) for x in answer]
    cold = lay(both, num_pages=PAGES, pad=WIDE)
    ids = cold.table.page_ids.copy()
    own = int(cold.table.page_offsets[1])
    orphaned = ids[own : own + 25].copy()
    ids[own : own + 25] = ids[:25]
    pool = jax.tree.map(lambda x: x.at[jnp.asarray(orphaned)].set(x[0]), cold.pool)  # NaN, as the sentinel holds here
    warm = dataclasses.replace(cold, pool=pool, table=dataclasses.replace(cold.table, page_ids=ids))
    for laid in (cold, warm):
        assert_same([x[:160] for x in attend_float64(laid, SPEC, EXTRAS)], expected)


def test_scenario_n1_poison_where_no_row_owns(batch, answer):
    assert not np.isnan(answer[0].view(np.float64)).any()  # `lay` fills what no row owns with NaN
    assert_same(padded(batch, poisoned=False), answer)


def test_nan_in_tokens_that_are_masked(batch, answer):
    behind = batch.cut(0, 129, 130)  # the window leaves positions 40 .. 129
    ahead = batch.cut(0, 120, 130)  # only the last of ten tokens sees position 129
    for part, hidden in ((behind, slice(0, 40)), (ahead, slice(129, 130))):
        for stored in (part.keys, part.values):
            stored[0] = stored[0].copy()
            stored[0][hidden] = np.nan
    assert_same(padded(behind), [x[129:130] for x in answer])
    out, lse = padded(ahead)
    assert_same((out[:9], lse[:9]), [x[120:129] for x in answer])
    assert np.isnan(out[9].view(np.float64)).all()


def test_scenario_b1_the_bound_on_lengths_is_no_input():
    batch = Batch.random([3, 1], [9, 40], heads=(6, 2))
    results = []
    for bound in (64, 4096):
        out, lse = attend(lay(batch, num_pages=24, pad=COMMON | {"max_kv_len": bound}), SPEC, EXTRAS)
        results.append([bits(out), bits(lse)])
    assert_same(*results)


def test_scenario_n4_padded_queries_that_hold_nan():
    batch = Batch.random([3, 1], [9, 40], heads=(6, 2))
    laid = lay(batch, num_pages=24, pad=COMMON)
    assert np.isnan(np.asarray(laid.query[4:]).astype(np.float32)).all()
    out, lse = attend(laid, SPEC, EXTRAS)
    assert not np.isnan(out[:4].astype(np.float32)).any()
    assert (bits(out[4:]) == 0).all()
    assert (lse[4:] == -np.inf).all()


def test_compiled_or_not(monkeypatch):
    """Operation by operation, as XLA is asked for one primitive at a time, against one program."""
    monkeypatch.setattr(definition, "_POSITIONS", 8)  # fewer shapes to compile one by one
    monkeypatch.setattr(definition, "_TOKENS", 4)
    laid = lay(Batch.random([6], [30], heads=(6, 2), dims=(10, 6), dtype="float32"))
    compiled = attend_float64(laid, SPEC, EXTRAS)
    with jax.disable_jit():
        assert_same(attend_float64(laid, SPEC, EXTRAS), compiled)


def test_layers_at_once_and_one_after_the_other():
    """Each layer reads its own pages, its offset traced, under vmap and inside a scan."""
    laid = [lay(Batch.random([2], [9], heads=(6, 2), seed=seed)) for seed in range(3)]
    rung, num_pages = Rung.of(laid[0].table), laid[0].layout.num_pages
    pool = jax.tree.map(lambda *x: jnp.concatenate(x), *(x.pool for x in laid))
    expected = [np.stack(x) for x in zip(*([bits(x) for x in attend(one, SPEC, EXTRAS)] for one in laid))]
    assert len(np.unique(expected[1][:, 0, 0])) == 3

    def layer(index, query):
        arrays = BACKEND.plan_arrays(rung, laid[0].arrays)
        return BACKEND.attend(query, pool, index * num_pages, rung, arrays, SPEC, EXTRAS)

    layers = jnp.arange(3, dtype=jnp.int32), jnp.stack([x.query for x in laid])
    for many in (jax.vmap(layer), lambda *x: jax.lax.map(lambda x: layer(*x), x)):
        for got, words in zip(jax.jit(many)(*layers), expected):
            assert np.count_nonzero(bits(got) != words) == 0
