"""Who holds which page: a bitmap, reference counts and dirty flags over page ids (requirements C1, C3)."""

from __future__ import annotations

import numpy as np

from paged.common.checks import check_int, check_int32_vector, refuse_rows
from paged.common.errors import InternalError, UseAfterFreeError
from paged.common.layout import SENTINEL_PAGE

_NO_PAGES = np.zeros(0, np.int32)
_NO_PAGES.flags.writeable = False


class PageAllocator:
    """Hands out the pages 1 .. num_pages − 1 of a pool; the sentinel page 0 is never allocated.

    A page has any number of holders, counted in references; it returns to the free pages when the last one lets go.
    It is *dirty* from then on until `confirm`; pages of a new pool are clean, because the pool is built zeroed. Pages
    are handed out oldest-freed first, so clean pages go before recycled ones and the order is deterministic.

    Methods that take page ids take any one-dimensional integer sequence. Every refusal happens before anything changes.
    `allocated` (bool), `reference_counts` (int32) and `dirty` (bool) are live, read-only views over page ids.
    """

    def __init__(self, num_pages: int):
        self._num_pages = check_int("PageAllocator", "num_pages", num_pages, minimum=2)
        self._allocated = np.zeros(self._num_pages, np.bool_)
        self._references = np.zeros(self._num_pages, np.int32)
        self._dirty = np.zeros(self._num_pages, np.bool_)
        # Free pages as a queue in a ring: both ends move by slices, so a call costs what it hands out.
        self._ring = np.arange(1, self._num_pages, dtype=np.int32)
        self._head = 0
        self._num_free = self._num_pages - 1
        self._num_unconfirmed = 0
        self._num_shared = 0
        self.allocated, self.reference_counts, self.dirty = map(
            _read_only, (self._allocated, self._references, self._dirty)
        )

    @property
    def num_pages(self) -> int:
        """Pages of one layer, the sentinel included."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out now."""
        return self._num_free

    @property
    def num_allocated(self) -> int:
        """Pages that somebody holds."""
        return self._num_pages - 1 - self._num_free

    @property
    def num_unconfirmed(self) -> int:
        """Allocated pages that are dirty: while this is 0 no page table can name a dirty page."""
        return self._num_unconfirmed

    @property
    def num_shared(self) -> int:
        """Pages with more holders than one."""
        return self._num_shared

    def allocate(self, count: int) -> np.ndarray | None:
        """`count` distinct pages (int32) with one reference each, or None if fewer are free; then nothing changed."""
        count = check_int("PageAllocator.allocate", "count", count, minimum=0)
        if count > self._num_free:
            return None
        pages = self._ring[self._head : self._head + count]
        if pages.shape[0] < count:
            pages = np.concatenate([pages, self._ring[: count - pages.shape[0]]])
        else:
            pages = pages.copy()
        self._head = (self._head + count) % self._ring.shape[0]
        self._num_free -= count
        self._allocated[pages] = True
        self._references[pages] = 1
        self._num_unconfirmed += int(np.count_nonzero(self._dirty[pages]))
        return pages

    def share(self, pages: np.ndarray | list[int]) -> None:
        """One more reference for each distinct page. Raises `UseAfterFreeError` naming a page that is not allocated."""
        pages = self._held("share", pages)
        held = self._references[pages]
        self._references[pages] = held + 1
        self._num_shared += int(np.count_nonzero(held == 1))

    def free(self, pages: np.ndarray | list[int]) -> np.ndarray:
        """Drop one reference of each distinct page; returns the pages (int32, ascending) that nobody holds any more.

        A page named twice in one call counts once. Raises `UseAfterFreeError` naming a page that is not allocated.
        """
        pages = self._held("free", pages)
        left = self._references[pages] - 1
        self._references[pages] = left
        freed = pages[left == 0]
        self._num_shared -= int(np.count_nonzero(left == 1))
        self._num_unconfirmed -= int(np.count_nonzero(self._dirty[freed]))
        self._allocated[freed] = False
        self._dirty[freed] = True
        tail = (self._head + self._num_free) % self._ring.shape[0]
        first = min(freed.shape[0], self._ring.shape[0] - tail)
        self._ring[tail : tail + first] = freed[:first]
        self._ring[: freed.shape[0] - first] = freed[first:]
        self._num_free += freed.shape[0]
        return freed

    def dirty_among(self, pages: np.ndarray | list[int]) -> np.ndarray:
        """Those of `pages` (int32, in their order) that were freed and not confirmed overwritten since."""
        pages = self._in_range("dirty_among", pages)
        return pages[self._dirty[pages]] if pages.shape[0] else _NO_PAGES

    def taint(self, pages: np.ndarray | list[int]) -> None:
        """Make allocated pages dirty: their content means nothing until the caller overwrites and confirms it."""
        pages = self._held("taint", pages)
        self._num_unconfirmed += int(np.count_nonzero(~self._dirty[pages]))
        self._dirty[pages] = True

    def confirm(self, pages: np.ndarray | list[int]) -> None:
        """The caller overwrote these pages: they are clean until they are freed. Confirming a clean page is harmless.

        Raises `UseAfterFreeError` naming a page that is not allocated: nobody could have asked for its overwriting.
        """
        pages = self._held("confirm", pages)
        self._num_unconfirmed -= int(np.count_nonzero(self._dirty[pages]))
        self._dirty[pages] = False

    def verify(self) -> None:
        """Prove that bitmap, reference counts, free queue and counters agree; raises `InternalError` naming a page."""
        queue = self._ring[(self._head + np.arange(self._num_free)) % self._ring.shape[0]]
        in_queue = np.bincount(queue, minlength=self._num_pages)
        expected = (~self._allocated).astype(np.int64)
        expected[SENTINEL_PAGE] = 0
        for rule, bad in (
            ("is the sentinel and allocated", self._allocated & (np.arange(self._num_pages) == SENTINEL_PAGE)),
            ("is allocated without a reference, or free with one", self._allocated != (self._references > 0)),
            ("has a negative reference count", self._references < 0),
            ("is not exactly once in the free queue, or is there and allocated", in_queue != expected),
        ):
            if bad.any():
                page = int(np.argmax(bad))
                raise InternalError(
                    f"PageAllocator: page {page} {rule} (allocated={bool(self._allocated[page])}, "
                    f"references={self._references[page]}, times in free queue={in_queue[page]})."
                )
        shared = int(np.count_nonzero(self._references > 1))
        if shared != self._num_shared:
            raise InternalError(f"PageAllocator: {shared} pages are shared, the counter says {self._num_shared}.")
        unconfirmed = int(np.count_nonzero(self._dirty & self._allocated))
        if unconfirmed != self._num_unconfirmed:
            raise InternalError(
                f"PageAllocator: {unconfirmed} allocated pages are dirty, the counter says {self._num_unconfirmed}."
            )

    def _in_range(self, method: str, pages: np.ndarray | list[int]) -> np.ndarray:
        owner = f"PageAllocator.{method}"
        array = check_int32_vector(owner, "pages", pages)
        bad = (array < 0) | (array >= self._num_pages)
        refuse_rows(owner, "pages", array, bad, f"must be in 1..{self._num_pages - 1}", "entry")
        return array

    def _held(self, method: str, pages: np.ndarray | list[int]) -> np.ndarray:
        """Distinct pages, ascending, all of them allocated."""
        array = np.unique(self._in_range(method, pages))
        held = self._allocated[array]
        if not held.all():
            page = int(array[np.argmin(held)])
            if page == SENTINEL_PAGE:
                raise UseAfterFreeError(f"PageAllocator.{method}: page 0 is the sentinel, which nobody ever holds.")
            raise UseAfterFreeError(
                f"PageAllocator.{method}: page {page} is not allocated (it was freed, or never handed out). "
                f"Use pages only between the allocate and the free that belong together."
            )
        return array


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
