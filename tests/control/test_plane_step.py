"""One step through the control plane: what is reserved, what is overwritten, what the table says."""

import dataclasses

import numpy as np
import pytest
from plane_helpers import FakePool, checked, make_plane, never, open_with, snapshot

from paged.common import DirtyPageError, InvalidInputError, UseAfterFreeError, build_page_table
from paged.control import FixedShape, Slice


def test_mixed_prefill_and_decode():
    plane = make_plane()
    a, b = plane.open(), plane.open()
    checked(plane.prepare([Slice(a, 0, 5)], never))
    table = checked(plane.prepare([Slice(b, 0, 3), Slice(a, 5, 1)], never))
    assert table.query_offsets.tolist() == [0, 3, 4]
    assert table.kv_lens.tolist() == [3, 6]
    assert table.last_page_len.tolist() == [3, 2]
    assert table.pages_of(0).tolist() == plane.pages_of(b).tolist() == [3]
    assert table.pages_of(1).tolist() == plane.pages_of(a).tolist() == [1, 2]
    assert table.write_slots.tolist() == [12, 13, 14, 9]
    assert (table.max_query_len, table.max_kv_len) == (3, 6)
    assert (plane.length(a), plane.length(b)) == (6, 3)
    plane.verify()


def test_tables_equal_those_built_row_by_row():
    """The vectorised path against the plain builder, over random batches, padded and not."""
    rng = np.random.default_rng(5)
    plane = make_plane(num_pages=200, tokens_per_page=3, max_requests=8)
    handles = [plane.open() for _ in range(8)]
    for step in range(60):
        rows = rng.permutation(8)[: rng.integers(1, 9)]
        counts = np.ones(8, int) if step % 2 else rng.integers(1, 6, 8)
        slices = [Slice(handles[r], plane.length(handles[r]), int(counts[r])) for r in rows]
        plane.shapes = FixedShape(9, 45, 400, 7, 300) if step % 3 == 0 else None
        table = checked(plane.prepare(slices, never))
        plain = build_page_table(
            query_lens=[s.num_tokens for s in slices],
            kv_lens=[s.start + s.num_tokens for s in slices],
            pages=[plane.pages_of(s.handle) for s in slices],
            tokens_per_page=3,
            num_pages=200,
        )
        assert table == (plain if plane.shapes is None else plane.shapes.pad(plain))
    plane.verify()


def test_scrub_gets_exactly_the_dirty_pages_once():
    plane = make_plane(num_pages=6)
    pool = FakePool(plane)
    a = open_with(plane, 9)
    assert plane.release(a).tolist() == [1, 2, 3]
    b, c = plane.open(), plane.open()
    checked(plane.prepare([Slice(b, 0, 9), Slice(c, 0, 5)], pool.scrub))
    assert pool.scrubbed == [[1, 2, 3]]
    assert plane.pages_of(b).tolist() == [4, 5, 1]
    checked(plane.prepare([Slice(b, 9, 1), Slice(c, 5, 1)], never))
    plane.verify()


def test_scrub_is_not_called_when_no_page_is_dirty():
    plane = make_plane()
    open_with(plane, 48)
    assert plane.available_pages == 0


def test_backpressure_changes_nothing():
    plane = make_plane(num_pages=6)
    a, b = open_with(plane, 8), open_with(plane, 3)
    before = snapshot(plane)
    assert plane.prepare([Slice(a, 8, 1), Slice(b, 3, 6)], never) is None
    assert plane.reserve([Slice(a, 8, 1), Slice(b, 3, 6)]) is None
    assert snapshot(plane) == before
    checked(plane.prepare([Slice(a, 8, 1), Slice(b, 3, 5)], never))


def test_an_empty_batch_is_a_table_without_rows():
    plane = make_plane()
    table = checked(plane.prepare([], never))
    assert (table.num_rows, table.num_tokens, table.max_kv_len) == (0, 0, 0)


def test_the_steps_of_prepare_one_by_one():
    plane = make_plane(num_pages=5)
    plane.release(open_with(plane, 16))
    a = plane.open()
    slices = [Slice(a, 0, 6)]
    reservation = plane.reserve(slices)
    assert reservation is not None
    assert reservation.dirty.tolist() == [1, 2]
    assert reservation.copy_source.shape == reservation.copy_target.shape == (0,)
    again = plane.reserve(slices)
    assert again is not None
    assert again.dirty.tolist() == [1, 2]
    assert (plane.held_pages, plane.length(a)) == (2, 0)
    plane.confirm(reservation.dirty)
    table = checked(plane.build(slices))
    assert table.page_ids.tolist() == [1, 2]
    assert plane.length(a) == 6
    plane.verify()


def test_build_refuses_a_dirty_page_by_name_and_changes_nothing():
    plane = make_plane(num_pages=5)
    old = open_with(plane, 16)
    plane.release(old)
    a = plane.open()
    plane.reserve([Slice(a, 0, 6)])
    plane.confirm([1])
    before = snapshot(plane)
    with pytest.raises(DirtyPageError) as error:
        plane.build([Slice(a, 0, 6)])
    assert str(error.value) == (
        "page 2 is dirty: the request of row 0, epoch 0 let go of it and it was not confirmed overwritten since "
        "(1 such pages). Scrub them, call confirm with them, then build."
    )
    assert snapshot(plane) == before


def test_build_refuses_what_was_not_reserved():
    plane = make_plane()
    a = open_with(plane, 4)
    before = snapshot(plane)
    with pytest.raises(InvalidInputError, match=r"build: slice 0 needs 2 pages, row 0 holds 1\. Call reserve"):
        plane.build([Slice(a, 4, 1)])
    assert snapshot(plane) == before


def test_confirm_refuses_a_page_that_nobody_holds():
    plane = make_plane()
    open_with(plane, 4)
    with pytest.raises(UseAfterFreeError, match="page 2 is not allocated"):
        plane.confirm([1, 2])


def test_a_failing_scrub_leaves_a_step_that_can_be_prepared_again():
    plane = make_plane(num_pages=5)
    plane.release(open_with(plane, 16))
    a = plane.open()

    def fail(pages):
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        plane.prepare([Slice(a, 0, 6)], fail)
    plane.verify()
    assert plane.length(a) == 0
    pool = FakePool(plane)
    checked(plane.prepare([Slice(a, 0, 6)], pool.scrub))
    assert pool.scrubbed == [[1, 2]]
    assert plane.leaked_pages() == 0


def test_pages_reserved_and_never_built_go_back_with_their_request():
    plane = make_plane(num_pages=5)
    a = open_with(plane, 2)
    plane.reserve([Slice(a, 2, 10)])
    assert plane.held_pages == 3
    table = checked(plane.prepare([Slice(a, 2, 1)], never))
    assert table.page_ids.tolist() == [1]
    assert plane.release(a).tolist() == [1, 2, 3]
    plane.verify()


def test_pages_needed_and_fits_agree_with_reserve():
    plane = make_plane(num_pages=6)
    a = open_with(plane, 7)
    b = plane.open()
    for more, fresh in ((1, 12), (1, 13), (2, 8), (2, 9), (13, 0), (5, 5)):
        slices = [Slice(a, 7, more)] + ([Slice(b, 0, fresh)] if fresh else [])
        assert plane.pages_needed(slices) == -(-(7 + more) // 4) - 2 + -(-fresh // 4)
        before = snapshot(plane)
        fits = plane.fits(slices)
        assert snapshot(plane) == before
        trial = make_plane(num_pages=6)
        x, y = open_with(trial, 7), trial.open()
        assert fits == (trial.reserve([Slice(x, 7, more)] + ([Slice(y, 0, fresh)] if fresh else [])) is not None)
    assert [plane.fits(n) for n in (0, 12, 13, 20, 21)] == [True, True, False, False, False]


def test_shapes_pad_the_table_and_refuse_before_anything_changes():
    shape = FixedShape(rows=2, tokens=6, listed_pages=5, max_query_len=4, max_kv_len=16)
    plane = make_plane(shapes=shape)
    a, b = plane.open(), plane.open()
    table = checked(plane.prepare([Slice(a, 0, 4)], never))
    assert (table.num_rows, table.num_tokens, table.page_ids.shape[0]) == (2, 6, 5)
    assert (table.max_query_len, table.max_kv_len) == (4, 16)
    assert table.write_slots.tolist() == [4, 5, 6, 7, -1, -1]
    before = snapshot(plane)
    for slices, field in (
        ([Slice(a, 4, 3), Slice(b, 0, 4)], "tokens is 6, the step needs 7"),
        ([Slice(b, 0, 5)], "max_query_len is 4, the step needs 5"),
    ):
        with pytest.raises(InvalidInputError, match=f"FixedShape.{field}"):
            plane.prepare(slices, never)
        assert snapshot(plane) == before
    for field, value in dataclasses.asdict(shape).items():
        with pytest.raises(InvalidInputError, match=f"FixedShape.{field} is {value}, the step needs {value + 1}"):
            shape.shape_for(dataclasses.replace(shape, **{field: value + 1}))


class TooSmall:
    """A padding policy that is wrong."""

    def shape_for(self, need: FixedShape) -> FixedShape:
        return FixedShape(need.rows, need.tokens, need.listed_pages, need.max_query_len, need.max_kv_len - 1)

    def pad(self, table):
        return table


def test_a_policy_whose_shape_does_not_hold_the_step_is_refused_before_anything_changes():
    plane = make_plane(shapes=TooSmall())
    a = plane.open()
    before = snapshot(plane)
    for use in (lambda s: plane.prepare(s, never), plane.reserve):
        with pytest.raises(InvalidInputError, match=r"FixedShape.max_kv_len is 2, the step needs 3"):
            use([Slice(a, 0, 3)])
    assert snapshot(plane) == before


def test_rows_of_the_plane_are_limited():
    plane = make_plane(max_requests=1)
    a = open_with(plane, 1)
    assert plane.open() is None
    assert plane.fork(a) is None
    assert (plane.num_open, plane.max_requests) == (1, 1)
    plane.verify()


def test_truncate_frees_pages_that_hold_nothing():
    plane = make_plane()
    a = open_with(plane, 14)
    assert plane.truncate(a, 9).tolist() == [4]
    assert plane.truncate(a, 8).tolist() == [3]
    plane.reserve([Slice(a, 8, 5)])
    assert plane.truncate(a, 8).tolist() == [5, 6]
    assert plane.length(a) == 8
    assert plane.truncate(a, 0).tolist() == [1, 2]
    plane.verify()


def test_poison_follows_what_was_freed():
    poisoned = []
    plane = make_plane(poison_freed=lambda pages: poisoned.append(pages.tolist()))
    a = open_with(plane, 6)
    b = plane.fork(a)
    assert plane.release(a).tolist() == []
    assert poisoned == []
    assert plane.truncate(b, 4).tolist() == [2]
    assert plane.release(b).tolist() == [1]
    assert poisoned == [[2], [1]]


def test_a_poison_hook_never_gets_an_empty_list():
    plane = make_plane(poison_freed=never)
    plane.release(open_with(plane, 0))
    a = open_with(plane, 3)
    plane.truncate(a, 2)
    plane.fork(a)
    plane.release(a)
