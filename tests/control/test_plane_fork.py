"""Copy-on-write: forks share pages until one of them writes (requirement C9)."""

import pytest
from plane_helpers import FakePool, checked, make_plane, never, open_with, snapshot

from paged.common import DirtyPageError, InvalidInputError
from paged.control import Slice


def test_forks_share_whole_pages_and_copy_the_page_they_write_into():
    plane = make_plane()
    pool = FakePool(plane)
    a = plane.open()
    pool.run(checked(plane.prepare([Slice(a, 0, 6)], pool.scrub)), [10, 11, 12, 13, 14, 15])
    b = plane.fork(a)
    assert plane.pages_of(b).tolist() == plane.pages_of(a).tolist() == [1, 2]
    assert plane.held_pages == 2
    table = checked(plane.prepare([Slice(b, 6, 1)], pool.scrub, pool.copy))
    assert pool.copied == [([2], [3])]
    assert table.page_ids.tolist() == [1, 3]
    pool.run(table, [99])
    pool.run(checked(plane.prepare([Slice(a, 6, 1)], never, never)), [77])
    assert pool.cached(a) == [10, 11, 12, 13, 14, 15, 77]
    assert pool.cached(b) == [10, 11, 12, 13, 14, 15, 99]
    plane.verify()


def test_a_fork_at_a_page_boundary_copies_nothing():
    plane = make_plane()
    a = open_with(plane, 8)
    b = plane.fork(a)
    table = checked(plane.prepare([Slice(a, 8, 1), Slice(b, 8, 1)], never))
    assert [table.pages_of(r).tolist() for r in (0, 1)] == [[1, 2, 3], [1, 2, 4]]


def test_of_all_writers_in_one_batch_the_last_keeps_the_page():
    plane = make_plane(num_pages=7, max_requests=5)
    pool = FakePool(plane)
    a = open_with(plane, 6)
    others = [plane.fork(a) for _ in range(4)]
    slices = [Slice(h, 6, 1) for h in (*others, a)]
    assert plane.pages_needed(slices) == 4
    table = checked(plane.prepare(slices, pool.scrub, pool.copy))
    assert pool.copied == [([2, 2, 2, 2], [3, 4, 5, 6])]
    assert table.pages_of(4).tolist() == [1, 2]
    assert (plane.available_pages, plane.leaked_pages()) == (0, 0)
    plane.verify()


def test_writers_leave_the_page_to_a_holder_that_does_not_write():
    plane = make_plane()
    pool = FakePool(plane)
    a = open_with(plane, 6)
    b, c = plane.fork(a), plane.fork(a)
    checked(plane.prepare([Slice(a, 6, 1), Slice(b, 6, 1)], pool.scrub, pool.copy))
    assert pool.copied == [([2, 2], [3, 4])]
    assert plane.pages_of(c).tolist() == [1, 2]
    checked(plane.prepare([Slice(c, 6, 1)], never, never))


def test_a_recycled_page_is_copied_to_and_not_scrubbed():
    plane = make_plane(num_pages=4)
    pool = FakePool(plane)
    plane.release(open_with(plane, 12))
    a = plane.open()
    checked(plane.prepare([Slice(a, 0, 6)], pool.scrub))
    b = plane.fork(a)
    checked(plane.prepare([Slice(b, 6, 1)], pool.scrub, pool.copy))
    assert pool.scrubbed == [[1, 2]]
    assert pool.copied == [([2], [3])]


def test_without_a_copy_callable_a_shared_write_is_refused_and_nothing_changes():
    plane = make_plane()
    a = open_with(plane, 6)
    b, c = plane.fork(a), plane.open()
    before = snapshot(plane)
    text = r"the batch writes into page 2, which a fork shares, and no copy callable was given\. Pass copy="
    with pytest.raises(InvalidInputError, match=text):
        plane.prepare([Slice(c, 0, 1), Slice(b, 6, 1)], never)
    assert snapshot(plane) == before


def test_backpressure_counts_copies():
    plane = make_plane(num_pages=3)
    a = open_with(plane, 6)
    b = plane.fork(a)
    assert plane.pages_needed([Slice(b, 6, 1)]) == 1
    assert not plane.fits([Slice(b, 6, 1)])
    before = snapshot(plane)
    assert plane.prepare([Slice(b, 6, 1)], never, never) is None
    assert snapshot(plane) == before
    plane.release(a)
    checked(plane.prepare([Slice(b, 6, 1)], never, never))


def test_copies_by_hand_and_the_gate_before_them():
    plane = make_plane()
    pool = FakePool(plane)
    a = plane.open()
    pool.run(checked(plane.prepare([Slice(a, 0, 6)], pool.scrub)), [1, 2, 3, 4, 5, 6])
    b = plane.fork(a)
    slices = [Slice(b, 6, 1)]
    for _ in range(2):
        reservation = plane.reserve(slices)
        assert reservation is not None
        assert [x.tolist() for x in reservation] == [[], [2], [3]]
        plane.verify()
    before = snapshot(plane)
    for early in (slices, [Slice(a, 6, 1)]):
        with pytest.raises(DirtyPageError, match="page 2 is shared and the batch would write into it"):
            plane.build(early)
    assert snapshot(plane) == before
    pool.copy(reservation.copy_source, reservation.copy_target)
    plane.confirm(reservation.copy_target)
    assert plane.build(slices).page_ids.tolist() == [1, 3]
    plane.verify()


def test_a_copy_is_still_made_when_the_other_holder_has_left_meanwhile():
    plane = make_plane()
    pool = FakePool(plane)
    a = open_with(plane, 6)
    b = plane.fork(a)
    plane.reserve([Slice(b, 6, 1)])
    assert plane.release(a).tolist() == []
    with pytest.raises(DirtyPageError, match="page 2 is shared"):
        plane.build([Slice(b, 6, 1)])
    with pytest.raises(InvalidInputError, match="and no copy callable was given"):
        plane.prepare([Slice(b, 6, 1)], never)
    checked(plane.prepare([Slice(b, 6, 1)], never, pool.copy))
    assert pool.copied == [([2], [3])]
    assert (plane.pages_of(b).tolist(), plane.held_pages) == ([1, 3], 2)
    plane.verify()


@pytest.mark.parametrize("end", ["release", "truncate"])
def test_a_pending_copy_goes_with_its_request(end):
    plane = make_plane()
    a = open_with(plane, 6)
    b = plane.fork(a)
    plane.reserve([Slice(b, 6, 1)])
    assert plane.held_pages == 3
    freed = plane.release(b) if end == "release" else plane.truncate(b, 4)
    assert freed.tolist() == [3]
    assert (plane.held_pages, plane.leaked_pages()) == (2, 0)
    plane.verify()
    checked(plane.prepare([Slice(a, 6, 1)], never, never))


def test_a_truncated_fork_cannot_write_over_tokens_of_the_other():
    plane = make_plane()
    pool = FakePool(plane)
    a = plane.open()
    pool.run(checked(plane.prepare([Slice(a, 0, 7)], pool.scrub)), [1, 2, 3, 4, 5, 6, 7])
    b = plane.fork(a)
    plane.truncate(b, 5)
    pool.run(checked(plane.prepare([Slice(b, 5, 1)], pool.scrub, pool.copy)), [60])
    assert pool.cached(a) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.cached(b) == [1, 2, 3, 4, 5, 60]


def test_a_fork_of_an_empty_request_and_of_one_with_reserved_pages():
    plane = make_plane()
    a = plane.open()
    assert plane.pages_of(plane.fork(a)).tolist() == []
    plane.reserve([Slice(a, 0, 8)])
    b = plane.fork(a)
    assert (plane.pages_of(a).tolist(), plane.pages_of(b).tolist(), plane.length(b)) == ([1, 2], [], 0)
    plane.verify()


def test_a_writer_in_place_waits_for_the_reserved_copies_of_others():
    """Reserved and not made: the page's content must reach them before the last holder writes into it."""
    plane = make_plane(max_requests=4)
    pool = FakePool(plane)
    a = plane.open()
    pool.run(checked(plane.prepare([Slice(a, 0, 6)], pool.scrub)), [1, 2, 3, 4, 5, 6])
    b = plane.fork(a)
    plane.truncate(b, 5)
    plane.reserve([Slice(a, 6, 1)])
    assert plane.pages_needed([Slice(b, 5, 1)]) == 0
    table = checked(plane.prepare([Slice(b, 5, 1)], never, pool.copy))
    assert pool.copied == [([2], [3])]
    pool.run(table, [60])
    assert pool.cached(a) == [1, 2, 3, 4, 5, 6]
    assert pool.cached(b) == [1, 2, 3, 4, 5, 60]
    checked(plane.prepare([Slice(a, 6, 1)], never, never))
    plane.verify()
