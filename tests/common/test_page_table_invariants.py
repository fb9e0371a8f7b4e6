"""Every invariant of a page table, each with a planted violation and the message that names it (requirement K7)."""

import dataclasses

import numpy as np
import pytest

from paged.common import InvalidInputError, build_page_table


@pytest.fixture(scope="module")
def table():
    """Rows of 2, 0, 3 and 0 new tokens over 6, 5, 3 and 0 tokens, then one padding row, two tokens, two entries."""
    step = build_page_table(
        query_lens=[2, 0, 3, 0],
        kv_lens=[6, 5, 3, 0],
        pages=[[3, 7], [2, 9], [5], []],
        tokens_per_page=4,
        num_pages=12,
    )
    return step.pad(rows=5, tokens=7, listed_pages=7, max_query_len=4, max_kv_len=8)


def test_the_table_before_anything_is_planted(table):
    assert table.query_offsets.tolist() == [0, 2, 2, 5, 5, 5]
    assert table.page_offsets.tolist() == [0, 2, 4, 5, 5, 5]
    assert table.page_ids.tolist() == [3, 7, 2, 9, 5, 0, 0]
    assert table.kv_lens.tolist() == [6, 5, 3, 0, 0]
    assert table.last_page_len.tolist() == [2, 1, 3, 0, 0]
    assert table.write_slots.tolist() == [28, 29, 20, 21, 22, -1, -1]


def planted(values: list[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


VIOLATIONS = [
    ("query_offsets", 0, 1, "PageTable.query_offsets must start at 0: row 0 has 1."),
    ("query_offsets", 2, 1, "PageTable.query_offsets must not decrease: row 1 has 1."),
    ("query_offsets", 5, 8, "PageTable.query_offsets ends at 8, past the 7 entries of write_slots."),
    ("query_offsets", 4, 4, "PageTable.query_offsets must not decrease: row 3 has 4."),
    ("page_offsets", 0, -1, "PageTable.page_offsets must start at 0: row 0 has -1."),
    ("page_offsets", 3, 3, "PageTable.page_offsets must not decrease: row 2 has 3."),
    ("page_offsets", 5, 8, "PageTable.page_offsets ends at 8, past the 7 entries of page_ids."),
    (
        "page_offsets",
        2,
        3,
        "PageTable.page_offsets must list ceil(kv_len / 4) pages a row: row 1 has 1 (1 more like it).",
    ),
    ("kv_lens", 1, -5, "PageTable.kv_lens must not be negative: row 1 has -5."),
    ("kv_lens", 2, 2, "PageTable.kv_lens must be 0 or at least the row's query length: row 2 has 2."),
    ("kv_lens", 0, 9, "PageTable.kv_lens must not exceed max_kv_len=8: row 0 has 9."),
    ("kv_lens", 4, 1, "PageTable.last_page_len must be 0 exactly for empty rows: row 4 has 0."),
    ("kv_lens", 0, 7, "PageTable.last_page_len must agree with kv_lens: row 0 has 2."),
    ("last_page_len", 0, 5, "PageTable.last_page_len must be in 0..4: row 0 has 5."),
    ("last_page_len", 0, -1, "PageTable.last_page_len must be in 0..4: row 0 has -1."),
    ("last_page_len", 2, 0, "PageTable.last_page_len must be 0 exactly for empty rows: row 2 has 0."),
    ("last_page_len", 3, 1, "PageTable.last_page_len must be 0 exactly for empty rows: row 3 has 1."),
    ("last_page_len", 1, 2, "PageTable.last_page_len must agree with kv_lens: row 1 has 2."),
    ("page_ids", 3, 12, "PageTable.page_ids must be in 1..11: row 1, entry 3 has 12."),
    ("page_ids", 3, -1, "PageTable.page_ids must be in 1..11: row 1, entry 3 has -1."),
    ("page_ids", 4, 0, "PageTable.page_ids must not name the sentinel page 0: row 2, entry 4 has 0."),
    ("page_ids", 6, 3, "PageTable.page_ids must name page 0 in padding: padding entry 6 has 3."),
    ("page_ids", 5, -1, "PageTable.page_ids must name page 0 in padding: padding entry 5 has -1."),
    ("write_slots", 3, 48, "PageTable.write_slots must be -1 or in 4..47: row 2, token 3 has 48."),
    ("write_slots", 3, 3, "PageTable.write_slots must be -1 or in 4..47: row 2, token 3 has 3."),
    ("write_slots", 3, -2, "PageTable.write_slots must be -1 or in 4..47: row 2, token 3 has -2."),
    ("write_slots", 6, 47, "PageTable.write_slots must be -1 in padding: padding token 6 has 47."),
    (
        "write_slots",
        3,
        28,
        "PageTable.write_slots: slot 28 is written twice, by row 0, token 0 and row 2, token 3.",
    ),
    (
        "write_slots",
        3,
        23,
        "PageTable.write_slots: row 2, token 3 is at position 1, whose slot is 21; got 23. "
        "Pass that slot, or -1 if the token is not written.",
    ),
]


@pytest.mark.parametrize(("field", "index", "value", "message"), VIOLATIONS)
def test_a_planted_violation_is_named_with_field_row_and_value(table, field, index, value, message):
    with pytest.raises(InvalidInputError) as caught:
        dataclasses.replace(table, **{field: planted(getattr(table, field).tolist(), index, value)})
    assert str(caught.value) == message


SCALARS = [
    ("max_query_len", 2, "PageTable.query_offsets must give no query length above max_query_len=2: row 2 has 3."),
    ("max_kv_len", 5, "PageTable.kv_lens must not exceed max_kv_len=5: row 0 has 6."),
    ("num_pages", 9, "PageTable.page_ids must be in 1..8: row 1, entry 3 has 9."),
    ("num_pages", 1, "PageTable.num_pages must be in 2..2147483647, got 1."),
    (
        "num_pages",
        2**29,
        "PageTable: num_pages × tokens_per_page must be below 2^31 (slots are int32), got 536870912 × 4 = 2147483648.",
    ),
    ("tokens_per_page", 8, "PageTable.last_page_len must agree with kv_lens: row 0 has 2 (1 more like it)."),
    ("tokens_per_page", 0, "PageTable.tokens_per_page must be in 1..2147483647, got 0."),
]


@pytest.mark.parametrize(("field", "value", "message"), SCALARS)
def test_a_planted_scalar_is_named(table, field, value, message):
    with pytest.raises(InvalidInputError) as caught:
        dataclasses.replace(table, **{field: value})
    assert str(caught.value) == message


@pytest.mark.parametrize("field", ["page_offsets", "last_page_len", "kv_lens"])
@pytest.mark.parametrize("change", [-1, 1])
def test_array_lengths_must_fit_the_rows(table, field, change):
    values = getattr(table, field).tolist()
    with pytest.raises(InvalidInputError, match=rf"PageTable\.{field} must have length {len(values)} for 5 rows, got "):
        dataclasses.replace(table, **{field: values[:-1] if change < 0 else [*values, values[-1]]})


def test_offsets_without_a_first_entry_are_refused(table):
    with pytest.raises(InvalidInputError, match=r"query_offsets must have length rows \+ 1, got 0\."):
        dataclasses.replace(table, query_offsets=[])


def test_a_token_need_not_be_written(table):
    kept = dataclasses.replace(table, write_slots=[28, -1, 20, -1, -1, -1, -1])
    assert kept.write_slots.tolist() == [28, -1, 20, -1, -1, -1, -1]


def test_a_token_of_an_empty_row_has_no_slot():
    table = build_page_table(query_lens=[1, 1], kv_lens=[0, 2], pages=[[], [1]], tokens_per_page=4, num_pages=3)
    with pytest.raises(InvalidInputError, match=r"must be -1 in padding: row 0, token 0 has 4\."):
        dataclasses.replace(table, write_slots=[4, 5])


def test_rows_may_share_a_page_and_write_apart():
    table = build_page_table(query_lens=[1, 1], kv_lens=[5, 6], pages=[[1, 2], [1, 3]], tokens_per_page=4, num_pages=4)
    assert table.page_ids.tolist() == [1, 2, 1, 3]
    with pytest.raises(InvalidInputError, match=r"slot 8 is written twice, by row 0, token 0 and row 1, token 1\."):
        build_page_table(query_lens=[1, 1], kv_lens=[5, 5], pages=[[1, 2], [1, 2]], tokens_per_page=4, num_pages=4)


STEPS = [
    ({"query_lens": [1, -1, 3, 0]}, "build_page_table.query_lens must not be negative: row 1 has -1."),
    ({"kv_lens": [6, -5, 3, 0]}, "build_page_table.kv_lens must not be negative: row 1 has -5."),
    (
        {"kv_lens": [6, 5, 2, 0]},
        "build_page_table.kv_lens must be 0 or at least the row's query length: row 2 has 2.",
    ),
    ({"kv_lens": [6, 5]}, "build_page_table.kv_lens must have length 4, got 2."),
    (
        {"kv_lens": [6, 9, 3, 0]},
        "build_page_table.pages: row 1 holds 2 pages, fewer than the 3 that its kv_len needs.",
    ),
    (
        {"pages": [[3, 7], [2, 9]]},
        "build_page_table.pages must be a list with one list of pages for each of 4 rows, got 2.",
    ),
    (
        {"pages": [[3, 7], [2, 9.5], [5], []]},
        "build_page_table.pages[1] must be int32, got dtype float64 (row 1 has 9.5). Cast it exactly first.",
    ),
    (
        {"pages": [[3, 7], ["2", "9"], [5], []]},
        "build_page_table.pages[1] must be int32, got dtype <U1 (row 0 has '2'). Cast it exactly first.",
    ),
    (
        {"pages": [[3, 7], np.array([2, 2**40]), [5], []]},
        "PageTable.page_ids must fit 32 bits: row 3 has 1099511627776.",
    ),
    ({"query_lens": [2**30, 2**30, 3, 0], "kv_lens": [0, 0, 3, 0]}, None),
    ({"max_query_len": 1}, "PageTable.query_offsets must give no query length above max_query_len=1: row 0 has 2 (1"),
]


@pytest.mark.parametrize(("change", "message"), STEPS)
def test_a_step_that_cannot_be_is_refused_before_anything_is_allocated(change, message):
    step = {
        "query_lens": [2, 0, 3, 0],
        "kv_lens": [6, 5, 3, 0],
        "pages": [[3, 7], [2, 9], [5], []],
        "tokens_per_page": 4,
        "num_pages": 12,
    }
    with pytest.raises(InvalidInputError) as caught:
        build_page_table(**{**step, **change})
    message = message or "build_page_table.query_lens sums to 2147483651; one step has at most 67108864."
    assert str(caught.value).startswith(message)
