"""Every operation in random order against a model of dicts and sets, with `verify` after each (requirement C9).

The model knows requests, the pages they hold, who shares which page, and the value of every cached token; a page is an
object with a set of holders. It predicts what is freed, what backpressure says, and what each request reads back.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from plane_helpers import POISONED, SCRUBBED, FakePool, checked, make_plane, snapshot

from paged.common import DirtyPageError, InvalidInputError, PagedError, StaleHandleError
from paged.control import Handle, Slice

SIZE, NUM_PAGES, ROWS = 3, 12, 4


@dataclasses.dataclass(eq=False)
class Page:
    """One page of the model; `holders` are request ids, or "flight" while only steps in flight keep it."""

    holders: set[object] = dataclasses.field(default_factory=set)
    steps: set[int] = dataclasses.field(default_factory=set)
    ready: bool = True


@dataclasses.dataclass
class Request:
    """One open request of the model."""

    handle: Handle
    values: list[int] = dataclasses.field(default_factory=list)
    pages: list[Page] = dataclasses.field(default_factory=list)
    copy: tuple[int, Page] | None = None

    @property
    def filled(self) -> int:
        return -(-len(self.values) // SIZE)


class PlaneMachine(RuleBasedStateMachine):
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.plane = make_plane(
            num_pages=NUM_PAGES, tokens_per_page=SIZE, max_requests=ROWS, poison_freed=self.on_freed
        )
        self.pool = FakePool(self.plane)
        self.requests: dict[Handle, Request] = {}
        self.waiting: set[Page] = set()  # nobody's, but in flight
        self.clean = NUM_PAGES - 1  # pages that were never used go first
        self.next_value = 1
        self.in_flight: list[int] = []
        self.table = None

    def on_freed(self, pages: np.ndarray) -> None:
        self.freed += pages.tolist()
        self.pool.poison(pages)

    # What the model predicts.

    def held(self) -> set[Page]:
        out = set(self.waiting)
        for request in self.requests.values():
            out |= set(request.pages) | ({request.copy[1]} if request.copy else set())
        return out

    def free(self) -> int:
        return NUM_PAGES - 1 - len(self.held())

    def wants(self, batch: list[tuple[Request, int]]) -> tuple[int, list[Request]]:
        """New pages, and requests that need a copy first."""
        grow = sum(max(0, -(-(len(r.values) + n) // SIZE) - len(r.pages)) for r, n in batch)
        leaving = {id(r) for r in self.requests.values() if r.copy}
        copies = []
        for request, _ in batch:
            if len(request.values) % SIZE and not request.copy:
                page = request.pages[len(request.values) // SIZE]
                others = [r for r in self.requests.values() if page in r.pages and id(r) not in leaving]
                if len(others) > 1:
                    copies.append(request)
                    leaving.add(id(request))
        return grow, copies

    def drop(self, request: Request, pages: list[Page]) -> None:
        for page in pages:
            page.holders.discard(request.handle)
            if not page.holders and page.steps:
                self.waiting.add(page)

    def pick(self, data: st.DataObject) -> list[tuple[Request, int]]:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.requests, key=repr)), unique=True, max_size=ROWS))
        return [(self.requests[h], data.draw(st.sampled_from([1, 1, 1, 2, 4, 7]))) for h in chosen]

    def take(self, batch: list[tuple[Request, int]]) -> None:
        """What a successful reservation does to the model."""
        _, copies = self.wants(batch)
        for request, n in batch:
            while len(request.pages) * SIZE < len(request.values) + n:
                request.pages.append(Page({request.handle}))
        for request in copies:
            request.copy = (len(request.values) // SIZE, Page({request.handle}))

    def copies_before(self, batch: list[tuple[Request, int]]) -> list[Request]:
        """Requests whose copy must be made first: those that write, and those that a writer would write over."""
        written = {r.pages[len(r.values) // SIZE] for r, _ in batch if len(r.values) % SIZE}
        writers = [id(r) for r, _ in batch]
        return [r for r in self.requests.values() if r.copy and (id(r) in writers or r.pages[r.copy[0]] in written)]

    def settle(self, request: Request) -> None:
        """A confirmed copy takes the place of the shared page."""
        if request.copy:
            number, page = request.copy
            self.drop(request, [request.pages[number]])
            request.pages[number], request.copy = page, None

    def write(self, batch: list[tuple[Request, int]], table) -> None:
        """Run the step on the fake pool, then read every row back through its table."""
        values = list(range(self.next_value, self.next_value + sum(n for _, n in batch)))
        self.next_value += len(values)
        self.pool.run(table, values)
        for i, (request, n) in enumerate(batch):
            request.values += values[:n]
            values = values[n:]
            assert self.pool.read(table, i) == request.values
            assert table.kv_lens[i] == len(request.values)
            assert table.query_lens[i] == n
        self.table = table
        self.tabled = {page for request, _ in batch for page in request.pages[: request.filled]}
        self.tabled_of = [request.handle for request, _ in batch]

    def slices(self, batch: list[tuple[Request, int]]) -> list[Slice]:
        return [Slice(r.handle, len(r.values), n) for r, n in batch]

    # What callers do.

    @rule(target=handles)
    def open(self):
        handle = self.plane.open()
        assert (handle is None) == (len(self.requests) == ROWS)
        if handle is None:
            return multiple()
        self.requests[handle] = Request(handle)
        return handle

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def prepare(self, data):
        batch = self.pick(data)
        grow, copies = self.wants(batch)
        slices = self.slices(batch)
        assert self.plane.pages_needed(slices) == grow + len(copies)
        fits = grow + len(copies) <= self.free()
        assert self.plane.fits(slices) == fits
        if not fits:
            before = snapshot(self.plane)
            assert self.plane.prepare(slices, self.pool.scrub, self.pool.copy) is None
            assert snapshot(self.plane) == before
            return
        self.take(batch)
        calls = len(self.pool.copied), len(self.pool.scrubbed)
        wait = self.copies_before(batch)
        table = checked(self.plane.prepare(slices, self.pool.scrub, self.pool.copy))
        assert len(self.pool.copied) - calls[0] == bool(wait)
        assert len(self.pool.scrubbed) - calls[1] <= 1
        for request in wait:
            self.settle(request)
        self.write(batch, table)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), confirm=st.booleans())
    def by_hand(self, data, confirm):
        """Reserve, and sometimes go on to overwrite, confirm and build."""
        batch = self.pick(data)
        grow, copies = self.wants(batch)
        slices = self.slices(batch)
        reservation = self.plane.reserve(slices)
        assert (reservation is None) == (grow + len(copies) > self.free())
        if reservation is None:
            return
        self.take(batch)
        wait = self.copies_before(batch)
        assert reservation.copy_target.shape[0] == len(wait)
        if not confirm:
            unready = reservation.dirty.shape[0] + reservation.copy_target.shape[0]
            if unready:
                before = snapshot(self.plane)
                with pytest.raises(DirtyPageError):
                    self.plane.build(slices)
                assert snapshot(self.plane) == before
            return
        if reservation.dirty.shape[0]:
            self.pool.scrub(reservation.dirty)
        self.pool.copy(reservation.copy_source, reservation.copy_target)
        self.plane.confirm(np.concatenate([reservation.dirty, reservation.copy_target]))
        for request in wait:
            self.settle(request)
        self.write(batch, checked(self.plane.build(slices)))

    @rule(target=handles, handle=handles)
    def fork(self, handle):
        if handle not in self.requests:
            with pytest.raises(StaleHandleError, match=f"row {handle.row}, epoch {handle.epoch}"):
                self.plane.fork(handle)
            return multiple()
        parent = self.requests[handle]
        child = self.plane.fork(handle)
        assert (child is None) == (len(self.requests) == ROWS)
        if child is None:
            return multiple()
        shared = parent.pages[: parent.filled]
        for page in shared:
            page.holders.add(child)
        self.requests[child] = Request(child, list(parent.values), list(shared))
        return child

    @rule(handle=handles, part=st.floats(0, 1))
    def truncate(self, handle, part):
        if handle not in self.requests:
            with pytest.raises(StaleHandleError):
                self.plane.truncate(handle, 0)
            return
        request = self.requests[handle]
        length = int(part * len(request.values))
        before = self.held()
        freed = self.plane.truncate(handle, length)
        del request.values[length:]
        keep = request.filled
        dropped, request.pages = request.pages[keep:], request.pages[:keep]
        if request.copy and request.copy[0] >= keep:
            dropped.append(request.copy[1])
            request.copy = None
        self.drop(request, dropped)
        assert freed.shape[0] == len(before) - len(self.held())

    @rule(handle=consumes(handles), again=st.booleans())
    def release(self, handle, again):
        if handle in self.requests:
            request = self.requests.pop(handle)
            before, self.freed = self.held() | set(request.pages), []
            if request.copy:
                before.add(request.copy[1])
            expected = self.plane.pages_of(handle).tolist()
            freed = self.plane.release(handle)
            self.drop(request, [*request.pages, *([request.copy[1]] if request.copy else [])])
            assert freed.tolist() == self.freed
            assert freed.shape[0] == len(before) - len(self.held())
            assert set(freed.tolist()) <= {*expected, *range(NUM_PAGES)}
        if again:
            with pytest.raises(StaleHandleError, match=f"row {handle.row}, epoch {handle.epoch}"):
                self.plane.release(handle)

    @precondition(lambda self: self.table is not None)
    @rule()
    def dispatch(self):
        if not all(handle in self.requests for handle in self.tabled_of):
            self.table = None  # a released row's pages may be someone else's by now
            return
        if not all(page.holders for page in self.tabled):
            with pytest.raises(PagedError, match="was freed since"):
                self.plane.dispatch(self.table)
            self.table = None
            return
        number = self.plane.dispatch(self.table)
        self.in_flight.append(number)
        for page in self.tabled:
            page.steps.add(number)
        self.table = None

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def retire(self, data):
        number = data.draw(st.sampled_from(self.in_flight))
        before = len(self.held())
        freed = self.plane.retire(number)
        self.in_flight = [n for n in self.in_flight if n > number]
        for page in self.held():
            page.steps = {n for n in page.steps if n > number}
        self.waiting = {page for page in self.waiting if page.steps}
        assert freed.shape[0] == before - len(self.held())

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), gap=st.sampled_from([-1, 1]))
    def wrong_start(self, data, gap):
        handle = data.draw(st.sampled_from(sorted(self.requests, key=repr)))
        before = snapshot(self.plane)
        with pytest.raises(InvalidInputError, match="start"):
            self.plane.reserve([Slice(handle, self.plane.length(handle) + gap, 1)])
        assert snapshot(self.plane) == before

    # What is always true.

    @invariant()
    def parts_agree(self):
        self.plane.verify()
        assert self.plane.leaked_pages() == 0
        assert self.plane.held_pages == len(self.held())
        assert self.plane.available_pages == self.free()
        assert self.plane.pending_pages == len(self.waiting)
        assert self.plane.num_open == len(self.requests)

    @invariant()
    def requests_hold_what_the_model_says(self):
        real: dict[Page, int] = {}
        for handle, request in self.requests.items():
            pages = self.plane.pages_of(handle).tolist()
            assert self.plane.length(handle) == len(request.values)
            assert len(pages) == len(request.pages)
            for page, number in zip(request.pages, pages):
                assert real.setdefault(page, number) == number
                assert self.plane._allocator.reference_counts[number] == len(page.holders)
        assert len(set(real.values())) == len(real)

    @invariant()
    def nothing_cached_is_ever_lost(self):
        for handle, request in self.requests.items():
            assert self.pool.cached(handle) == request.values
            assert not {SCRUBBED, POISONED} & set(request.values)


TestPlane = PlaneMachine.TestCase
TestPlane.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
