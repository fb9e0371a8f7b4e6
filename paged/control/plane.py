"""The control plane: requests hold pages, steps reserve them, and no table is built over a page that is not ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paged.common.checks import check_int, show
from paged.common.errors import DirtyPageError, InvalidInputError, StaleHandleError, UseAfterFreeError
from paged.common.layout import StorageLayout
from paged.common.page_table import PageTable, pages_for
from paged.control import audit
from paged.control.allocator import PageAllocator
from paged.control.batch import Batch, Slice, SliceReader
from paged.control.copies import CopyLedger, PendingCopy
from paged.control.fence import RetirementFence
from paged.control.page_map import Handle, PageMap
from paged.control.shapes import FixedShape, Shapes
from paged.control.table import build_table, exact_shape

PagesCallback = Callable[[np.ndarray], object]
CopyCallback = Callable[[np.ndarray, np.ndarray], object]


class Reservation(NamedTuple):
    """What must be overwritten before a step may be built: int32 page ids of one layer.

    `dirty` pages want a scrub; page copy_source[i] wants to be copied whole to copy_target[i], which needs no scrub.
    Confirm `dirty` and `copy_target` afterwards.
    """

    dirty: np.ndarray
    copy_source: np.ndarray
    copy_target: np.ndarray


class ControlPlane:
    """Bookkeeping of one page pool: which request holds which pages, and which of them a step may name.

    - `layout`: the pool's geometry; only page counts and tokens per page are read.
    - `max_requests`: requests that can be open at once.
    - `max_pages_per_request`: widest request; by default all usable pages.
    - `shapes`: policy that pads the tables (`FixedShape`, `ShapeLadders`); None pads nothing.
    - `poison_freed`: called with the page ids (int32) that became free, each time some do; for debugging, to fill them
      with NaN. It never sees a page that somebody still holds or that a step in flight may touch.

    One step is `prepare`. Its parts `reserve`, `confirm` and `build` are public, and `prepare` is their only sequence
    in the project. A request's *length* is the tokens that built tables have written for it. Deterministic: the same
    calls give the same pages. Every refusal happens before anything changes.
    """

    def __init__(
        self,
        layout: StorageLayout,
        *,
        max_requests: int,
        max_pages_per_request: int | None = None,
        shapes: Shapes | None = None,
        poison_freed: PagesCallback | None = None,
    ):
        if not isinstance(layout, StorageLayout):
            raise InvalidInputError(f"ControlPlane.layout must be a StorageLayout, got {show(layout)}.")
        if shapes is not None and (isinstance(shapes, type) or not isinstance(shapes, Shapes)):
            raise InvalidInputError(
                f"ControlPlane.shapes must be FixedShape, ShapeLadders or None, got {show(shapes)}."
            )
        if poison_freed is not None:
            _check_callable("ControlPlane.poison_freed", poison_freed)
        self.layout = layout
        self.shapes = shapes
        self.poison_freed = poison_freed
        width = layout.usable_pages if max_pages_per_request is None else max_pages_per_request
        self._map = PageMap(max_requests, width)
        self._lengths = np.zeros(self._map.max_requests, np.int64)
        self._allocator = PageAllocator(layout.num_pages)
        self._fence = RetirementFence(layout.num_pages)
        self._reader = SliceReader(self._map, self._lengths, layout.tokens_per_page, self.capacity_tokens)
        self._copies = CopyLedger()
        self._last_owner = np.full((2, layout.num_pages), -1, np.int64)  # row and epoch; for messages only

    @property
    def max_requests(self) -> int:
        """Requests that can be open at once."""
        return self._map.max_requests

    @property
    def num_open(self) -> int:
        """Requests that are open now."""
        return self._map.num_open

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request can ever have: its row of the map, or the whole pool if that is smaller."""
        return min(self._map.max_pages, self.layout.usable_pages) * self.layout.tokens_per_page

    @property
    def available_pages(self) -> int:
        """Pages that `reserve` can hand out now."""
        return self._allocator.num_free

    @property
    def held_pages(self) -> int:
        """Pages that are not free, whoever holds them."""
        return self._allocator.num_allocated

    @property
    def pending_pages(self) -> int:
        """Pages that nobody wants any more but a step in flight may touch; they become free as steps retire."""
        return self._fence.num_pending

    def leaked_pages(self) -> int:
        """Held pages that are neither live nor pending: 0, always (requirement C8)."""
        return self.held_pages - audit.live_pages(self._map, self._copies.pending) - self.pending_pages

    def open(self) -> Handle | None:
        """A handle for a new request of length 0 that holds no page, or None if every row is taken."""
        return self._map.open()

    def length(self, handle: Handle) -> int:
        """Tokens that built tables have written for this request."""
        return int(self._lengths[self._map.row(handle)])

    def pages_of(self, handle: Handle) -> np.ndarray:
        """int32 page ids that the request holds, in token order; reserved ones that hold no token yet included."""
        return self._map.pages_of(handle)

    def pages_needed(self, slices: Sequence[Slice]) -> int:
        """Pages that `reserve(slices)` would take, copies of shared pages included."""
        return self._demand(self._read(slices)).total

    def fits(self, request: int | Sequence[Slice]) -> bool:
        """Whether a new request of that many tokens, or these slices, could be reserved now (scenario H11)."""
        if isinstance(request, (int, np.integer)):
            tokens = check_int("ControlPlane.fits", "request", request, minimum=0)
            pages = pages_for(tokens, self.layout.tokens_per_page)
            return tokens <= self.capacity_tokens and self._has(pages)
        return self._has(self.pages_needed(request))

    def prepare(
        self, slices: Sequence[Slice], scrub: PagesCallback, copy: CopyCallback | None = None
    ) -> PageTable | None:
        """Reserve, scrub, copy, confirm, build: the page table of one step, or None (backpressure, nothing changed).

        - `scrub(pages)` must overwrite the dirty pages; called at most once, and not at all when there is none.
        - `copy(source, target)` must copy pages whole, all sources read before any target is written. Called at most
          once, after `scrub`, when a slice writes into a page that a fork shares; without it such a step is refused.

        The table is padded by `shapes`. Each request's length grows by its slice's tokens. If a callback raises, the
        pages stay reserved and dirty, lengths are unchanged, and the same call can be made again.
        Raises what `reserve` raises.
        """
        _check_callable("ControlPlane.prepare.scrub", scrub)
        if copy is not None:
            _check_callable("ControlPlane.prepare.copy", copy)
        batch = self._read(slices)
        shapes = self._shapes(batch)
        reservation = self._reserve(batch, may_copy=copy is not None)
        if reservation is None:
            return None
        if reservation.dirty.shape[0]:
            scrub(reservation.dirty)
        if copy is not None and reservation.copy_source.shape[0]:
            copy(reservation.copy_source, reservation.copy_target)
        if reservation.dirty.shape[0] or reservation.copy_target.shape[0]:
            self.confirm(np.concatenate([reservation.dirty, reservation.copy_target]))
        return self._build(batch, *shapes)

    def reserve(self, slices: Sequence[Slice]) -> Reservation | None:
        """Give each request the pages that its slice needs; None if too few are free, and then nothing changed.

        Reserving again before `build` takes nothing more and reports again what is not confirmed.
        Raises `StaleHandleError` or `InvalidInputError`, see `SliceReader.read`.
        """
        batch = self._read(slices)
        self._shapes(batch)
        return self._reserve(batch, may_copy=True)

    def confirm(self, pages: np.ndarray | list[int]) -> None:
        """The caller has overwritten these pages: scrubbed, or copied to. Copies become the request's own page.

        Raises `UseAfterFreeError` naming a page that nobody holds.
        """
        self._allocator.confirm(pages)
        if self._copies.pending:
            for row, copy in self._copies.take_confirmed(pages):
                self._map.replace(row, copy.number, copy.target)
                self._let_go(np.array([copy.source]), row)

    def build(self, slices: Sequence[Slice]) -> PageTable:
        """The page table of a reserved step; each request's length grows by its slice's tokens.

        Raises `DirtyPageError` naming a page that is dirty or still shared and would be written, and its last owner if
        known, and `InvalidInputError` if a slice was not reserved.
        """
        batch = self._read(slices)
        held = self._map.counts[batch.rows]
        if (held < batch.need).any():
            i = int(np.argmax(held < batch.need))
            raise InvalidInputError(
                f"ControlPlane.build: slice {i} needs {batch.need[i]} pages, row {batch.rows[i]} holds {held[i]}. "
                f"Call reserve with the same slices first."
            )
        return self._build(batch, *self._shapes(batch))

    def fork(self, handle: Handle) -> Handle | None:
        """A second request with the same tokens, sharing their pages, or None if every row is taken.

        Takes no page: the first of the two that writes into a shared page gets a copy of it in its next `prepare`.
        """
        row = self._map.row(handle)
        child = self._map.open()
        if child is None:
            return None
        pages = self._map.pages[row, : pages_for(int(self._lengths[row]), self.layout.tokens_per_page)]
        self._allocator.share(pages)
        self._map.extend(np.array([child.row]), np.array([pages.shape[0]]), pages)
        self._lengths[child.row] = self._lengths[row]
        return child

    def truncate(self, handle: Handle, length: int) -> np.ndarray:
        """Forget the tokens from position `length` on, and every page that then holds none; returns the pages freed.

        Slots of forgotten tokens are overwritten before any table names them again (scenario H15).
        """
        row = self._map.row(handle)
        length = check_int("ControlPlane.truncate", "length", length, minimum=0, maximum=int(self._lengths[row]))
        keep = pages_for(length, self.layout.tokens_per_page)
        dropped = self._copies.drop(row, keep)
        removed = self._map.shrink(row, keep)
        self._lengths[row] = length
        return self._let_go(np.concatenate([removed, dropped]), row)

    def release(self, handle: Handle) -> np.ndarray:
        """Close a request, finished or aborted at any point; returns the pages (int32) that this actually freed.

        Pages that others hold stay; pages that a step in flight names are freed by `retire`. Raises `StaleHandleError`
        naming row, epoch and the pages of the earlier release if the request was released before (scenario H1).
        """
        try:
            row = self._map.row(handle)
        except StaleHandleError as error:
            raise self._released_before(handle, error) from None
        dropped = self._copies.drop(row, 0)
        removed = self._map.close(handle)
        self._lengths[row] = 0
        return self._let_go(np.concatenate([removed, dropped]), row, handle.epoch)

    def dispatch(self, table: PageTable) -> int:
        """Number of the step that runs over `table`; until it retires, none of the table's pages is freed.

        Raises `UseAfterFreeError` if one of them was freed since the table was built.
        """
        if not isinstance(table, PageTable):
            raise InvalidInputError(f"ControlPlane.dispatch.table must be a PageTable, got {show(table)}.")
        pages = table.page_ids[: table.page_offsets[-1]]
        if table.num_pages != self.layout.num_pages:
            raise InvalidInputError(
                f"dispatch: table over {table.num_pages} pages, the pool has {self.layout.num_pages}."
            )
        gone = ~self._allocator.allocated[pages]
        if gone.any():
            raise UseAfterFreeError(f"dispatch: page {pages[np.argmax(gone)]} was freed since the table was built.")
        return self._fence.dispatch(pages)

    def retire(self, step: int) -> np.ndarray:
        """Step `step` and all before it are done; returns the pages (int32) freed now. Steps retire in order."""
        pages = self._fence.retire(step)
        return self._freed(self._allocator.free(pages)) if pages.shape[0] else pages

    def verify(self) -> None:
        """Prove that bitmap, counts, map, fence and lengths agree; raises `InternalError` (requirement C9)."""
        copies = self._copies.pending
        audit.verify(self._allocator, self._map, self._fence, self._lengths, copies, self.layout.tokens_per_page)

    def _read(self, slices: Sequence[Slice]) -> Batch:
        return self._reader.read(slices)

    def _shapes(self, batch: Batch) -> tuple[FixedShape, FixedShape]:
        """The batch's own shape, and the one to pad it to: asked for before anything changes, as it may be refused."""
        exact = exact_shape(batch)
        return exact, exact if self.shapes is None else self.shapes.shape_for(exact)

    def _has(self, num_pages: int) -> bool:
        return num_pages <= self.available_pages

    def _demand(self, batch: Batch) -> _Demand:
        """What a batch takes from the pool. The only place that decides it, for asking and for taking alike."""
        grow = np.maximum(batch.need - self._map.counts[batch.rows], 0)
        # Only the page that the first token lands in can be shared: later ones hold no token yet.
        first = self._map.pages[batch.rows, batch.first_pages]
        references = self._allocator.reference_counts
        shared = references[first] > 1
        copies = self._copies.wanted(batch, first, shared, references) if shared.any() else []
        return _Demand(grow, copies, int(grow.sum()) + len(copies))

    def _reserve(self, batch: Batch, *, may_copy: bool) -> Reservation | None:
        demand = self._demand(batch)
        if not may_copy:
            sources = [source for _, _, source in demand.copies] + [c.source for c in self._copies_before(batch)]
            if sources:
                raise InvalidInputError(
                    f"ControlPlane.prepare: the batch writes into page {sources[0]}, which a fork shares, and no copy "
                    f"callable was given. Pass copy=."
                )
        if not self._has(demand.total):
            return None
        if demand.total:
            pages = self._allocator.allocate(demand.total)
            assert pages is not None, "available_pages and the allocator disagree"
            split = demand.total - len(demand.copies)
            if split:
                self._map.extend(batch.rows, demand.grow, pages[:split])
            if demand.copies:
                self._allocator.taint(pages[split:])
                self._copies.add(demand.copies, pages[split:])
        return self._unready(batch)

    def _unready(self, batch: Batch) -> Reservation:
        """Pages that the caller still has to overwrite before this batch is built."""
        dirty = source = target = _NO_PAGES
        if self._allocator.num_unconfirmed:
            filled = pages_for(batch.starts, self.layout.tokens_per_page)
            dirty = self._allocator.dirty_among(self._map.gather(batch.rows, filled, batch.need))
        if copies := self._copies_before(batch):
            source = np.array([copy.source for copy in copies], np.int32)
            target = np.array([copy.target for copy in copies], np.int32)
        return Reservation(dirty, source, target)

    def _copies_before(self, batch: Batch) -> list[PendingCopy]:
        if not self._copies.pending:
            return []
        return self._copies.before(batch.rows, self._map.pages[batch.rows, batch.first_pages])

    def _build(self, batch: Batch, exact: FixedShape, shape: FixedShape) -> PageTable:
        self._refuse_unready(batch)
        table = build_table(batch, self._map, self.layout, exact, shape)
        self._lengths[batch.rows] = batch.ends
        return table

    def _refuse_unready(self, batch: Batch) -> None:
        if self._allocator.num_unconfirmed:
            listed = self._map.gather(batch.rows, 0, batch.need)
            dirty = self._allocator.dirty_among(listed)
            if dirty.shape[0]:
                raise DirtyPageError(
                    f"page {dirty[0]} is dirty: {self._freed_by(int(dirty[0]))} and it was not confirmed overwritten "
                    f"since ({dirty.shape[0]} such pages). Scrub them, call confirm with them, then build."
                )
        first = self._map.pages[batch.rows, batch.first_pages]
        shared = first[self._allocator.reference_counts[first] > 1].tolist()
        shared += [copy.source for copy in self._copies_before(batch)]
        if shared:
            raise DirtyPageError(
                f"page {shared[0]} is shared and the batch would write into it. "
                f"Make the copies that reserve lists, call confirm with their targets, then build."
            )

    def _let_go(self, pages: np.ndarray, row: int, epoch: int | None = None) -> np.ndarray:
        """Drop one holder of each page, at once or, for the last holder of a page in flight, when its step retires."""
        if not pages.shape[0]:
            return _NO_PAGES
        self._last_owner[0, pages] = row
        self._last_owner[1, pages] = self._map.open_epochs[row] if epoch is None else epoch
        wait = self._fence.in_flight(pages) & (self._allocator.reference_counts[pages] == 1)
        self._fence.hold(pages[wait])
        return self._freed(self._allocator.free(pages[~wait]))

    def _freed(self, pages: np.ndarray) -> np.ndarray:
        if pages.shape[0] and self.poison_freed is not None:
            self.poison_freed(pages)
        return pages

    def _freed_by(self, page: int) -> str:
        row, epoch = self._last_owner[:, page].tolist()
        return f"the request of row {row}, epoch {epoch} let go of it"

    def _released_before(self, handle: Handle, error: StaleHandleError) -> StaleHandleError:
        if not isinstance(handle, Handle):
            return error
        let_go = np.flatnonzero((self._last_owner == [[handle.row], [handle.epoch]]).all(axis=0))
        return StaleHandleError(f"{error} The pages it let go of: {let_go[:8].tolist()}.") if let_go.size else error


class _Demand(NamedTuple):
    """Pages that a batch takes: `grow` (rows,) new ones for each row, `copies` as (row, page number, source)."""

    grow: np.ndarray
    copies: list[tuple[int, int, int]]
    total: int


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise InvalidInputError(f"{name} must be callable with page ids, got {show(value)}.")


_NO_PAGES = np.zeros(0, np.int32)
