"""Faults that paged caches really had, on the host side. Each test is one report reduced to a few numbers."""

import pytest
from plane_helpers import FakePool, checked, make_plane, never, open_with, snapshot

from paged.common import DirtyPageError, StaleHandleError, UseAfterFreeError
from paged.control import PageAllocator, Slice


def test_scenario_l1_full_last_page():
    plane = make_plane()
    a = open_with(plane, 7)
    table = checked(plane.prepare([Slice(a, 7, 1)], never))
    page = plane.pages_of(a)[1]
    assert table.last_page_len.tolist() == [4]
    assert table.write_slots.tolist() == [page * 4 + 3]
    assert table.page_ids.shape == (2,)


def test_scenario_l3_two_requests_shorter_than_one_page():
    plane = make_plane(tokens_per_page=2)
    a, b = plane.open(), plane.open()
    table = checked(plane.prepare([Slice(a, 0, 1), Slice(b, 0, 1)], never))
    assert table.page_offsets.tolist() == [0, 1, 2]
    assert table.last_page_len.tolist() == [1, 1]
    assert table.write_slots.tolist() == [2, 4]


def test_scenario_l10_pages_by_ceiling_division():
    plane = make_plane()
    a = plane.open()
    assert plane.pages_needed([Slice(a, 0, 10)]) == 3
    assert checked(plane.prepare([Slice(a, 0, 10)], never)).page_ids.shape == (3,)


def test_scenario_n6_recycled_page_is_gated_until_confirmed():
    plane = make_plane(num_pages=2)
    a = open_with(plane, 4)
    plane.release(a)
    b = plane.open()
    reservation = plane.reserve([Slice(b, 0, 1)])
    assert reservation is not None
    assert reservation.dirty.tolist() == [1]
    with pytest.raises(DirtyPageError, match=r"page 1 is dirty: the request of row 0, epoch 0 let go of it"):
        plane.build([Slice(b, 0, 1)])
    assert plane.length(b) == 0
    plane.confirm(reservation.dirty)
    checked(plane.build([Slice(b, 0, 1)]))


def test_scenario_h1_finish_and_abort_release_once():
    plane = make_plane()
    a = open_with(plane, 6)
    plane.release(a)
    before = snapshot(plane)
    with pytest.raises(StaleHandleError, match=r"row 0, epoch 0 is stale: .* The pages it let go of: \[1, 2\]\."):
        plane.release(a)
    assert snapshot(plane) == before
    open_with(plane, 1)
    with pytest.raises(StaleHandleError, match=r"row 0, epoch 0 is stale: .* the row is at epoch 1"):
        plane.release(a)
    plane.verify()


def test_scenario_h1_the_allocator_refuses_a_page_twice_by_name():
    pages = PageAllocator(5)
    pages.allocate(2)
    pages.free([1, 2])
    with pytest.raises(UseAfterFreeError, match=r"page 2 is not allocated"):
        pages.free([2])


def test_scenario_h2_shared_pages_lose_one_reference_for_each_request():
    plane = make_plane()
    a = open_with(plane, 10)
    b = plane.fork(a)
    plane.truncate(a, 6)  # fewer pages than the fork
    assert plane.release(a).tolist() == []
    assert plane.release(b).tolist() == [1, 2, 3]
    assert plane.held_pages == plane.leaked_pages() == 0
    plane.verify()


@pytest.mark.parametrize("tokens", [12, 16, 17, 20])
def test_scenario_h11_can_allocate_and_allocate_agree(tokens):
    plane = make_plane(num_pages=8)
    open_with(plane, 12)
    a = plane.open()
    slices = [Slice(a, 0, tokens)]
    can = plane.fits(tokens)
    assert can == plane.fits(slices) == (tokens <= 16)
    assert (plane.prepare(slices, never) is not None) == can


def test_scenario_h15_rejected_draft_tokens_are_not_counted():
    plane = make_plane()
    pool = FakePool(plane)
    a = plane.open()
    pool.run(checked(plane.prepare([Slice(a, 0, 6)], pool.scrub)), [0, 1, 2, 3, 4, 5])
    pool.run(checked(plane.prepare([Slice(a, 6, 3)], pool.scrub)), [60, 61, 62])  # a draft of three
    plane.truncate(a, 7)  # one is accepted
    assert plane.length(a) == 7
    table = checked(plane.prepare([Slice(a, 7, 1)], pool.scrub))
    pool.run(table, [7])
    assert table.kv_lens.tolist() == [8]
    assert pool.read(table, 0) == [0, 1, 2, 3, 4, 5, 60, 7]


def test_aborting_at_any_point_leaves_nothing_behind():
    """Between any two calls of a step, with a fork, a pending copy and a step in flight (requirement C9)."""
    points = ["opened", "reserved", "confirmed", "built", "dispatched", "retired"]
    for point in range(len(points)):
        plane = make_plane(num_pages=8)
        plane.release(open_with(plane, 28))
        base = plane.open()
        plane.prepare([Slice(base, 0, 6)], lambda pages: None)
        a = plane.fork(base)
        number, slices = None, [Slice(a, 6, 5)]
        for name in points[1 : point + 1]:
            if name == "reserved":
                reservation = plane.reserve(slices)
            elif name == "confirmed":
                plane.confirm([*reservation.dirty.tolist(), *reservation.copy_target.tolist()])
            elif name == "built":
                table = plane.build(slices)
            elif name == "dispatched":
                number = plane.dispatch(table)
            elif name == "retired":
                plane.retire(number)
        plane.release(a)
        plane.verify()
        if points[point] == "dispatched":
            plane.retire(number)
        assert (plane.held_pages, plane.leaked_pages()) == (2, 0), points[point]
        assert plane.length(base) == 6


def test_scenario_h16_there_is_no_host_tier_whose_counters_could_be_swapped():
    # Pages are on the device or nowhere: a tier to offload to is refused, not ignored.
    with pytest.raises(TypeError, match="host_pages"):
        make_plane(host_pages=4)
