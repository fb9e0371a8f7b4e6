"""What happens when somebody takes a page, shares it or lets go of it, whoever that is (requirements C5, C7, C8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paged.common.errors import InternalError, UseAfterFreeError
from paged.common.namespace import CacheNamespace
from paged.control.allocator import PageAllocator
from paged.control.fence import RetirementFence
from paged.control.prefix_index import PrefixIndex

PagesCallback = Callable[[np.ndarray], object]
_NO_PAGES = np.zeros(0, np.int32)


class PageLedger:
    """Allocator, fence and prefix index of one pool, joined by the rules of a page's life.

    A page is held by requests, by the index and by steps in flight. It is freed when the last of them lets go, and
    `poison_freed` sees it then and not before. Taking pages evicts from the index when too few are free.
    """

    def __init__(self, num_pages: int, prefixes: PrefixIndex | None, poison_freed: PagesCallback | None):
        self.allocator = PageAllocator(num_pages)
        self.fence = RetirementFence(num_pages)
        self.prefixes = prefixes
        self.poison_freed = poison_freed
        self._last_owner = np.full((2, num_pages), -1, np.int64)  # row and epoch; for messages only

    @property
    def num_available(self) -> int:
        """Pages that `take` can give: free ones, and those of the index that nobody else needs."""
        free = self.allocator.num_free
        if self.prefixes is None or not len(self.prefixes):
            return free
        return free + int(np.count_nonzero(self.prefixes.evictable(self._pinned())))

    def has(self, count: int) -> bool:
        """Whether `take(count)` can be had. The free pages are asked first; counting evictable ones takes longer."""
        return count <= self.allocator.num_free or count <= self.num_available

    def take(self, count: int) -> np.ndarray:
        """`count` pages, of which `has` was asked before; evicts no more of the index than is short."""
        short = count - self.allocator.num_free
        if short > 0 and self.prefixes is not None:
            self._drop(self.prefixes.evict(short, self._pinned()))
        pages = self.allocator.allocate(count)
        if pages is None:
            raise InternalError(f"PageLedger: {count} pages were promised, {self.allocator.num_free} are free.")
        return pages

    def let_go(self, pages: np.ndarray, row: int, epoch: int) -> np.ndarray:
        """A request drops its hold on each page, at once or, as the last holder of a page in flight, when its step
        retires. Returns the pages freed."""
        self._last_owner[0, pages] = row
        self._last_owner[1, pages] = epoch
        return self._drop(pages)

    def adopt(self, namespace: CacheNamespace, tokens: Sequence[int] | np.ndarray, pages: np.ndarray) -> np.ndarray:
        """The index holds these whole pages of a request, too, where it does not have their tokens; returns those."""
        assert self.prefixes is not None
        adopted = self.prefixes.insert(namespace, tokens, pages)
        self.allocator.share(adopted)
        return adopted

    def forget_prefixes(self) -> np.ndarray:
        """Empty the index; returns the pages freed."""
        return _NO_PAGES if self.prefixes is None else self._drop(self.prefixes.clear())

    def dispatch(self, pages: np.ndarray) -> int:
        """Number of a new step in flight over `pages`; raises `UseAfterFreeError` naming a page that nobody holds."""
        # Of ten thousand pages a step: `take`, and an index that numpy need not convert, cost half of indexing.
        pages = pages.astype(np.intp)
        held = self.allocator.allocated.take(pages)
        if not held.all():
            raise UseAfterFreeError(f"dispatch: page {pages[np.argmin(held)]} was freed since the table was built.")
        return self.fence.dispatch(pages)

    def retire(self, step: int) -> np.ndarray:
        """Steps up to `step` are done; returns the pages freed now."""
        return self._free(self.fence.retire(step))

    def last_owner(self, page: int) -> str:
        """The request that let go of a page last, for a message."""
        row, epoch = self._last_owner[:, page].tolist()
        return f"the request of row {row}, epoch {epoch} let go of it"

    def let_go_by(self, row: int, epoch: int) -> list[int]:
        """Pages that nobody let go of after this request did, for a message."""
        return np.flatnonzero((self._last_owner == [[row], [epoch]]).all(axis=0)).tolist()

    def _pinned(self) -> np.ndarray:
        """(num_pages,) bool: pages whose eviction would free nothing now."""
        return (self.allocator.reference_counts > 1) | self.fence.in_flight(np.arange(self.allocator.num_pages))

    def _drop(self, pages: np.ndarray) -> np.ndarray:
        if not pages.shape[0]:
            return _NO_PAGES
        wait = self.fence.in_flight(pages) & (self.allocator.reference_counts[pages] == 1)
        self.fence.hold(pages[wait])
        return self._free(pages[~wait])

    def _free(self, pages: np.ndarray) -> np.ndarray:
        freed = self.allocator.free(pages) if pages.shape[0] else _NO_PAGES
        if freed.shape[0] and self.poison_freed is not None:
            self.poison_freed(freed)
        return freed
