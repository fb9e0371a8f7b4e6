"""What a page table says: page counts, last pages, slots, positions, padding (requirement K5)."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.common import InvalidInputError, PageTable, build_page_table, pages_for

ARRAYS = ("query_offsets", "page_offsets", "page_ids", "last_page_len", "kv_lens", "write_slots")


def by_hand(query_lens, kv_lens, pages, size) -> dict[str, list[int]]:
    """The arrays of a step, token by token, in plain Python."""
    out: dict[str, list[int]] = {name: [] for name in (*ARRAYS, "positions")}
    out["query_offsets"], out["page_offsets"] = [0], [0]
    for q, n, held in zip(query_lens, kv_lens, pages):
        needed = 0
        while needed * size < n:
            needed += 1
        out["page_ids"] += held[:needed]
        out["page_offsets"].append(out["page_offsets"][-1] + needed)
        out["last_page_len"].append(n - (needed - 1) * size if n else 0)
        out["kv_lens"].append(n)
        out["query_offsets"].append(out["query_offsets"][-1] + q)
        for i in range(q):
            position = n - q + i if n else -1
            out["positions"].append(position)
            out["write_slots"].append(held[position // size] * size + position % size if n else -1)
    return out


@st.composite
def steps(draw):
    size = draw(st.sampled_from((1, 2, 3, 4, 16)))
    lens = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), max_size=6))
    query_lens = [q for q, _ in lens]
    kv_lens = [q + more if (q + more) % 5 else 0 for q, more in lens]
    needed = [-(-n // size) + draw(st.integers(0, 2)) for n in kv_lens]
    order = draw(st.permutations(range(1, sum(needed) + 2)))
    cuts = np.cumsum([0, *needed]).tolist()
    pages = [list(order[a:b]) for a, b in itertools.pairwise(cuts)]
    return {
        "query_lens": query_lens,
        "kv_lens": kv_lens,
        "pages": pages,
        "tokens_per_page": size,
        "num_pages": sum(needed) + 2,
    }


@settings(max_examples=150, deadline=None)
@given(steps(), st.tuples(*[st.integers(0, 5)] * 5))
def test_a_step_says_what_counting_by_hand_says_and_padding_adds_nothing(step, more):
    table = build_page_table(**step)
    expected = by_hand(step["query_lens"], step["kv_lens"], step["pages"], step["tokens_per_page"])
    for name in ARRAYS:
        assert getattr(table, name).tolist() == expected[name]
    assert table.positions().tolist() == expected["positions"]
    assert table.query_lens.tolist() == step["query_lens"]

    rows, tokens, listed, longer, deeper = more
    padded = table.pad(
        rows=table.num_rows + rows,
        tokens=table.num_tokens + tokens,
        listed_pages=table.page_ids.shape[0] + listed,
        max_query_len=table.max_query_len + longer,
        max_kv_len=table.max_kv_len + deeper,
    )
    assert padded.num_rows == table.num_rows + rows
    assert padded.num_tokens == table.num_tokens + tokens
    assert padded.write_slots.tolist() == expected["write_slots"] + [-1] * tokens
    assert padded.positions().tolist() == expected["positions"] + [-1] * tokens
    assert padded.page_ids.tolist() == expected["page_ids"] + [0] * listed
    assert padded.kv_lens.tolist() == expected["kv_lens"] + [0] * rows
    assert padded.last_page_len.tolist() == expected["last_page_len"] + [0] * rows
    assert padded.query_lens.tolist() == step["query_lens"] + [0] * rows
    for row, held in enumerate(step["pages"]):
        needed = expected["page_offsets"][row + 1] - expected["page_offsets"][row]
        assert padded.pages_of(row).tolist() == held[:needed]
    assert PageTable.from_bytes(padded.to_bytes()) == padded


def test_scenario_l1_a_full_last_page_is_full():
    table = build_page_table(query_lens=[1], kv_lens=[8], pages=[[10, 11]], tokens_per_page=4, num_pages=12)
    assert table.last_page_len.tolist() == [4]
    assert table.write_slots.tolist() == [47]
    assert table.page_ids.tolist() == [10, 11]
    with pytest.raises(InvalidInputError, match=r"last_page_len must be 0 exactly for empty rows: row 0 has 0\."):
        dataclasses.replace(table, last_page_len=[0])
    with pytest.raises(
        InvalidInputError, match=r"write_slots: row 0, token 0 is at position 7, whose slot is 47; got 43"
    ):
        dataclasses.replace(table, write_slots=[43])
    with pytest.raises(InvalidInputError, match=r"last_page_len must be in 0\.\.4: row 0 has 8\."):
        dataclasses.replace(table, last_page_len=[8])


def test_scenario_l3_two_rows_shorter_than_a_page_have_a_page_each():
    table = build_page_table(query_lens=[1, 1], kv_lens=[1, 1], pages=[[3], [1]], tokens_per_page=2, num_pages=4)
    assert table.page_offsets.tolist() == [0, 1, 2]
    assert table.last_page_len.tolist() == [1, 1]
    assert table.write_slots.tolist() == [6, 2]


def test_scenario_l4_more_tokens_in_the_last_page_than_fit_are_refused():
    table = build_page_table(query_lens=[1], kv_lens=[4], pages=[[1]], tokens_per_page=4, num_pages=3)
    with pytest.raises(InvalidInputError, match=r"last_page_len must be in 0\.\.4: row 0 has 5\."):
        dataclasses.replace(table, last_page_len=[5])


def test_scenario_l5_int64_lengths_are_cast_exactly_or_refused():
    wide = {"tokens_per_page": 16, "num_pages": 9, "pages": [[1], [2]]}
    table = build_page_table(query_lens=np.array([1, 2]), kv_lens=np.array([5, 7], np.int64), **wide)
    assert table.kv_lens.dtype == np.int32
    assert table.kv_lens.tolist() == [5, 7]
    with pytest.raises(InvalidInputError, match=r"kv_lens must fit 32 bits: row 1 has 4294967301\."):
        build_page_table(query_lens=[1, 2], kv_lens=np.array([5, 2**32 + 5], np.int64), **wide)
    with pytest.raises(InvalidInputError, match=r"kv_lens must be int32, got dtype float64 \(row 0 has "):
        build_page_table(query_lens=[1, 2], kv_lens=np.array([5.0, 7.0]), **wide)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
def test_scenario_l10_pages_are_counted_by_ceil_division_whatever_the_dtype(dtype):
    assert pages_for(10, 4) == 3
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    lens = np.array([0, 1, 3, 4, 5, 8, 9, 127], dtype)
    assert pages_for(lens, 4).tolist() == [0, 1, 1, 1, 2, 2, 3, 32]
    assert pages_for(lens, 1000).tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    assert pages_for(np.array([2**31 - 1], np.int32), 2).tolist() == [2**30]
    table = build_page_table(query_lens=[10], kv_lens=[10], pages=[[1, 2, 3]], tokens_per_page=4, num_pages=4)
    assert table.page_ids.tolist() == [1, 2, 3]


def test_scenario_l13_an_empty_row_lists_nothing_and_leaves_its_neighbour_alone():
    both = build_page_table(query_lens=[1, 0], kv_lens=[3, 0], pages=[[2], []], tokens_per_page=4, num_pages=3)
    alone = build_page_table(query_lens=[1], kv_lens=[3], pages=[[2]], tokens_per_page=4, num_pages=3)
    assert both.last_page_len.tolist() == [3, 0]
    assert both.pages_of(1).tolist() == []
    padded = alone.pad(rows=2, tokens=1, listed_pages=1, max_query_len=1, max_kv_len=3)
    assert padded == both
    queries = build_page_table(query_lens=[2, 1], kv_lens=[0, 3], pages=[[5], [2]], tokens_per_page=4, num_pages=6)
    assert queries.write_slots.tolist() == [-1, -1, 10]
    assert queries.positions().tolist() == [-1, -1, 2]


def test_scenario_l14_a_row_without_queries_keeps_the_offsets_right():
    table = build_page_table(
        query_lens=[1, 0, 2], kv_lens=[3, 5, 2], pages=[[4], [1, 2], [3]], tokens_per_page=4, num_pages=5
    )
    assert table.query_offsets.tolist() == [0, 1, 1, 3]
    assert table.page_offsets.tolist() == [0, 1, 3, 4]
    assert table.positions().tolist() == [2, 0, 1]
    assert table.write_slots.tolist() == [4 * 4 + 2, 3 * 4 + 0, 3 * 4 + 1]


def test_pages_held_beyond_the_length_are_not_listed():
    table = build_page_table(query_lens=[1], kv_lens=[4], pages=[[3, 1, 2]], tokens_per_page=4, num_pages=4)
    assert table.page_ids.tolist() == [3]


def test_a_matrix_of_pages_reads_like_its_rows():
    pages = np.array([[3, 1, 0], [2, 0, 0]], np.int32)
    step = {"query_lens": [1, 1], "kv_lens": [5, 2], "tokens_per_page": 4, "num_pages": 4}
    assert build_page_table(pages=pages, **step) == build_page_table(pages=[[3, 1], [2]], **step)


def test_arrays_are_copied_and_cannot_be_written():
    kv_lens = np.array([4, 1], np.int32)
    pages = [np.array([1], np.int32), np.array([2], np.int32)]
    table = build_page_table(query_lens=[1, 1], kv_lens=kv_lens, pages=pages, tokens_per_page=4, num_pages=3)
    kv_lens[:] = 9
    pages[0][:] = 9
    assert table.kv_lens.tolist() == [4, 1]
    assert table.page_ids.tolist() == [1, 2]
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(table, name)[0] = 1


def test_strided_read_only_and_wide_arrays_are_taken_as_they_are():
    lens = np.arange(20, dtype=np.int64)[4:10:2]
    lens.flags.writeable = False
    table = build_page_table(
        query_lens=lens, kv_lens=lens, pages=[[1, 2], [3, 4], [5, 6]], tokens_per_page=4, num_pages=7
    )
    assert table.kv_lens.tolist() == [4, 6, 8]
    assert table.kv_lens.flags["C_CONTIGUOUS"]


def test_a_step_without_rows_is_a_step():
    table = build_page_table(query_lens=[], kv_lens=[], pages=[], tokens_per_page=4, num_pages=2)
    assert (table.num_rows, table.num_tokens, table.max_kv_len) == (0, 0, 0)
    padded = table.pad(rows=1, tokens=2, listed_pages=3, max_query_len=4, max_kv_len=5)
    assert padded.page_ids.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [("rows", 1, 2), ("tokens", 2, 3), ("listed_pages", 2, 3), ("max_query_len", 1, 2), ("max_kv_len", 4, 5)],
)
def test_a_shape_too_small_for_the_step_is_refused(field, value, least):
    table = build_page_table(query_lens=[2, 1], kv_lens=[5, 1], pages=[[1, 2], [3]], tokens_per_page=4, num_pages=4)
    shape = {"rows": 2, "tokens": 3, "listed_pages": 3, "max_query_len": 2, "max_kv_len": 5}
    with pytest.raises(InvalidInputError, match=rf"PageTable\.pad\.{field} must be in {least}\.\.\d+, got {value}\."):
        table.pad(**{**shape, field: value})


def test_tables_compare_by_value_and_have_no_hash():
    step = {"query_lens": [1], "kv_lens": [2], "tokens_per_page": 4, "num_pages": 4}
    assert build_page_table(pages=[[1]], **step) == build_page_table(pages=[[1]], **step)
    assert build_page_table(pages=[[1]], **step) != build_page_table(pages=[[2]], **step)
    assert build_page_table(pages=[[1]], **step) != "a table"
    with pytest.raises(TypeError):
        hash(build_page_table(pages=[[1]], **step))
