"""Which request holds which pages, in token order: one int32 matrix whose rows are recycled (requirement C2)."""

from __future__ import annotations

import dataclasses

import numpy as np

from paged.common.checks import check_int
from paged.common.errors import InternalError, StaleHandleError

_VACANT = -1
_COPY_ROWS_ABOVE = 128  # pages per row; measured break-even of the two ways to gather


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """Names one open request: a row of the map, and the epoch under which the row was given out.

    Made by `PageMap.open` only. After the request is closed the row is used again under a later epoch, and this handle
    is stale for good. Neither number is negative.
    """

    row: int
    epoch: int

    def __post_init__(self) -> None:
        check_int("Handle", "row", self.row, minimum=0)
        check_int("Handle", "epoch", self.epoch, minimum=0, maximum=2**63 - 1)


class PageMap:
    """Request → pages as one int32 matrix of max_requests × max_pages_per_request.

    Row r lists the pages of one request in token order; entries past `counts[r]` are 0, the sentinel. Rows are
    recycled, latest closed first, under an epoch that grows with every closing. At 256 requests of 32k tokens and
    16-token pages the matrix has 2 MiB.
    """

    def __init__(self, max_requests: int, max_pages_per_request: int):
        rows = check_int("PageMap", "max_requests", max_requests, minimum=1)
        width = check_int("PageMap", "max_pages_per_request", max_pages_per_request, minimum=1)
        self.pages = np.zeros((rows, width), np.int32)
        self.counts = np.zeros(rows, np.int64)
        # Epoch of the request in a row, or −1 where nobody is: one comparison finds stale and forged handles alike.
        self.open_epochs = np.full(rows, _VACANT, np.int64)
        self._epochs = np.zeros(rows, np.int64)
        self._counting = np.arange(0)
        self._vacant = list(range(rows - 1, -1, -1))

    @property
    def max_requests(self) -> int:
        """Rows: requests that can be open at once."""
        return self.pages.shape[0]

    @property
    def max_pages(self) -> int:
        """Pages that one request can hold."""
        return self.pages.shape[1]

    @property
    def num_open(self) -> int:
        """Requests that are open now."""
        return self.max_requests - len(self._vacant)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.pages.nbytes

    def open(self) -> Handle | None:
        """A handle for a new request that holds no page, or None if every row is taken."""
        if not self._vacant:
            return None
        row = self._vacant.pop()
        self.open_epochs[row] = self._epochs[row]
        return Handle(row, int(self._epochs[row]))

    def row(self, handle: Handle) -> int:
        """The row of an open request; raises `StaleHandleError` naming row and epoch otherwise."""
        if not isinstance(handle, Handle) or handle.row >= self.max_requests:
            raise StaleHandleError(f"{handle!r} is no handle of this map of {self.max_requests} rows. Use open().")
        if self.open_epochs[handle.row] != handle.epoch:
            raise self.stale(handle.row, handle.epoch)
        return handle.row

    def stale(self, row: int, epoch: int) -> StaleHandleError:
        """The error for a handle that names a row in range under an epoch that is not the open one."""
        now = int(self.open_epochs[row])
        state = "the row is vacant" if now == _VACANT else f"the row is at epoch {now}"
        return StaleHandleError(
            f"handle of row {row}, epoch {epoch} is stale: that request was released and {state}. "
            f"Release a request once, and drop its handle then."
        )

    def pages_of(self, handle: Handle) -> np.ndarray:
        """int32 page ids that a request holds, in token order (a copy)."""
        row = self.row(handle)
        return self.pages[row, : self.counts[row]].copy()

    def extend(self, rows: np.ndarray, grow: np.ndarray, pages: np.ndarray) -> None:
        """Append to each of the distinct `rows` its share of `pages`: the first grow[0] go to rows[0], and so on.

        The caller has checked that rows are open and that the matrix is wide enough.
        """
        some = grow > 0
        rows, grow = rows[some], grow[some]
        held = self.counts[rows]
        if pages.shape[0] == rows.shape[0]:  # one page each, as when decoding
            self.pages[rows, held] = pages
        else:
            column = np.repeat(held + grow - np.add.accumulate(grow), grow) + np.arange(pages.shape[0])
            self.pages[np.repeat(rows, grow), column] = pages
        self.counts[rows] = held + grow

    def replace(self, row: int, index: int, page: int) -> int:
        """Put `page` where the row's page number `index` was, and return the one that was there."""
        old = int(self.pages[row, index])
        self.pages[row, index] = page
        return old

    def shrink(self, row: int, count: int) -> np.ndarray:
        """Keep the first `count` pages of a row and return the others, in token order."""
        removed = self.pages[row, count : self.counts[row]].copy()
        self.pages[row, count : self.counts[row]] = 0
        self.counts[row] = min(count, self.counts[row])
        return removed

    def close(self, handle: Handle) -> np.ndarray:
        """Close a request, make its handle stale, and return the pages it listed, in token order."""
        row = self.row(handle)
        removed = self.shrink(row, 0)
        self.open_epochs[row] = _VACANT
        self._epochs[row] += 1
        self._vacant.append(row)
        return removed

    def gather(self, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Pages number first[i] .. last[i] − 1 of each row, one row after the other; last ≥ first."""
        counts = last - first
        ends = np.add.accumulate(counts)
        out = np.empty(int(ends[-1]) if ends.shape[0] else 0, np.int32)
        self._gather(rows, last, counts, ends, out)
        return out

    def gather_leading(self, rows: np.ndarray, counts: np.ndarray, ends: np.ndarray, out: np.ndarray) -> None:
        """The first counts[i] pages of each row, one row after the other, into `out` (int32, exactly as long).

        `ends` is the running sum of `counts`.
        """
        self._gather(rows, counts, counts, ends, out)

    def _gather(
        self, rows: np.ndarray, last: np.ndarray, counts: np.ndarray, ends: np.ndarray, out: np.ndarray
    ) -> None:
        total = out.shape[0]
        if total > _COPY_ROWS_ABOVE * counts.shape[0]:  # long rows: one memory copy each beats an index per page
            spans = zip(rows.tolist(), (last - counts).tolist(), last.tolist())
            np.concatenate([self.pages[row, a:b] for row, a, b in spans], out=out)
            return
        flat = np.repeat(rows * self.max_pages + last - ends, counts)
        flat += self._up_to(total)
        # Every index is in range, and a mode that need not raise lets numpy write into `out` without a buffer.
        self.pages.reshape(-1).take(flat, out=out, mode="clip")

    def _up_to(self, count: int) -> np.ndarray:
        """0 .. count − 1, kept from call to call."""
        if count > self._counting.shape[0]:
            self._counting = np.arange(2 * count)
        return self._counting[:count]

    def holders(self, num_pages: int) -> np.ndarray:
        """(num_pages,) int64: how many rows list each page."""
        listed = np.arange(self.max_pages) < self.counts[:, None]
        return np.bincount(self.pages[listed], minlength=num_pages)

    def verify(self) -> None:
        """Prove that rows, counts and epochs agree; raises `InternalError` naming the row."""
        listed = np.arange(self.max_pages) < self.counts[:, None]
        vacant = np.zeros(self.max_requests, np.int64)
        np.add.at(vacant, np.asarray(self._vacant, np.int64), 1)
        is_vacant = self.open_epochs == _VACANT
        for rule, bad in (
            (
                "lists more pages than it has columns, or fewer than none",
                self.counts.clip(0, self.max_pages) != self.counts,
            ),
            ("has a page past its count, or the sentinel before it", ((self.pages != 0) != listed).any(axis=1)),
            ("is vacant and holds pages", is_vacant & (self.counts > 0)),
            ("is open and in the list of vacant rows, or vacant and not once in it", vacant != is_vacant),
            ("is open under another epoch than its latest", ~is_vacant & (self.open_epochs != self._epochs)),
        ):
            if bad.any():
                raise InternalError(f"PageMap: row {int(np.argmax(bad))} {rule}.")
