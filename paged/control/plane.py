"""The control plane: requests hold pages, steps reserve them, and no table is built over a page that is not ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paged.common.checks import check_int, show
from paged.common.errors import InvalidInputError, StaleHandleError
from paged.common.layout import StorageLayout
from paged.common.namespace import CacheNamespace
from paged.common.page_table import PageTable, pages_for
from paged.control import audit
from paged.control.batch import Batch, Slice, SliceReader
from paged.control.ledger import PageLedger, PagesCallback
from paged.control.page_map import Handle, PageMap
from paged.control.prefix_index import PrefixIndex, token_ids
from paged.control.reserve import Reservation, Reserver
from paged.control.shapes import FixedShape, Shapes
from paged.control.table import build_table, exact_shape

CopyCallback = Callable[[np.ndarray, np.ndarray], object]


class ControlPlane:
    """Bookkeeping of one page pool: which request holds which pages, and which of them a step may name.

    - `layout`: the pool's geometry; only page counts and tokens per page are read.
    - `max_requests`: requests that can be open at once.
    - `max_pages_per_request`: widest request; by default all usable pages.
    - `shapes`: policy that pads the tables (`FixedShape`, `ShapeLadders`); None pads nothing.
    - `prefixes`: index of published prefixes over the same layout; None, the default, shares no prefix.
    - `poison_freed`: called with the page ids (int32) that became free, each time some do; for debugging, to fill them
      with NaN. It never sees a page that somebody still holds or that a step in flight may touch.

    One step is `prepare`. Its parts `reserve`, `confirm` and `build` are public, and `prepare` is their only sequence
    in the project. A request's *length* is the tokens that built tables have written for it. Deterministic: the same
    calls give the same pages. Every refusal happens before anything changes. For one thread, and callbacks do not call
    back into the plane.
    """

    def __init__(
        self,
        layout: StorageLayout,
        *,
        max_requests: int,
        max_pages_per_request: int | None = None,
        shapes: Shapes | None = None,
        prefixes: PrefixIndex | None = None,
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
        if prefixes is not None:
            _check_index(prefixes, layout)
        self.layout = layout
        self.shapes = shapes
        width = layout.usable_pages if max_pages_per_request is None else max_pages_per_request
        self._map = PageMap(max_requests, width)
        self._lengths = np.zeros(self._map.max_requests, np.int64)
        self._ledger = PageLedger(layout.num_pages, prefixes, poison_freed)
        self._reader = SliceReader(self._map, self._lengths, layout.tokens_per_page, self.capacity_tokens)
        self._reserver = Reserver(self._ledger, self._map, layout.tokens_per_page)

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
        """Pages that `reserve` can hand out now: free ones, and published ones that it may evict."""
        return self._ledger.num_available

    @property
    def held_pages(self) -> int:
        """Pages that are not free, whoever holds them."""
        return self._ledger.allocator.num_allocated

    @property
    def pending_pages(self) -> int:
        """Pages that nobody wants any more but a step in flight may touch; they become free as steps retire."""
        return self._ledger.fence.num_pending

    def retained_pages(self) -> int:
        """Published pages that no open request holds."""
        return audit.retained_pages(self._ledger, self._live())

    def leaked_pages(self) -> int:
        """Held pages that are neither live nor retained nor pending: 0, always (requirement C8)."""
        live = self._live()
        retained = audit.retained_pages(self._ledger, live)
        return self.held_pages - int(np.count_nonzero(live)) - retained - self.pending_pages

    @property
    def prefixes(self) -> PrefixIndex | None:
        """The index of published prefixes, to look at; None if the plane has none."""
        return self._ledger.prefixes

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
        return self._reserver.demand(self._read(slices)).total

    def fits(self, request: int | Sequence[Slice]) -> bool:
        """Whether a new request of that many tokens, or these slices, could be reserved now (scenario H11)."""
        if isinstance(request, (int, np.integer)):
            tokens = check_int("ControlPlane.fits", "request", request, minimum=0)
            pages = pages_for(tokens, self.layout.tokens_per_page)
            return tokens <= self.capacity_tokens and self._ledger.has(pages)
        return self._ledger.has(self.pages_needed(request))

    def prepare(
        self,
        slices: Sequence[Slice],
        scrub: PagesCallback,
        copy: CopyCallback | None = None,
        *,
        shape: FixedShape | None = None,
    ) -> PageTable | None:
        """Reserve, scrub, copy, confirm, build: the page table of one step, or None (backpressure, nothing changed).

        - `scrub(pages)` must overwrite the dirty pages; called at most once, and not at all when there is none.
        - `copy(source, target)` must copy pages whole, all sources read before any target is written. Called at most
          once, after `scrub`, when a slice writes into a page that a fork shares; without it such a step is refused.

        The table is padded by `shapes`, or to `shape` if given. Each request's length grows by its slice's tokens. If a
        callback raises, the pages stay reserved and dirty, lengths are unchanged, and the same call can be made again.
        Raises what `reserve` raises.
        """
        _check_callable("ControlPlane.prepare.scrub", scrub)
        if copy is not None:
            _check_callable("ControlPlane.prepare.copy", copy)
        batch = self._read(slices)
        shape = self._shape(batch) if shape is None else shape.shape_for(exact_shape(batch))
        reservation = self._reserver.reserve(batch, may_copy=copy is not None)
        if reservation is None:
            return None
        if reservation.dirty.shape[0]:
            scrub(reservation.dirty)
        if copy is not None and reservation.copy_source.shape[0]:
            copy(reservation.copy_source, reservation.copy_target)
        if reservation.dirty.shape[0] or reservation.copy_target.shape[0]:
            self.confirm(np.concatenate([reservation.dirty, reservation.copy_target]))
        return self._build(batch, shape)

    def padding(self, shape: FixedShape) -> PageTable:
        """The table of a step without a request at this shape: what a program can be tried on. Reserves nothing."""
        return self._build(self._read(()), shape)

    def reserve(self, slices: Sequence[Slice]) -> Reservation | None:
        """Give each request the pages that its slice needs; None if too few are free, and then nothing changed.

        Reserving again before `build` takes nothing more and reports again what is not confirmed.
        Raises `StaleHandleError` or `InvalidInputError`, see `SliceReader.read`.
        """
        batch = self._read(slices)
        self._shape(batch)
        return self._reserver.reserve(batch, may_copy=True)

    def confirm(self, pages: np.ndarray | list[int]) -> None:
        """The caller has overwritten these pages: scrubbed, or copied to. Copies become the request's own page.

        Raises `UseAfterFreeError` naming a page that nobody holds.
        """
        self._reserver.confirm(pages)

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
        return self._build(batch, self._shape(batch))

    def fork(self, handle: Handle) -> Handle | None:
        """A second request with the same tokens, sharing their pages, or None if every row is taken.

        Takes no page: the first of the two that writes into a shared page gets a copy of it in its next `prepare`.
        """
        row = self._map.row(handle)
        child = self._map.open()
        if child is None:
            return None
        pages = self._map.pages[row, : pages_for(int(self._lengths[row]), self.layout.tokens_per_page)]
        self._ledger.allocator.share(pages)
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
        dropped = self._reserver.copies.drop(row, keep)
        removed = self._map.shrink(row, keep)
        self._lengths[row] = length
        return self._ledger.let_go(np.concatenate([removed, dropped]), row, handle.epoch)

    def release(self, handle: Handle) -> np.ndarray:
        """Close a request, finished or aborted at any point; returns the pages (int32) that this actually freed.

        Pages that others hold stay; pages that a step in flight names are freed by `retire`. Raises `StaleHandleError`
        naming row, epoch and the pages of the earlier release if the request was released before (scenario H1).
        """
        try:
            row = self._map.row(handle)
        except StaleHandleError as error:
            raise self._released_before(handle, error) from None
        dropped = self._reserver.copies.drop(row, 0)
        removed = self._map.close(handle)
        self._lengths[row] = 0
        return self._ledger.let_go(np.concatenate([removed, dropped]), row, handle.epoch)

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
        return self._ledger.dispatch(pages)

    def retire(self, step: int) -> np.ndarray:
        """Step `step` and all before it are done; returns the pages (int32) freed now. Steps retire in order."""
        return self._ledger.retire(step)

    def cached_tokens(self, namespace: CacheNamespace, tokens: Sequence[int] | np.ndarray) -> int:
        """Prompt tokens that `attach` would take from the index now; holds nothing, so it may be fewer later."""
        prefixes = self._index("cached_tokens")
        return prefixes.match(namespace, tokens).shape[0] * self.layout.tokens_per_page

    def attach(self, handle: Handle, namespace: CacheNamespace, tokens: Sequence[int] | np.ndarray) -> int:
        """Give a fresh request the published pages of its prompt's longest prefix; returns its length, in tokens.

        Whole pages only, at most (len(tokens) − 1) // tokens_per_page, so that a token is left to compute. The pages
        are held from now on: no eviction can take them (scenario C3). Raises `InvalidInputError` if the request has
        tokens or pages already, or if the plane has no index.
        """
        prefixes = self._index("attach")
        row = self._map.row(handle)
        if self._lengths[row] or self._map.counts[row]:
            raise InvalidInputError(
                f"ControlPlane.attach: row {row} has {self._lengths[row]} tokens and {self._map.counts[row]} pages. "
                f"Attach a prefix right after open."
            )
        pages = prefixes.match(namespace, tokens)[: self.capacity_tokens // self.layout.tokens_per_page]
        prefixes.touch(pages)
        self._ledger.allocator.share(pages)
        self._map.extend(np.array([row]), np.array([pages.shape[0]]), pages)
        self._lengths[row] = pages.shape[0] * self.layout.tokens_per_page
        return int(self._lengths[row])

    def publish(self, handle: Handle, namespace: CacheNamespace, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Let others attach to the whole pages of these tokens, the first of the request; returns the pages adopted.

        `tokens` are those in the cache, so at most the request's length; tokens that may yet be truncated are better
        left out. `release` then frees exactly what was not adopted (scenario C10). Raises `InvalidInputError` if there
        are more tokens than cached ones, or if the plane has no index.
        """
        self._index("publish")
        row, cached = self._map.row(handle), self.length(handle)
        ids = token_ids("ControlPlane.publish", tokens)
        if ids.shape[0] > cached:
            raise InvalidInputError(
                f"ControlPlane.publish.tokens has {ids.shape[0]} tokens, the request of row {row} has {cached} in the "
                f"cache. Publish cached tokens only."
            )
        return self._ledger.adopt(namespace, ids, self._map.pages[row])

    def forget_prefixes(self) -> np.ndarray:
        """Empty the index, as after a change of weights or before a measurement; returns the pages (int32) freed."""
        self._index("forget_prefixes")
        return self._ledger.forget_prefixes()

    def verify(self) -> None:
        """Prove that bitmap, counts, map, index, fence and lengths agree; raises `InternalError` (requirement C9)."""
        audit.verify(self._ledger, self._map, self._lengths, self._reserver.copies.pending, self.layout.tokens_per_page)

    def _index(self, method: str) -> PrefixIndex:
        if self._ledger.prefixes is None:
            raise InvalidInputError(f"ControlPlane.{method}: there is no prefix index. Construct with prefixes=.")
        return self._ledger.prefixes

    def _live(self) -> np.ndarray:
        return audit.live_pages(self._map, self._reserver.copies.pending, self.layout.num_pages)

    def _read(self, slices: Sequence[Slice]) -> Batch:
        return self._reader.read(slices)

    def _shape(self, batch: Batch) -> FixedShape:
        """The shape to build the table at: asked for before anything changes, because it may be refused."""
        exact = exact_shape(batch)
        if self.shapes is None:
            return exact
        return self.shapes.shape_for(exact).shape_for(exact)  # whoever wrote the policy, the step must fit

    def _build(self, batch: Batch, shape: FixedShape) -> PageTable:
        self._reserver.refuse_unready(batch)
        table = build_table(batch, self._map, self.layout, shape)
        self._lengths[batch.rows] = batch.ends
        return table

    def _released_before(self, handle: Handle, error: StaleHandleError) -> StaleHandleError:
        if not isinstance(handle, Handle):
            return error
        pages = self._ledger.let_go_by(handle.row, handle.epoch)
        return StaleHandleError(f"{error} The pages it let go of: {pages[:8]}.") if pages else error


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise InvalidInputError(f"{name} must be callable with page ids, got {show(value)}.")


def _check_index(prefixes: object, layout: StorageLayout) -> None:
    if not isinstance(prefixes, PrefixIndex):
        raise InvalidInputError(f"ControlPlane.prefixes must be a PrefixIndex or None, got {show(prefixes)}.")
    have, want = (prefixes.num_pages, prefixes.tokens_per_page), (layout.num_pages, layout.tokens_per_page)
    if have != want or len(prefixes):
        raise InvalidInputError(
            f"ControlPlane.prefixes is over {have[0]} pages of {have[1]} tokens, {len(prefixes)} of them published; "
            f"the layout has {want[0]} of {want[1]}. Pass a new PrefixIndex(layout)."
        )
