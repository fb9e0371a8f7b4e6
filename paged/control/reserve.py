"""What a batch takes from the pool, and what must be overwritten before its table may be built."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paged.common.errors import DirtyPageError, InvalidInputError
from paged.common.page_table import pages_for
from paged.control.batch import Batch
from paged.control.copies import CopyLedger, PendingCopy
from paged.control.ledger import PageLedger
from paged.control.page_map import PageMap

_NO_PAGES = np.zeros(0, np.int32)


class Reservation(NamedTuple):
    """What must be overwritten before a step may be built: int32 page ids of one layer.

    `dirty` pages want a scrub; page copy_source[i] wants to be copied whole to copy_target[i], which needs no scrub.
    Confirm `dirty` and `copy_target` afterwards.
    """

    dirty: np.ndarray
    copy_source: np.ndarray
    copy_target: np.ndarray


class Demand(NamedTuple):
    """Pages that a batch takes: `grow` (rows,) new ones for each row, `copies` as (row, page number, source)."""

    grow: np.ndarray
    copies: list[tuple[int, int, int]]
    total: int


class Reserver:
    """Moves pages from the ledger to the rows of a batch, and gates the batch until they are ready."""

    def __init__(self, ledger: PageLedger, page_map: PageMap, tokens_per_page: int):
        self.copies = CopyLedger()
        self._ledger = ledger
        self._allocator = ledger.allocator
        self._map = page_map
        self._tokens_per_page = tokens_per_page

    def demand(self, batch: Batch) -> Demand:
        """What a batch takes. The only place that decides it, for asking and for taking alike (scenario H11)."""
        grow = np.maximum(batch.need - self._map.counts.take(batch.rows), 0)
        return Demand(grow, copies := self._copies_wanted(batch), int(np.add.reduce(grow)) + len(copies))

    def _copies_wanted(self, batch: Batch) -> list[tuple[int, int, int]]:
        if not self._allocator.num_shared:
            return []
        first, references = self._first(batch), self._allocator.reference_counts
        shared = references[first] > 1
        return self.copies.wanted(batch, first, shared, references) if shared.any() else []

    def reserve(self, batch: Batch, *, may_copy: bool) -> Reservation | None:
        """Take what the batch demands, all of it or, if too few pages can be had, nothing: then None."""
        demand = self.demand(batch)
        if not may_copy:
            sources = [source for _, _, source in demand.copies] + [c.source for c in self._copies_before(batch)]
            if sources:
                raise InvalidInputError(
                    f"ControlPlane.prepare: the batch writes into page {sources[0]}, which a fork shares, and no copy "
                    f"callable was given. Pass copy=."
                )
        if not self._ledger.has(demand.total):
            return None
        if demand.total:
            pages = self._ledger.take(demand.total)
            split = demand.total - len(demand.copies)
            if split:
                self._map.extend(batch.rows, demand.grow, pages[:split])
            if demand.copies:
                self._allocator.taint(pages[split:])
                self.copies.add(demand.copies, pages[split:])
        return self._unready(batch)

    def confirm(self, pages: np.ndarray | list[int]) -> None:
        """These pages are overwritten; those that were copied to take the place of what they are copies of."""
        self._allocator.confirm(pages)
        if self.copies.pending:
            for row, copy in self.copies.take_confirmed(pages):
                self._map.replace(row, copy.number, copy.target)
                self._ledger.let_go(np.array([copy.source]), row, int(self._map.open_epochs[row]))

    def refuse_unready(self, batch: Batch) -> None:
        """Raise `DirtyPageError` if the batch lists a dirty page, or would write into one that others hold, too."""
        if self._allocator.num_unconfirmed:
            listed = self._map.gather(batch.rows, np.zeros_like(batch.need), batch.need)
            dirty = self._allocator.dirty_among(listed)
            if dirty.shape[0]:
                raise DirtyPageError(
                    f"page {dirty[0]} is dirty: {self._ledger.last_owner(int(dirty[0]))} and it was not confirmed "
                    f"overwritten since ({dirty.shape[0]} such pages). Scrub them, call confirm with them, then build."
                )
        if not self._allocator.num_shared and not self.copies.pending:
            return
        first = self._first(batch)
        shared = first[self._allocator.reference_counts[first] > 1].tolist()
        shared += [copy.source for copy in self._copies_before(batch)]
        if shared:
            raise DirtyPageError(
                f"page {shared[0]} is shared and the batch would write into it. "
                f"Make the copies that reserve lists, call confirm with their targets, then build."
            )

    def _unready(self, batch: Batch) -> Reservation:
        dirty = source = target = _NO_PAGES
        if self._allocator.num_unconfirmed:
            filled = pages_for(batch.starts, self._tokens_per_page)
            dirty = self._allocator.dirty_among(self._map.gather(batch.rows, filled, batch.need))
        if copies := self._copies_before(batch):
            source = np.array([copy.source for copy in copies], np.int32)
            target = np.array([copy.target for copy in copies], np.int32)
        return Reservation(dirty, source, target)

    def _copies_before(self, batch: Batch) -> list[PendingCopy]:
        return self.copies.before(batch.rows, self._first(batch)) if self.copies.pending else []

    def _first(self, batch: Batch) -> np.ndarray:
        """(rows,) the page that each slice's first token goes to, the sentinel where it is still to come.

        Of the pages that a slice writes into only this one can have other holders: later ones hold no token yet.
        """
        return self._map.pages[batch.rows, batch.first_pages]
