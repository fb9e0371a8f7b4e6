"""Slices become token ids, absolute positions, segment ids and sample indices (requirement E1)."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.common import InvalidInputError, build_page_table, pages_for
from paged.engine.step_inputs import build_step_inputs

SIZE = 4


@dataclasses.dataclass(frozen=True)
class Piece:
    start: int
    num_tokens: int


def table_of(pieces, **pad):
    ends = [p.start + p.num_tokens for p in pieces]
    first = 1
    pages = []
    for end in ends:
        pages.append(list(range(first, first + pages_for(end, SIZE))))
        first += len(pages[-1])
    counts = [p.num_tokens for p in pieces]
    table = build_page_table(query_lens=counts, kv_lens=ends, pages=pages, tokens_per_page=SIZE, num_pages=99)
    if not pad:
        return table
    return table.pad(listed_pages=60, max_query_len=64, max_kv_len=64, **pad)


def test_a_packed_step_of_prefill_chunk_and_decode():
    pieces = [Piece(0, 3), Piece(2, 4), Piece(5, 1)]
    known = [[10, 11, 12], [20, 21, 22, 23, 24, 25, 26], [30, 31, 32, 33, 34, 35]]
    got = build_step_inputs(pieces, known, table_of(pieces, rows=5, tokens=11))
    assert got.tokens.tolist() == [10, 11, 12, 22, 23, 24, 25, 35, 0, 0, 0]
    assert got.positions.tolist() == [0, 1, 2, 2, 3, 4, 5, 5, 0, 0, 0]
    assert got.segment_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, -1, -1, -1]
    assert got.samples.tolist() == [True, False, True, False, False]  # the chunk stops before its prompt's end
    assert got.sample_indices.tolist() == [2, 0, 7, 0, 0]
    assert {x.dtype for x in (got.tokens, got.positions, got.segment_ids, got.sample_indices)} == {np.dtype(np.int32)}


def test_packed_prefill_samples_the_last_row_of_every_request():
    prompts = [[1], [2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]
    pieces = [Piece(0, len(p)) for p in prompts]
    got = build_step_inputs(pieces, prompts, table_of(pieces, rows=8, tokens=16))
    assert got.tokens[got.sample_indices[:4]].tolist() == [1, 6, 8, 11]
    assert got.samples.tolist() == [True] * 4 + [False] * 4


def test_scenario_m7_a_suffix_keeps_its_absolute_positions():
    known = list(range(100, 112))
    got = build_step_inputs([Piece(8, 4)], [known], table_of([Piece(8, 4)]))
    assert got.positions.tolist() == [8, 9, 10, 11]
    assert got.tokens.tolist() == [108, 109, 110, 111]


def test_scenario_h13_the_phase_comes_from_the_slice_alone():
    # Preempted after one generated token: the replay is prompt + generated in one slice, and samples once at its end.
    prompt, generated = [1, 2, 3, 4], [5]
    pieces = [Piece(0, 5)]
    got = build_step_inputs(pieces, [prompt + generated], table_of(pieces))
    assert got.tokens.tolist() == [1, 2, 3, 4, 5]
    assert got.sample_indices.tolist() == [4]
    # Without preemption the same state is a decode at prompt + generated − 1.
    pieces = [Piece(4, 1)]
    got = build_step_inputs(pieces, [prompt + generated], table_of(pieces))
    assert (got.tokens.tolist(), got.positions.tolist(), got.samples.tolist()) == ([5], [4], [True])


@st.composite
def steps(draw):
    pieces, known = [], []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 20))
        start = draw(st.integers(0, length - 1))
        pieces.append(Piece(start, draw(st.integers(1, length - start))))
        known.append(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)))
    return pieces, known, draw(st.booleans())


@settings(deadline=None)
@given(steps())
def test_against_one_loop_over_tokens(step):
    pieces, known, padded = step
    table = table_of(pieces, rows=7, tokens=128) if padded else table_of(pieces)
    got = build_step_inputs(pieces, known, table)
    flat = [(r, p, known[r][p]) for r, x in enumerate(pieces) for p in range(x.start, x.start + x.num_tokens)]
    for i, (row, position, token) in enumerate(flat):
        assert (got.segment_ids[i], got.positions[i], got.tokens[i]) == (row, position, token)
    assert (got.segment_ids[len(flat) :] == -1).all()
    np.testing.assert_array_equal(got.positions[: len(flat)], table.positions()[: len(flat)])
    for row, piece in enumerate(pieces):
        assert got.samples[row] == (piece.start + piece.num_tokens == len(known[row]))
        if got.samples[row]:
            assert flat[got.sample_indices[row]][:2] == (row, len(known[row]) - 1)
    assert not got.samples[len(pieces) :].any()


@pytest.mark.parametrize(
    ("pieces", "known", "table", "message"),
    [
        ([Piece(0, 3)], [[1, 2]], [Piece(0, 3)], r"start \+ num_tokens goes past the known tokens: row 0 has 3"),
        ([Piece(-1, 2)], [[1, 2]], [Piece(0, 1)], r"start must not be negative: row 0 has -1"),
        ([Piece(0, 1), Piece(1, 0)], [[1], [1]], [Piece(0, 1)] * 2, r"num_tokens must be at least 1: row 1 has 0"),
        ([Piece(0, 2)], [[1, 2]], [Piece(0, 1)], r"query lengths disagree with num_tokens: row 0 has 1"),
        ([Piece(0, 1)], [[1, 2]], [Piece(1, 1)], r"kv_lens disagree with start \+ num_tokens: row 0 has 2"),
        ([Piece(0, 1)], [], [Piece(0, 1)], r"1 slices, 0 token lists and 1 table rows"),
    ],
)
def test_disagreement_is_refused_by_row(pieces, known, table, message):
    with pytest.raises(InvalidInputError, match=message):
        build_step_inputs(pieces, known, table_of(table))
