"""PageAllocator: bitmap, reference counts, dirty flags (requirement C1, C3)."""

import numpy as np
import pytest
from plane_helpers import snapshot

from paged.common import InternalError, InvalidInputError, UseAfterFreeError
from paged.control import PageAllocator


def test_hands_out_distinct_pages_and_never_the_sentinel():
    pages = PageAllocator(9)
    first, rest = pages.allocate(3), pages.allocate(5)
    assert first is not None
    assert rest is not None
    assert first.dtype == np.int32
    assert sorted([*first.tolist(), *rest.tolist()]) == list(range(1, 9))
    assert (pages.num_free, pages.num_allocated) == (0, 8)
    pages.verify()


def test_allocates_all_or_nothing():
    pages = PageAllocator(5)
    before = snapshot(pages)
    assert pages.allocate(5) is None
    assert snapshot(pages) == before
    none = pages.allocate(0)
    assert none is not None
    assert none.shape == (0,)


def test_clean_pages_go_before_recycled_ones_and_the_oldest_freed_first():
    pages = PageAllocator(5)
    pages.allocate(2)
    pages.free([2])
    pages.free([1])
    assert [pages.allocate(1).tolist() for _ in range(4)] == [[3], [4], [2], [1]]  # type: ignore[union-attr]


def test_the_free_queue_wraps_around():
    pages = PageAllocator(6)
    held = list(pages.allocate(4))  # type: ignore[arg-type]
    for _ in range(20):
        pages.free(np.array(held[:3]))
        held = [*held[3:], *pages.allocate(3)]  # type: ignore[misc]
        pages.verify()
        assert len(set(held)) == 4


def test_a_page_named_twice_in_one_call_is_one_holder_less():
    pages = PageAllocator(5)
    pages.allocate(2)
    pages.share([1, 1])
    assert pages.reference_counts[1] == 2
    assert pages.free([1, 2, 1]).tolist() == [2]
    assert pages.free([1, 1]).tolist() == [1]
    pages.verify()


@pytest.mark.parametrize("method", ["free", "share", "confirm", "taint"])
@pytest.mark.parametrize(
    ("named", "error", "text"),
    [
        ([1, 3], UseAfterFreeError, "page 3 is not allocated"),
        ([1, 0], UseAfterFreeError, "page 0 is the sentinel"),
        ([1, 5], InvalidInputError, r"entry 1 has 5"),
        ([1, -1], InvalidInputError, r"entry 1 has -1"),
        (np.array([1.0]), InvalidInputError, "float64"),
        (np.array([[1]]), InvalidInputError, r"shape \(1, 1\)"),
        (np.array([1, 2**32 + 1]), InvalidInputError, "must fit 32 bits"),
    ],
)
def test_wrong_pages_are_refused_and_change_nothing(method, named, error, text):
    pages = PageAllocator(5)
    pages.allocate(3)
    pages.free([3])
    before = snapshot(pages)
    with pytest.raises(error, match=text):
        getattr(pages, method)(named)
    assert snapshot(pages) == before
    pages.verify()


@pytest.mark.parametrize("count", [-1, 2**31])
def test_wrong_counts_are_refused(count):
    with pytest.raises(InvalidInputError, match=rf"PageAllocator.allocate.count must be in .*, got {count}"):
        PageAllocator(5).allocate(count)


def test_a_page_is_dirty_from_its_freeing_until_its_confirmation():
    pages = PageAllocator(4)
    assert pages.dirty_among([1, 2, 3]).tolist() == []
    pages.allocate(3)
    assert (pages.dirty_among([1, 2, 3]).tolist(), pages.num_unconfirmed) == ([], 0)
    pages.free([2, 3])
    assert (pages.dirty_among([3, 2, 1]).tolist(), pages.num_unconfirmed) == ([3, 2], 0)
    again = pages.allocate(2)
    assert again is not None
    assert (pages.dirty_among(again).tolist(), pages.num_unconfirmed) == ([2, 3], 2)
    pages.confirm([2])
    pages.confirm([2, 1])
    assert (pages.dirty_among([1, 2, 3]).tolist(), pages.num_unconfirmed) == ([3], 1)
    pages.free([3])
    assert pages.num_unconfirmed == 0
    pages.verify()


def test_a_shared_page_becomes_dirty_only_when_its_last_holder_leaves():
    pages = PageAllocator(4)
    pages.allocate(1)
    pages.share([1])
    assert pages.free([1]).tolist() == []
    assert pages.dirty_among([1]).tolist() == []
    assert pages.free([1]).tolist() == [1]
    assert pages.dirty_among([1]).tolist() == [1]


def test_views_are_live_and_read_only():
    pages = PageAllocator(4)
    counts, allocated, dirty = pages.reference_counts, pages.allocated, pages.dirty
    pages.allocate(1)
    pages.share([1])
    assert (counts[1], allocated[1], dirty[1]) == (2, True, False)
    for view in (counts, allocated, dirty):
        with pytest.raises(ValueError, match="read-only"):
            view[1] = 0


@pytest.mark.parametrize(
    ("array", "page", "value", "text"),
    [
        ("_allocated", 1, False, "page 1 is allocated without a reference, or free with one"),
        ("_references", 3, 1, "page 3 is allocated without a reference, or free with one"),
        ("_references", 3, -1, "page 3 has a negative reference count"),
        ("_allocated", 0, True, "page 0 is the sentinel and allocated"),
        ("_ring", 2, 4, "page 3 is not exactly once in the free queue"),
        ("_dirty", 1, True, "1 allocated pages are dirty, the counter says 0"),
    ],
)
def test_verify_finds_planted_damage(array, page, value, text):
    pages = PageAllocator(6)
    pages.allocate(2)
    pages.verify()
    getattr(pages, array)[page] = value
    with pytest.raises(InternalError, match=text):
        pages.verify()
