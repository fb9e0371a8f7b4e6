"""Proof that the parts of a control plane agree (requirement C9). Slow and independent of the paths it checks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paged.common.errors import InternalError
from paged.common.page_table import pages_for
from paged.control.allocator import PageAllocator
from paged.control.copies import PendingCopy
from paged.control.ledger import PageLedger
from paged.control.page_map import PageMap


def live_pages(page_map: PageMap, copies: Mapping[int, PendingCopy], num_pages: int) -> np.ndarray:
    """(num_pages,) bool: pages that open requests list or wait to copy into."""
    live = page_map.holders(num_pages) > 0
    live[[copy.target for copy in copies.values()]] = True
    return live


def retained_pages(ledger: PageLedger, live: np.ndarray) -> int:
    """Pages that the index holds and no open request does."""
    return 0 if ledger.prefixes is None else int(np.count_nonzero(ledger.prefixes.held & ~live))


def verify(
    ledger: PageLedger,
    page_map: PageMap,
    lengths: np.ndarray,
    copies: Mapping[int, PendingCopy],
    tokens_per_page: int,
) -> None:
    """Raise `InternalError` naming the first page or row in which two parts disagree."""
    allocator = ledger.allocator
    allocator.verify()
    page_map.verify()
    ledger.fence.verify()
    _verify_rows(allocator, page_map, lengths, tokens_per_page)
    holders = page_map.holders(allocator.num_pages) + ledger.fence.pending
    if ledger.prefixes is not None:
        ledger.prefixes.verify()
        holders += ledger.prefixes.held
        dirty = ledger.prefixes.held & allocator.dirty
        if dirty.any():
            raise InternalError(f"ControlPlane: page {int(np.argmax(dirty))} is published and dirty.")
    for row, copy in copies.items():
        holders[copy.target] += 1
        _verify_copy(allocator, page_map, int(lengths[row]) % tokens_per_page, row, copy)
    wrong = holders != allocator.reference_counts
    if wrong.any():
        page = int(np.argmax(wrong))
        raise InternalError(
            f"ControlPlane: page {page} has {holders[page]} holders and {allocator.reference_counts[page]} references."
        )


def _verify_rows(allocator: PageAllocator, page_map: PageMap, lengths: np.ndarray, tokens_per_page: int) -> None:
    for row in range(page_map.max_requests):
        pages = page_map.pages[row, : page_map.counts[row]]
        full = pages_for(int(lengths[row]), tokens_per_page)
        if lengths[row] < 0 or (lengths[row] > 0 and page_map.open_epochs[row] < 0) or full > pages.shape[0]:
            raise InternalError(
                f"ControlPlane: row {row} has length {lengths[row]} and {pages.shape[0]} pages of {tokens_per_page}."
            )
        if np.unique(pages).shape[0] != pages.shape[0]:
            raise InternalError(f"ControlPlane: row {row} lists a page twice: {pages.tolist()}.")
        if allocator.dirty[pages[:full]].any():
            raise InternalError(f"ControlPlane: row {row} has cached tokens in a dirty page: {pages.tolist()}.")
        if (allocator.reference_counts[pages[full:]] != 1).any():
            raise InternalError(f"ControlPlane: row {row} shares a page that holds none of its tokens.")


def _verify_copy(allocator: PageAllocator, page_map: PageMap, fill: int, row: int, copy: PendingCopy) -> None:
    in_place = copy.number < page_map.counts[row] and page_map.pages[row, copy.number] == copy.source
    if page_map.open_epochs[row] < 0 or not in_place or fill == 0 or not allocator.dirty[copy.target]:
        raise InternalError(f"ControlPlane: row {row} waits for {copy}, which its pages do not call for.")
