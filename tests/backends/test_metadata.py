"""Step metadata on the device: from a page table, and from a vLLM-shaped object under jit (requirement B4)."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import random_table

from paged.backends.metadata import from_vllm, pack_table, step_metadata, table_arrays, unpack_table
from paged.backends.moves import rows_of
from paged.backends.protocol import Rung, TableArrays
from paged.common import build_page_table
from paged.common.errors import InvalidInputError

SIZE, NUM_PAGES, WIDTH = 4, 40, 5
GEOMETRY = {
    "num_tokens": 12,
    "tokens_per_page": SIZE,
    "num_pages": NUM_PAGES,
    "max_query_len": 12,
    "max_kv_len": SIZE * WIDTH,
}


def vllm_shaped(query_lens, kv_lens, *, garbage, seed=0):
    """The object, and the `PageTable` that means the same; table entries past the used pages hold `garbage`."""
    table = random_table(np.random.default_rng(seed), query_lens, kv_lens, tokens_per_page=SIZE, num_pages=NUM_PAGES)
    blocks = np.full((len(kv_lens), WIDTH), garbage, np.int64)
    for row in range(len(kv_lens)):
        blocks[row, : table.pages_of(row).shape[0]] = table.pages_of(row)
    metadata = SimpleNamespace(
        block_tables=blocks, seq_lens=np.asarray(kv_lens, np.int64), query_start_loc=np.asarray(table.query_offsets)
    )
    width = len(kv_lens) * WIDTH
    expected = table.pad(
        rows=table.num_rows, tokens=12, listed_pages=width, max_query_len=12, max_kv_len=GEOMETRY["max_kv_len"]
    )
    return metadata, expected


def assert_same(found: TableArrays, expected) -> None:
    for field in dataclasses.fields(TableArrays):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), err_msg=field.name)


@functools.partial(jax.jit, static_argnames=tuple(GEOMETRY))
def under_jit(blocks, seq_lens, starts, **geometry):
    metadata = SimpleNamespace(block_tables=blocks, seq_lens=seq_lens, query_start_loc=starts)
    return from_vllm(metadata, **geometry)[0]


def traced(metadata, **geometry):
    """`from_vllm` with every value traced."""
    arrays = (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc)
    clipped = (jnp.asarray(np.clip(array, -(2**31), 2**31 - 1), jnp.int32) for array in arrays)
    return under_jit(*clipped, **(GEOMETRY | geometry))


def test_packing_is_one_int32_vector_and_loses_nothing():
    table = random_table(np.random.default_rng(1), [1, 3, 0], [9, 3, 5], tokens_per_page=SIZE, num_pages=NUM_PAGES)
    vector, rung = pack_table(table)
    assert vector.dtype == np.int32
    assert vector.ndim == 1
    assert rung == Rung.of(table)
    assert_same(jax.jit(unpack_table, static_argnums=1)(vector, rung), table)
    assert_same(table_arrays(table), table)
    with pytest.raises(InvalidInputError, match=rf"packs into {vector.size} words, got {vector.size - 1}"):
        unpack_table(jnp.asarray(vector[:-1]), rung)


@pytest.mark.parametrize("garbage", [-1, 0, 7, 2**31 - 1, -(2**40), 2**40])
def test_unused_table_entries_do_not_matter(garbage):
    metadata, expected = vllm_shaped([1, 0, 5, 2, 0], [9, 4, 5, 20, 0], garbage=garbage)
    assert_same(from_vllm(metadata, **GEOMETRY)[0], expected)
    assert_same(traced(metadata), expected)


def test_one_program_serves_every_step_of_a_shape():
    before = under_jit._cache_size()
    for seed, (query_lens, kv_lens) in enumerate(
        [([1, 1, 1, 1, 1], [1, 4, 5, 8, 20]), ([12, 0, 0, 0, 0], [12, 0, 0, 0, 0]), ([0, 0, 0, 0, 3], [0, 3, 0, 1, 19])]
    ):
        metadata, expected = vllm_shaped(query_lens, kv_lens, garbage=-1, seed=seed)
        assert_same(traced(metadata), expected)
    assert under_jit._cache_size() <= before + 1


def test_scenario_l14_zero_query_tokens_in_a_row():
    metadata, expected = vllm_shaped([1, 0, 2], [3, 6, 8], garbage=-1)
    found = traced(metadata)
    assert_same(found, expected)
    np.testing.assert_array_equal(rows_of(found.query_offsets, 5), [0, 2, 2, 3, 3])


def test_scenario_l11_table_padding_names_the_sentinel():
    metadata, _ = vllm_shaped([1, 1], [20, 3], garbage=2**31 - 1)
    arrays, rung = from_vllm(metadata, **GEOMETRY)
    assert rung.listed_pages == 2 * WIDTH, "the width need not be a multiple of any kernel's block"
    np.testing.assert_array_equal(np.asarray(arrays.page_ids)[6:], 0)


def test_tokens_past_the_last_start_are_padding():
    metadata, expected = vllm_shaped([1, 2], [9, 2], garbage=-1)
    slots = np.asarray(traced(metadata).write_slots)
    assert (slots[3:] == -1).all()
    np.testing.assert_array_equal(slots, expected.write_slots)
    # A producer that fills the starts of unused rows with 1 means the same.
    padded = SimpleNamespace(
        block_tables=np.pad(metadata.block_tables, ((0, 2), (0, 0))),
        seq_lens=np.pad(metadata.seq_lens, (0, 2)),
        query_start_loc=np.asarray([0, 1, 3, 1, 1]),
    )
    np.testing.assert_array_equal(traced(padded).write_slots, expected.write_slots)


def test_a_flat_table_is_cut_into_rows():
    metadata, expected = vllm_shaped([1, 2], [9, 2], garbage=-1)
    metadata.block_tables = metadata.block_tables.reshape(-1)
    assert_same(from_vllm(metadata, **GEOMETRY)[0], expected)


def test_traced_values_out_of_bounds_write_and_read_nothing():
    metadata, _ = vllm_shaped([1, 1, 4, 1], [9, 5, 5, 3], garbage=-1)
    metadata.seq_lens = np.asarray([21, 5, 3, 3])  # longer than its table; sound; shorter than its queries; sound
    metadata.block_tables[1, 1] = NUM_PAGES  # row 1's token goes to a page that does not exist
    found = traced(metadata)
    np.testing.assert_array_equal(found.kv_lens, [0, 5, 0, 3])
    assert (np.asarray(found.write_slots)[:6] == -1).all()
    assert np.asarray(found.write_slots)[6] == metadata.block_tables[3, 0] * SIZE + 2
    assert np.asarray(found.page_ids).max() < NUM_PAGES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": [21, 2]}, r"seq_lens must be in 0..20: row 0 has 21"),
        ({"seq_lens": [9, 1]}, r"seq_lens must be 0 or at least the row's query length: row 1 has 1"),
        (
            {"block_tables": [[1, 2, NUM_PAGES, 0, 0], [4, 0, 0, 0, 0]]},
            r"block_tables must be in 1..39: used entry 2 has 40",
        ),
        ({"block_tables": [[1, 2, 0, 0, 0], [4, 0, 0, 0, 0]]}, r"block_tables must be in 1..39: used entry 2 has 0"),
        ({"seq_lens": [9.0, 2.0]}, r"seq_lens must hold integers, got dtype float64"),
        ({"seq_lens": [2**32 + 9, 2]}, r"seq_lens must fit 32 bits: row 0 has 4294967305"),
        ({"query_start_loc": [0, 1]}, r"query_start_loc \(rows \+ 1,\).*got \(2,\), \(2,\), \(2, 5\)"),
    ],
)
def test_host_values_out_of_bounds_are_refused_by_name(change, message):
    metadata, _ = vllm_shaped([1, 2], [9, 2], garbage=-1)
    for field, value in change.items():
        setattr(metadata, field, np.asarray(value))
    with pytest.raises(InvalidInputError, match=message):
        from_vllm(metadata, **GEOMETRY)


def test_scenario_l5_int64_lengths_are_cast_exactly_or_refused_on_the_device():
    metadata, expected = vllm_shaped([1, 2], [9, 2], garbage=-1)
    assert metadata.seq_lens.dtype == np.int64
    assert_same(from_vllm(metadata, **GEOMETRY)[0], expected)
    with jax.enable_x64(True):
        metadata.seq_lens = jnp.asarray(metadata.seq_lens)
    with pytest.raises(InvalidInputError, match="seq_lens must be int32 on the device, got int64"):
        from_vllm(metadata, **GEOMETRY)


def test_metadata_is_told_apart_by_its_attributes():
    metadata, expected = vllm_shaped([1, 2], [9, 2], garbage=-1)
    assert_same(step_metadata(metadata, **GEOMETRY)[0], expected)
    table = build_page_table(query_lens=[2], kv_lens=[6], pages=[[3, 1]], tokens_per_page=SIZE, num_pages=NUM_PAGES)
    assert_same(step_metadata(table)[0], table)
    same = SimpleNamespace(**{field.name: getattr(table, field.name) for field in dataclasses.fields(table)})
    assert_same(step_metadata(same)[0], table)
    assert step_metadata(same)[1] == Rung.of(table)
    with pytest.raises(InvalidInputError, match=r"carries its own geometry; drop \['num_tokens'\]"):
        step_metadata(table, num_tokens=3)
    with pytest.raises(InvalidInputError, match=r"vLLM-shaped metadata it lacks \['block_tables', 'query_start_loc'\]"):
        step_metadata(SimpleNamespace(seq_lens=[1]))


def test_no_rows_at_all():
    metadata = SimpleNamespace(
        block_tables=np.zeros((0, 3), np.int32), seq_lens=np.zeros(0, np.int32), query_start_loc=np.zeros(1, np.int32)
    )
    assert (np.asarray(from_vllm(metadata, **GEOMETRY)[0].write_slots) == -1).all()
