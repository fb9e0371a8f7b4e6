"""PageMap: one int32 matrix, rows recycled under an epoch (requirement C2)."""

import numpy as np
import pytest
from plane_helpers import snapshot

from paged.common import InternalError, InvalidInputError, StaleHandleError
from paged.control import Handle, PageMap


def grown(page_map: PageMap, *sizes: int) -> list[Handle]:
    """Open requests of these sizes; pages count up from 1."""
    handles = [page_map.open() for _ in sizes]
    assert None not in handles
    rows = np.array([h.row for h in handles])  # type: ignore[union-attr]
    page_map.extend(rows, np.array(sizes), np.arange(1, sum(sizes) + 1, dtype=np.int32))
    return handles  # type: ignore[return-value]


def test_size_of_the_largest_intended_map():
    page_map = PageMap(256, 32 * 1024 // 16)
    assert page_map.pages.dtype == np.int32
    assert page_map.nbytes == 2 * 2**20


def test_rows_list_their_pages_in_order():
    page_map = PageMap(4, 5)
    a, b, c = grown(page_map, 2, 0, 3)
    assert page_map.pages_of(a).tolist() == [1, 2]
    assert page_map.pages_of(b).tolist() == []
    assert page_map.pages_of(c).tolist() == [3, 4, 5]
    page_map.extend(np.array([c.row, a.row, b.row]), np.array([1, 2, 1]), np.array([9, 8, 7, 6], np.int32))
    assert page_map.pages_of(a).tolist() == [1, 2, 8, 7]
    assert page_map.pages_of(b).tolist() == [6]
    assert page_map.pages_of(c).tolist() == [3, 4, 5, 9]
    assert page_map.replace(a.row, 1, 12) == 2
    assert page_map.shrink(a.row, 2).tolist() == [8, 7]
    assert page_map.shrink(a.row, 5).tolist() == []
    assert page_map.pages_of(a).tolist() == [1, 12]
    page_map.verify()


def test_no_row_left():
    page_map = PageMap(2, 3)
    assert page_map.open() is not None
    b = page_map.open()
    assert b is not None
    assert page_map.open() is None
    assert page_map.num_open == 2
    page_map.close(b)
    assert page_map.open() == Handle(b.row, b.epoch + 1)


def test_a_recycled_row_makes_the_old_handle_stale_for_good():
    page_map = PageMap(2, 3)
    (a,) = grown(page_map, 2)
    assert page_map.close(a).tolist() == [1, 2]
    with pytest.raises(StaleHandleError, match=r"row 0, epoch 0 is stale: .* and the row is vacant"):
        page_map.pages_of(a)
    again = page_map.open()
    assert again == Handle(0, 1)
    before = snapshot(page_map)
    for use in (page_map.pages_of, page_map.close, page_map.row):
        with pytest.raises(StaleHandleError, match=r"row 0, epoch 0 is stale: .* the row is at epoch 1"):
            use(a)
    assert snapshot(page_map) == before
    page_map.verify()


@pytest.mark.parametrize("handle", [Handle(1, 0), Handle(0, 1), Handle(0, 7)])
def test_forged_handles_are_stale(handle):
    page_map = PageMap(2, 3)
    page_map.open()
    with pytest.raises(StaleHandleError, match=f"row {handle.row}, epoch {handle.epoch}"):
        page_map.row(handle)


def test_a_handle_of_a_larger_map_is_refused():
    page_map = PageMap(2, 3)
    with pytest.raises(StaleHandleError, match=r"Handle\(row=2, epoch=0\) is no handle of this map of 2 rows"):
        page_map.row(Handle(2, 0))


@pytest.mark.parametrize(("row", "epoch", "field"), [(-1, 0, "row"), (0, -1, "epoch")])
def test_handles_are_not_negative(row, epoch, field):
    with pytest.raises(InvalidInputError, match=rf"Handle.{field} must be in 0\.\..*, got -1"):
        Handle(row, epoch)


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (-1, 3)])
def test_wrong_sizes_are_refused(size):
    with pytest.raises(InvalidInputError, match=r"PageMap.max_.* must be in 1\.\."):
        PageMap(*size)


@pytest.mark.parametrize("width", [3, 600])
def test_both_ways_to_gather_agree(width):
    rng = np.random.default_rng(width)
    page_map = PageMap(9, 2 * width)
    grown(page_map, *rng.integers(width, 2 * width, 9).tolist())
    rows = rng.permutation(9)[:6]
    last = rng.integers(width // 2, width, 6)
    first = rng.integers(0, last + 1)
    for start in (first, np.zeros_like(first), last):
        expected = [page for r, a, b in zip(rows, start, last) for page in page_map.pages[r, a:b].tolist()]
        assert page_map.gather(rows, start, last).tolist() == expected
    out = np.zeros(last.sum(), np.int32)
    page_map.gather_leading(rows, last, np.cumsum(last), out)
    assert out.tolist() == page_map.gather(rows, np.zeros_like(last), last).tolist()
    assert page_map.gather(rows[:0], first[:0], last[:0]).tolist() == []


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda m: m.counts.__setitem__(0, 6), "row 0 lists more pages than it has columns"),
        (lambda m: m.pages.__setitem__((0, 1), 0), "row 0 has a page past its count, or the sentinel before it"),
        (lambda m: m.pages.__setitem__((1, 3), 7), "row 1 has a page past its count, or the sentinel before it"),
        (lambda m: m.open_epochs.__setitem__(0, -1), "row 0 is vacant and holds pages"),
        (lambda m: m._vacant.pop(), "row 2 is open and in the list of vacant rows, or vacant and not once in it"),
        (lambda m: m._vacant.append(1), "row 1 is open and in the list of vacant rows, or vacant and not once in it"),
        (lambda m: m._epochs.__setitem__(1, 4), "row 1 is open under another epoch than its latest"),
    ],
)
def test_verify_finds_planted_damage(damage, text):
    page_map = PageMap(3, 5)
    grown(page_map, 2, 1)
    page_map.verify()
    damage(page_map)
    with pytest.raises(InternalError, match=text):
        page_map.verify()
