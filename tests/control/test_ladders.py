"""ShapeLadders: few shapes, each reachable, none too small (requirement C4)."""

import dataclasses
import itertools

import numpy as np
import pytest
from plane_helpers import checked, make_plane, never

from paged.common import InvalidInputError
from paged.control import FixedShape, ShapeLadders, Slice

SMALL = ShapeLadders(tokens_per_page=3, max_rows=6, max_tokens=11, max_kv_len=9, min_rows=2, min_tokens=3, min_kv_len=1)


def test_ladders_are_powers_of_two_ended_by_the_maximum():
    assert SMALL.rows == (2, 4, 6)
    assert SMALL.tokens == (4, 8, 11)
    assert SMALL.kv_lens == (1, 2, 4, 8, 9)
    one = ShapeLadders(tokens_per_page=16, max_rows=4, max_tokens=32, max_kv_len=100)
    assert (one.rows, one.tokens, one.kv_lens) == ((4,), (32,), (100,))
    usual = ShapeLadders(tokens_per_page=16, max_rows=256, max_tokens=4096, max_kv_len=32768)
    assert usual.rows == (8, 16, 32, 64, 128, 256)
    assert usual.tokens == (64, 128, 256, 512, 1024, 2048, 4096)
    assert usual.kv_lens == (512, 1024, 2048, 4096, 8192, 16384, 32768)


def test_the_page_list_is_as_wide_as_the_rung_can_need():
    shape = SMALL.shape_for(FixedShape(rows=3, tokens=7, listed_pages=4, max_query_len=4, max_kv_len=5))
    assert shape == FixedShape(rows=4, tokens=8, listed_pages=4 * 3, max_query_len=8, max_kv_len=8)
    decode = SMALL.shape_for(FixedShape(rows=3, tokens=3, listed_pages=9, max_query_len=1, max_kv_len=9))
    assert decode == FixedShape(rows=4, tokens=4, listed_pages=4 * 3, max_query_len=1, max_kv_len=9)


WIDE = dataclasses.replace(SMALL, wide_mixed=True)


def every_step() -> set[FixedShape]:
    """Sizes of every batch that SMALL can hold; only its longest query and KV length matter."""
    out = {FixedShape(0, 0, 0, 0, 0)}
    for rows, longest, kv_len in itertools.product(range(1, 7), range(1, 10), range(1, 10)):
        if longest > kv_len:
            continue
        for tokens in range(longest + rows - 1, min(11, longest * rows) + 1):
            for listed in {rows, rows * -(-kv_len // 3)}:
                out.add(FixedShape(rows, tokens, listed, longest, kv_len))
    return out


@pytest.mark.parametrize("ladders", [SMALL, WIDE])
def test_every_step_has_a_rung_that_holds_it_and_every_rung_has_a_step(ladders):
    reached = set()
    for need in every_step():
        shape = ladders.shape_for(need)
        assert shape.shape_for(need) == shape
        reached.add(shape)
    rungs = list(ladders.rungs())
    assert len(rungs) == len(set(rungs))
    assert set(rungs) == reached


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rows", 7, r"ShapeLadders.rows ends at 6, the step needs 7"),
        ("tokens", 12, r"ShapeLadders.tokens ends at 11, the step needs 12"),
        ("max_kv_len", 10, r"ShapeLadders.kv_lens ends at 9, the step needs 10"),
    ],
)
def test_a_step_above_a_ladder_is_refused_before_anything_changes(field, value, text):
    need = FixedShape(rows=6, tokens=11, listed_pages=18, max_query_len=6, max_kv_len=9)
    SMALL.shape_for(need)
    with pytest.raises(InvalidInputError, match=text):
        SMALL.shape_for(dataclasses.replace(need, **{field: value}))


@pytest.mark.parametrize("field", ["tokens_per_page", "max_rows", "max_tokens", "max_kv_len", "min_rows", "min_kv_len"])
def test_wrong_sizes_are_refused(field):
    sizes = {"tokens_per_page": 4, "max_rows": 2, "max_tokens": 8, "max_kv_len": 8}
    with pytest.raises(InvalidInputError, match=rf"ShapeLadders.{field} must be in 1\.\..*, got 0"):
        ShapeLadders(**{**sizes, field: 0})


def test_a_ladder_too_wide_for_a_table_is_refused():
    with pytest.raises(InvalidInputError, match=r"FixedShape.listed_pages must be in .*, got 4294967296"):
        ShapeLadders(tokens_per_page=1, max_rows=2**16, max_tokens=8, max_kv_len=2**16)


def test_24_mixed_requests_run_in_at_most_7_shapes():
    """Prompts and outputs of mixed length, packed prefill before decode, until all are done."""
    rng = np.random.default_rng(24)
    ladders = ShapeLadders(tokens_per_page=16, max_rows=16, max_tokens=256, max_kv_len=1024)
    plane = make_plane(num_pages=2000, tokens_per_page=16, max_requests=16, shapes=ladders)
    queue = [(int(rng.integers(1, 250)), int(rng.integers(1, 400))) for _ in range(24)]
    running, shapes, lengths = {}, set(), set()
    while queue or running:
        slices = []
        while queue and len(running) < 16 and sum(s.num_tokens for s in slices) + queue[0][0] <= 256:
            prompt, output = queue.pop(0)
            handle = plane.open()
            running[handle] = prompt + output
            slices.append(Slice(handle, 0, prompt))
        slices = slices or [Slice(h, plane.length(h), 1) for h in running]
        table = checked(plane.prepare(slices, lambda pages: None))
        shapes.add(FixedShape(table.num_rows, table.num_tokens, table.page_ids.shape[0], *bounds(table)))
        lengths |= {s.start + s.num_tokens for s in slices}
        for handle in [h for h, end in running.items() if plane.length(h) >= end]:
            plane.release(handle)
            del running[handle]
    assert len(lengths) > 500
    assert 1 < len(shapes) <= 7
    assert shapes <= set(ladders.rungs())
    assert plane.leaked_pages() == plane.held_pages == 0


def bounds(table):
    return table.max_query_len, table.max_kv_len


def test_a_table_built_at_its_rung_equals_one_padded_to_it():
    plane = make_plane(num_pages=40, tokens_per_page=3, max_requests=6)
    handles = [plane.open() for _ in range(5)]
    batches = ([4, 1, 1], [1], [1, 1, 1, 1, 1], [1, 1], [2, 2, 1, 1, 1])
    for counts in batches:
        slices = [Slice(h, plane.length(h), n) for h, n in zip(handles, counts)]
        plain = checked(plane.prepare(slices, never))
        for handle, count in zip(handles, counts):
            plane.truncate(handle, plane.length(handle) - count)
        plane.shapes = SMALL
        slices = [Slice(h, plane.length(h), n) for h, n in zip(handles, counts)]
        again = checked(plane.prepare(slices, lambda pages: None))
        plane.shapes = None
        assert again.kv_lens[: len(counts)].tolist() == plain.kv_lens.tolist()
        assert FixedShape(again.num_rows, again.num_tokens, again.page_ids.shape[0], *bounds(again)) in SMALL.rungs()
        rebuilt = SMALL.pad(again)
        assert rebuilt == again
