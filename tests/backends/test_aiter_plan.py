"""What AITER's kernels are given: metadata without empty rows, the kernel of a rung, refusals and the declaration."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_steps import random_table

from paged.backends.aiter import AiterBackend, known, plan
from paged.backends.metadata import from_vllm, table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, Rung, TableArrays
from paged.backends.step import check_step, plan_step
from paged.common import AttentionSpec, StorageLayout
from paged.common.errors import InvalidInputError, UnsupportedError

BACKEND = AiterBackend(lower_only=True)
SPEC = AttentionSpec(scale=0.125)
PAGES, SIZE = 40, 16


def heads(rung, group=4, head_dim=128, dtype="bfloat16"):
    return rung.with_heads(group_size=group, head_dim=head_dim, kv_dtype=dtype)


def rung_of(**changes):
    base = {"rows": 4, "tokens": 4, "listed_pages": 20, "max_query_len": 1, "max_kv_len": 300}
    return heads(Rung(**{**base, "tokens_per_page": SIZE, "num_pages": PAGES, **changes}))


plan_of = jax.jit(BACKEND.plan_arrays, static_argnums=0)
"""One program for all steps of one rung."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_metadata_of_any_step_is_what_the_kernels_can_take(rows, seed):
    query, kv = [q for q, _ in rows], [0 if n < q else n for q, n in rows]
    table = random_table(np.random.default_rng(seed), query, kv, tokens_per_page=SIZE, num_pages=PAGES)
    table = table.pad(rows=6, tokens=17, listed_pages=20, max_query_len=3, max_kv_len=64)
    static = BACKEND.static_plan(heads(Rung.of(table)), SPEC)
    found = jax.tree.map(np.asarray, plan_of(static, table_arrays(table)))
    lens = np.array(table.kv_lens)
    counts = np.maximum(-(-lens // SIZE), 1)
    # No row is empty, lengths follow from pages used, and a row without tokens has the sentinel with one token.
    assert np.diff(found.page_offsets).tolist() == counts.tolist()
    assert found.last_page_len.tolist() == [(n - 1) % SIZE + 1 if n else 1 for n in lens]
    for row in range(table.num_rows):
        mine = found.page_ids[found.page_offsets[row] : found.page_offsets[row + 1]].tolist()
        assert mine == (table.pages_of(row).tolist() if lens[row] else [plan.SENTINEL_PAGE])
    # The list is longer than what is used by the prefetch margin, and every entry of it is a page.
    assert len(found.page_ids) - found.page_offsets[-1] >= plan.PREFETCH_TOKENS // SIZE
    assert set(found.page_ids[found.page_offsets[-1] :].tolist()) == {plan.SENTINEL_PAGE}
    assert ((found.page_ids >= 0) & (found.page_ids < PAGES)).all()
    rows_of_tokens = np.repeat(np.arange(table.num_rows), table.query_lens)
    live = np.zeros(table.num_tokens, bool)
    live[: len(rows_of_tokens)] = lens[rows_of_tokens] > 0
    assert found.live.tolist() == live.tolist()
    assert found.token_row[live].tolist() == rows_of_tokens[live[: len(rows_of_tokens)]].tolist()


def test_pages_held_and_not_reached_do_not_count():
    """A list with a spare page after a row's used ones: the kernel would read a longer row, so lengths decide."""
    arrays = TableArrays(
        kv_lens=jnp.asarray([17, 16], jnp.int32),
        last_page_len=jnp.asarray([1, 16], jnp.int32),
        query_offsets=jnp.asarray([0, 1, 2], jnp.int32),
        page_offsets=jnp.asarray([0, 4, 7], jnp.int32),
        page_ids=jnp.asarray([5, 6, 7, 8, 9, 10, 11], jnp.int32),
        write_slots=jnp.asarray([96, 159], jnp.int32),
    )
    rung = rung_of(rows=2, tokens=2, listed_pages=7, max_kv_len=64)
    found = plan_of(BACKEND.static_plan(rung, SPEC), arrays)
    assert np.asarray(found.page_offsets).tolist() == [0, 2, 3]
    assert np.asarray(found.page_ids)[:3].tolist() == [5, 6, 9]
    assert np.asarray(found.last_page_len).tolist() == [1, 16]


def test_tokens_past_the_last_query_are_never_written():
    """vLLM-shaped metadata with padding tokens: they have no slot, so the append skips them."""

    @dataclasses.dataclass
    class Metadata:
        block_tables: np.ndarray
        seq_lens: np.ndarray
        query_start_loc: np.ndarray

    step = Metadata(np.array([[3, 4], [5, 0]]), np.array([20, 7]), np.array([0, 1, 2]))
    arrays, rung = from_vllm(step, num_tokens=6, tokens_per_page=SIZE, num_pages=PAGES, max_query_len=1, max_kv_len=32)
    assert np.asarray(arrays.write_slots).tolist() == [4 * 16 + 3, 5 * 16 + 6, -1, -1, -1, -1]
    found = plan_of(BACKEND.static_plan(heads(rung), SPEC), arrays)
    assert np.asarray(found.live).tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("changes", "spec", "kernel", "why"),
    [
        ({}, SPEC, "decode", ""),
        ({"max_query_len": 2}, SPEC, "prefill", "rows of up to 2 query tokens"),
        # As many tokens as rows may be rows of two and of none: only the rung's bound says that all are single.
        ({"rows": 2, "tokens": 2, "max_query_len": 2}, SPEC, "prefill", "rows of up to 2 query tokens"),
        ({}, AttentionSpec(scale=1.0, window=19), "prefill", "a window of 19"),
        ({"group_size": 3}, SPEC, "prefill", "3 query heads per KV head"),
        ({"group_size": 8}, SPEC, "decode", ""),
        ({"max_kv_len": 16384}, SPEC, "decode", ""),
        ({"max_kv_len": 16385}, SPEC, "prefill", "rows of up to 16385 tokens"),
        ({"rows": 0}, SPEC, None, ""),
        ({"tokens": 0}, SPEC, None, ""),
    ],
)
def test_the_kernel_follows_from_the_rung(changes, spec, kernel, why):
    group = changes.get("group_size", 4)
    rung = heads(rung_of(**{k: v for k, v in changes.items() if k != "group_size"}), group=group)
    static = BACKEND.static_plan(rung, spec)
    assert (static.kernel, static.why) == (kernel, why)
    assert bool(static.func_name) == (kernel == "decode")
    assert static.listed == rung.listed_pages + rung.rows + 16


def test_decode_kernels_have_the_names_that_the_vendor_s_build_gives():
    """Written down in the handlers from the vendor's formula; both spellings must agree on all six."""
    from conformance.executors.cpu_handlers import DEFAULT_DIRECTORY

    text = (DEFAULT_DIRECTORY / "targets.h").read_text()
    written = set(re.findall(r"pa_ragged_[0-9a-f]{32}", text))
    ours = {
        BACKEND.static_plan(heads(rung_of(), group=group, dtype=dtype), SPEC).func_name
        for group in plan.DECODE_GROUPS
        for dtype in ("bfloat16", "float16")
    }
    assert ours == written
    assert len(ours) == 6


def test_workspace_and_partitions():
    static = BACKEND.static_plan(rung_of(max_kv_len=513), SPEC)
    assert static.partitions == 3
    assert plan.workspace_bytes(5, 32, 128, 3, 2) == 8 * 5 * 32 * 3 + 2 * 5 * 32 * 3 * 128


def layout(**changes):
    base = {"num_layers": 2, "num_pages": 10, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    return StorageLayout(**{"tokens_per_page": 16, **base, **changes})


@pytest.mark.parametrize(
    ("capability", "changes", "more"),
    [
        ("page_sizes", {"tokens_per_page": 32}, {}),
        ("page_sizes", {"tokens_per_page": 1}, {}),
        ("head_dims", {"head_dim": 64}, {}),
        ("head_dims", {"value_head_dim": 64}, {}),
        ("dtypes", {}, {"dtype": "float32"}),
        ("kv_dtypes", {"dtype": "float8_e4m3fnuz"}, {}),
        ("soft_cap", {}, {"specs": [AttentionSpec(scale=1.0, soft_cap=30.0)]}),
        ("non_causal", {}, {"specs": [AttentionSpec(scale=1.0, causal=False)]}),
        ("sinks", {}, {"sinks": True}),
        ("kv_scales", {}, {"kv_scales": True}),
        ("lse", {}, {"lse": True}),
        ("max_page_id", {"num_pages": 2**16 + 1}, {}),
        ("max_pool_bytes", {"num_pages": 2**15, "num_kv_heads": 16}, {}),
        ("platforms", {}, {"platform": "cuda"}),
    ],
)
def test_more_than_the_kernels_do_is_refused_by_name(capability, changes, more):
    asked = {"specs": [SPEC], "dtype": "bfloat16", **more}
    found = layout(**changes)
    with pytest.raises(UnsupportedError) as info:
        check_step(BACKEND, found, asked.pop("specs"), num_query_heads=2 * found.num_kv_heads, **asked)
    assert info.value.capability == capability
    check_step(BACKEND, layout(), [SPEC], num_query_heads=8, dtype="bfloat16", batches=("prefill", "decode", "mixed"))


def test_large_pools_must_be_asked_for():
    large = AiterBackend(lower_only=True, large_pools=True)
    big = layout(num_pages=2**17, num_kv_heads=16)
    check_step(large, big, [SPEC], num_query_heads=16, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="max_page_id"):
        check_step(BACKEND, big, [SPEC], num_query_heads=16, dtype="bfloat16")
    # Limits are of one layer's array, so depth does not meet them.
    deep = layout(num_layers=80, num_pages=2**15, num_kv_heads=8)
    check_step(BACKEND, deep, [SPEC], num_query_heads=64, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="max_page_id"):
        check_step(
            AiterBackend(lower_only=True, pool_layout="stacked"), deep, [SPEC], num_query_heads=64, dtype="bfloat16"
        )


def four_rows():
    """Plan of four rows of one token, and its arrays."""
    table = random_table(np.random.default_rng(0), [1] * 4, [5] * 4, tokens_per_page=SIZE, num_pages=PAGES)
    static = BACKEND.static_plan(heads(Rung.of(table)), SPEC)
    return table_arrays(table), static, plan_of(static, table_arrays(table))


def attend(static, arrays, spec=SPEC, dtype=jnp.bfloat16):
    pool = KvArrays(jnp.zeros((8, 16, 2, 128), jnp.bfloat16), jnp.zeros((8, 16, 2, 128), jnp.bfloat16))
    return BACKEND.attend(jnp.zeros((4, 8, 128), dtype), pool, 0, static, arrays, spec, AttentionExtras())


def test_a_soft_cap_is_refused_wherever_it_could_slip_in():
    capped = AttentionSpec(scale=1.0, soft_cap=30.0)
    table, static, arrays = four_rows()
    with pytest.raises(UnsupportedError, match="soft_cap"):
        plan_step(BACKEND, table, static.rung, capped)
    with pytest.raises(UnsupportedError, match=r"would ignore 30\.0") as info:
        BACKEND.static_plan(static.rung, capped)
    assert info.value.capability == "soft_cap"
    with pytest.raises(UnsupportedError, match="would ignore"):
        attend(static, arrays, capped)


def test_arrays_that_the_handlers_would_not_check_are_checked_here():
    _, static, arrays = four_rows()
    with pytest.raises(UnsupportedError, match="pools of the query's dtype; got bfloat16 and float16"):
        attend(static, arrays, dtype=jnp.float16)
    pool = KvArrays(jnp.zeros((8, 16, 2, 128), jnp.bfloat16), jnp.zeros((8, 16, 2, 64), jnp.bfloat16))
    key, slots = jnp.zeros((4, 2, 128), jnp.bfloat16), jnp.zeros(4, jnp.int32)
    with pytest.raises(UnsupportedError, match="K and V pools of one shape"):
        BACKEND.append(pool, key, key[..., :64], slots, static, arrays)
    with pytest.raises(InvalidInputError, match="value is float16"):
        BACKEND.append(KvArrays(pool.keys, pool.keys), key, key.astype(jnp.float16), slots, static, arrays)
    with pytest.raises(InvalidInputError, match=r"Rung\.with_heads"):
        BACKEND.static_plan(dataclasses.replace(rung_of(), group_size=None), SPEC)


def test_the_declaration():
    declared = BACKEND.capabilities
    assert declared.features == {"window", "prefill", "decode", "mixed"}
    assert declared.promises == {"deterministic"}
    assert (declared.poison, declared.pool_layout) == ("finite", "per_layer")
    assert (declared.numerics, declared.decode_numerics) == ("N1", "N2")
    assert declared.platforms == {"gpu", "rocm"}
    assert AiterBackend(platform="cpu").capabilities.platforms == {"cpu"}
    assert BACKEND.route == "paged-kv"


def test_known_failures_take_features_away_and_the_rest_still_works():
    assert known.applying("7.2.1", ["gfx942"]) == known.applying("7.1.0", ["gfx950"]) == known.applying(None, []) == ()
    (found,) = known.applying("7.2.3", ["gfx942", "gfx950"])
    assert found.reason
    assert found.source
    narrowed = AiterBackend(lower_only=True, without=frozenset(found.without))
    assert narrowed.capabilities.features == {"decode"}
    assert narrowed.static_plan(rung_of(), SPEC).kernel == "decode"
    with pytest.raises(UnsupportedError, match="prefill kernel for 3 query heads per KV head") as info:
        narrowed.static_plan(heads(rung_of(), group=3), SPEC)
    assert info.value.capability == "prefill"
    with pytest.raises(UnsupportedError, match="window"):
        check_step(narrowed, layout(), [AttentionSpec(scale=1.0, window=8)], num_query_heads=8, dtype="bfloat16")
