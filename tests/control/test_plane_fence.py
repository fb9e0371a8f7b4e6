"""Pages of steps in flight (requirement C7, scenarios H4 and H9)."""

import pytest
from plane_helpers import FakePool, checked, make_plane, never, open_with, snapshot

from paged.common import InvalidInputError, UseAfterFreeError, build_page_table
from paged.control import Slice


def step(plane, *slices):
    """Prepare and dispatch; the number of the step."""
    return plane.dispatch(checked(plane.prepare(list(slices), lambda pages: None, lambda source, target: None)))


def test_release_defers_to_the_last_step_that_names_the_page():
    poisoned = []
    plane = make_plane(poison_freed=lambda pages: poisoned.append(pages.tolist()))
    a, b = open_with(plane, 4), open_with(plane, 4)
    first = step(plane, Slice(a, 4, 1), Slice(b, 4, 1))
    second = step(plane, Slice(b, 5, 1))
    assert (first, second) == (1, 2)
    assert plane.release(a).tolist() == []
    assert plane.release(b).tolist() == []
    assert (plane.pending_pages, plane.held_pages, plane.leaked_pages()) == (4, 4, 0)
    plane.verify()
    assert plane.retire(first).tolist() == [1, 3]
    assert (plane.pending_pages, plane.leaked_pages()) == (2, 0)
    assert plane.retire(second).tolist() == [2, 4]
    assert (plane.pending_pages, plane.held_pages) == (0, 0)
    assert poisoned == [[1, 3], [2, 4]]
    plane.verify()


def test_pages_that_no_step_names_are_freed_at_once():
    plane = make_plane()
    a, b = open_with(plane, 4), open_with(plane, 4)
    number = step(plane, Slice(a, 4, 1))
    assert plane.release(b).tolist() == [2]
    assert plane.truncate(a, 4).tolist() == []
    assert plane.pending_pages == 1
    assert plane.retire(number).tolist() == [3]
    assert plane.retire(step(plane, Slice(a, 4, 1))).tolist() == []
    assert plane.release(a).tolist() == [1, 4]


def test_a_shared_page_in_flight_waits_only_with_its_last_holder():
    plane = make_plane()
    a = open_with(plane, 4)
    b = plane.fork(a)
    number = step(plane, Slice(a, 4, 1))
    assert plane.release(a).tolist() == []
    assert plane.pending_pages == 1
    assert plane.release(b).tolist() == []
    assert plane.pending_pages == 2
    plane.verify()
    assert plane.retire(number).tolist() == [1, 2]


def test_a_copied_page_in_flight_waits_too():
    plane = make_plane()
    a = open_with(plane, 6)
    b = plane.fork(a)
    number = plane.dispatch(build_page_table_of(plane, a))
    plane.reserve([Slice(b, 6, 1)])
    plane.release(a)
    plane.confirm([3])
    assert (plane.pages_of(b).tolist(), plane.pending_pages) == ([1, 3], 1)
    assert plane.retire(number).tolist() == [2]
    plane.verify()


def build_page_table_of(plane, handle):
    n = plane.length(handle)
    return build_page_table(
        query_lens=[0], kv_lens=[n], pages=[plane.pages_of(handle)], tokens_per_page=4, num_pages=plane.layout.num_pages
    )


def test_dispatch_refuses_a_table_whose_pages_were_freed():
    plane = make_plane()
    a = open_with(plane, 4)
    table = checked(plane.prepare([Slice(a, 4, 1)], never))
    plane.release(a)
    before = snapshot(plane)
    with pytest.raises(UseAfterFreeError, match="page 1 was freed since the table was built"):
        plane.dispatch(table)
    assert snapshot(plane) == before


def test_dispatch_refuses_a_table_of_another_pool():
    plane, other = make_plane(), make_plane(num_pages=9)
    table = checked(other.prepare([Slice(other.open(), 0, 1)], never))
    with pytest.raises(InvalidInputError, match="table over 9 pages, the pool has 13"):
        plane.dispatch(table)


def test_retire_refuses_what_is_not_in_flight():
    plane = make_plane()
    with pytest.raises(InvalidInputError, match="no step is in flight"):
        plane.retire(1)
    number = step(plane, Slice(plane.open(), 0, 1))
    for wrong in (number - 1, number + 1):
        with pytest.raises(InvalidInputError, match=f"retire.step must be in 1..1, got {wrong}"):
            plane.retire(wrong)


def test_scenario_h4_a_page_of_a_dispatched_step_gets_no_second_owner():
    """N + 1 is dispatched; N's result finishes the request; a new request arrives."""
    plane = make_plane(num_pages=3)
    pool = FakePool(plane)
    a = plane.open()
    n = plane.dispatch(checked(plane.prepare([Slice(a, 0, 4)], pool.scrub)))
    table = checked(plane.prepare([Slice(a, 4, 1)], pool.scrub))
    after_n = plane.dispatch(table)
    plane.retire(n)
    plane.release(a)
    b = plane.open()
    assert plane.prepare([Slice(b, 0, 1)], never) is None
    pool.run(table, [7])  # the step that was in flight writes
    plane.retire(after_n)
    fresh = checked(plane.prepare([Slice(b, 0, 1)], pool.scrub))
    pool.run(fresh, [8])
    assert pool.read(fresh, 0) == [8]
    assert pool.scrubbed == [[1]]


def test_scenario_h9_pending_frees_are_counted():
    """One page short with a fence open: what a release will give is known before it is given."""
    plane = make_plane(num_pages=6, max_requests=6)
    handles = [open_with(plane, 4) for _ in range(5)]
    number = plane.dispatch(build_page_table_of(plane, handles[3]))
    new = Slice(plane.open(), 0, 4)
    shortfall = plane.pages_needed([new]) - plane.available_pages
    assert shortfall == 1
    assert plane.release(handles[3]).tolist() == []
    assert (plane.available_pages, plane.pending_pages) == (0, 1)
    assert plane.pages_needed([new]) <= plane.available_pages + plane.pending_pages
    plane.retire(number)
    checked(plane.prepare([new], lambda pages: None))
    assert all(plane.length(h) == 4 for h in (*handles[:3], handles[4]))
