"""Every operation in random order against a model of dicts and sets, with `verify` after each (requirement C9)."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from plane_helpers import FakePool, checked, make_layout, make_namespace, make_plane, snapshot
from plane_model import Batch, Page, PlaneModel, Request

from paged.common import DirtyPageError, InvalidInputError, StaleHandleError, UseAfterFreeError
from paged.control import Handle, PrefixIndex, Slice

SIZE, NUM_PAGES, ROWS = 3, 12, 4
SPACE = make_namespace()
COUNTS = st.sampled_from([4, 1, 2, 7, 1, 12])
TOKEN = st.sampled_from([0, 0, 0, 1])  # one for a whole slice, so that requests often begin alike
PROMPTS = st.sampled_from([[0] * 7, [0] * 9, [0] * 12, [0] * 6 + [1] * 4, [1] * 8])


class PlaneMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.plane = make_plane(
            NUM_PAGES,
            SIZE,
            max_requests=ROWS,
            prefixes=PrefixIndex(make_layout(NUM_PAGES, SIZE)),
            poison_freed=self.on_freed,
        )
        self.pool = FakePool(self.plane)
        self.model = PlaneModel(NUM_PAGES, SIZE)
        self.closed: list[Handle] = []
        self.in_flight: list[int] = []
        self.table = None
        self.tabled: set[Page] = set()

    def on_freed(self, pages: np.ndarray) -> None:
        self.freed += pages.tolist()
        self.pool.poison(pages)

    def request(self, data: st.DataObject) -> Request:
        return self.model.requests[data.draw(st.sampled_from(sorted(self.model.requests, key=repr)))]

    def batch(self, data: st.DataObject) -> Batch:
        handles = data.draw(st.lists(st.sampled_from(sorted(self.model.requests, key=repr)), min_size=1, unique=True))
        batch = [(self.model.requests[h], data.draw(COUNTS)) for h in handles]
        return [(r, min(n, self.plane.capacity_tokens - len(r.tokens))) for r, n in batch if self.has_room(r)]

    def has_room(self, request: Request) -> bool:
        return len(request.tokens) < self.plane.capacity_tokens

    def write(self, batch: Batch, table, tokens: list[list[int]]) -> None:
        """Run the step on the fake pool, then read every row back through its table."""
        contents = []
        for (request, n), new in zip(batch, tokens):
            request.tokens += new
            contents += self.model.content(request.tokens)[-n:]
        self.pool.run(table, contents)
        for i, (request, n) in enumerate(batch):
            assert self.pool.read(table, i) == self.model.content(request.tokens)
            assert (table.kv_lens[i], table.query_lens[i]) == (len(request.tokens), n)
        self.table = table
        self.tabled = {p for r, _ in batch for p in r.pages[: self.model.pages_for(len(r.tokens))]}

    def step(self, batch: Batch, tokens: list[list[int]]) -> None:
        """One `prepare`, and what it writes."""
        grow, copies = self.model.wants(batch)
        slices = self.model.slices(batch)
        assert self.plane.pages_needed(slices) == grow + len(copies)
        fits = grow + len(copies) <= self.model.available()
        assert self.plane.fits(slices) == fits
        if not fits:
            before = snapshot(self.plane)
            assert self.plane.prepare(slices, self.pool.scrub, self.pool.copy) is None
            assert snapshot(self.plane) == before
            return
        self.model.take(batch)
        copied, scrubbed = len(self.pool.copied), len(self.pool.scrubbed)
        wait = self.model.copies_before(batch)
        table = checked(self.plane.prepare(slices, self.pool.scrub, self.pool.copy))
        assert len(self.pool.copied) - copied == bool(wait)
        assert len(self.pool.scrubbed) - scrubbed <= 1
        for request in wait:
            self.model.settle(request)
        self.write(batch, table, tokens)

    @rule(prompt=PROMPTS, attach=st.booleans())
    def arrive(self, prompt, attach):
        """A new request, and the step that computes its prompt."""
        assert self.plane.cached_tokens(SPACE, prompt) == len(self.model.match(prompt)) * SIZE
        handle = self.plane.open()
        assert (handle is None) == (len(self.model.requests) == ROWS)
        if handle is None:
            return
        request = self.model.requests[handle] = Request(handle)
        if attach:
            self.model.attach(request, prompt)
            assert self.plane.attach(handle, SPACE, prompt) == len(request.tokens)
        rest = prompt[len(request.tokens) :]
        self.step([(request, len(rest))], [rest])

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), token=TOKEN)
    def prepare(self, data, token):
        batch = self.batch(data)
        self.step(batch, [[token] * n for _, n in batch])

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), token=TOKEN, confirm=st.booleans())
    def step_by_step(self, data, token, confirm):
        """Reserve, and sometimes go on to overwrite, confirm and build."""
        batch = self.batch(data)
        grow, copies = self.model.wants(batch)
        slices = self.model.slices(batch)
        fits = grow + len(copies) <= self.model.available()
        reservation = self.plane.reserve(slices)
        assert (reservation is not None) == fits
        if reservation is None:
            return
        self.model.take(batch)
        wait = self.model.copies_before(batch)
        assert reservation.copy_target.shape[0] == len(wait)
        if not confirm:
            if reservation.dirty.shape[0] + len(wait):
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
            self.model.settle(request)
        self.write(batch, checked(self.plane.build(slices)), [[token] * n for _, n in batch])

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.request(data)
        child = self.plane.fork(parent.handle)
        assert (child is None) == (len(self.model.requests) == ROWS)
        if child:
            shared = parent.pages[: self.model.pages_for(len(parent.tokens))]
            for page in shared:
                page.holders.add(child)
            self.model.requests[child] = Request(child, list(parent.tokens), list(shared))

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), part=st.floats(0, 1))
    def truncate(self, data, part):
        request = self.request(data)
        length = int(part * len(request.tokens))
        before = len(self.model.held())
        freed = self.plane.truncate(request.handle, length)
        self.model.cut(request, length)
        assert freed.shape[0] == before - len(self.model.held())

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), part=st.floats(0, 1))
    def publish(self, data, part):
        request = self.request(data)
        self.publish_tokens(request, int(part * len(request.tokens)))

    def publish_tokens(self, request: Request, length: int) -> None:
        adopted = self.plane.publish(request.handle, SPACE, request.tokens[:length])
        assert adopted.shape[0] == len(self.model.publish(request, length))

    @precondition(lambda self: len(self.model.index) > 4)
    @rule()
    def forget_prefixes(self):
        before = len(self.model.held())
        freed = self.plane.forget_prefixes()
        nodes, self.model.index = self.model.index, {}
        self.model.let_go("index", [node.page for node in nodes.values()])
        assert freed.shape[0] == before - len(self.model.held())

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), finished=st.booleans())
    def end(self, data, finished):
        """Release, after publishing everything or, as after an abort, nothing."""
        request = self.request(data)
        if finished:
            self.publish_tokens(request, len(request.tokens))
        before, self.freed = len(self.model.held()), []
        pages = self.plane.pages_of(request.handle).tolist()
        freed = self.plane.release(request.handle).tolist()
        copy = request.copy
        self.model.cut(request, 0)
        del self.model.requests[request.handle]
        self.closed.append(request.handle)
        assert freed == self.freed
        assert len(freed) == before - len(self.model.held())
        assert len(set(freed) - set(pages)) <= (copy is not None)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def use_a_stale_handle(self, data):
        handle = data.draw(st.sampled_from(self.closed))
        before = snapshot(self.plane)
        for use in (
            lambda: self.plane.release(handle),
            lambda: self.plane.fork(handle),
            lambda: self.plane.truncate(handle, 0),
            lambda: self.plane.publish(handle, SPACE, []),
            lambda: self.plane.reserve([Slice(handle, 0, 1)]),
        ):
            with pytest.raises(StaleHandleError, match=f"row {handle.row}, epoch {handle.epoch}"):
                use()
        for handle, gap in zip(self.model.requests, (-1, 1)):
            with pytest.raises(InvalidInputError, match="start"):
                self.plane.reserve([Slice(handle, self.plane.length(handle) + gap, 1)])
        assert snapshot(self.plane) == before

    @precondition(lambda self: self.table is not None)
    @rule()
    def dispatch(self):
        table, self.table = self.table, None
        if not self.tabled <= self.model.held():
            # A page was freed since. If it went to somebody else meanwhile, no bookkeeping can tell; if not, it shows.
            if not self.plane._ledger.allocator.allocated[table.page_ids].all():
                with pytest.raises(UseAfterFreeError, match="was freed since the table was built"):
                    self.plane.dispatch(table)
            return
        number = self.plane.dispatch(table)
        self.in_flight.append(number)
        for page in self.tabled:
            page.steps.add(number)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def retire(self, data):
        number = data.draw(st.sampled_from(self.in_flight))
        before = len(self.model.held())
        freed = self.plane.retire(number)
        self.in_flight = [n for n in self.in_flight if n > number]
        for page in self.model.held():
            page.steps = {n for n in page.steps if n > number}
        self.model.waiting = {page for page in self.model.waiting if page.steps}
        assert freed.shape[0] == before - len(self.model.held())

    @invariant()
    def parts_agree(self):
        self.plane.verify()
        model = self.model
        assert self.plane.leaked_pages() == 0
        assert self.plane.held_pages == len(model.held())
        assert self.plane.available_pages == model.available()
        assert self.plane.pending_pages == len(model.waiting)
        assert self.plane.num_open == len(model.requests)
        held = {page for r in model.requests.values() for page in [*r.pages, *([r.copy[1]] if r.copy else [])]}
        assert self.plane.retained_pages() == len({node.page for node in model.index.values()} - held)

    @invariant()
    def requests_hold_what_the_model_says(self):
        real: dict[Page, int] = {}
        references = self.plane._ledger.allocator.reference_counts
        for handle, request in self.model.requests.items():
            pages = self.plane.pages_of(handle).tolist()
            assert self.plane.length(handle) == len(request.tokens)
            assert len(pages) == len(request.pages)
            for page, number in zip(request.pages, pages):
                assert real.setdefault(page, number) == number
                assert references[number] == len(page.holders)
        assert len(set(real.values())) == len(real)

    @invariant()
    def nothing_cached_is_ever_lost(self):
        for handle, request in self.model.requests.items():
            assert self.pool.cached(handle) == self.model.content(request.tokens)

    @invariant()
    def published_pages_hold_their_tokens(self):
        prefixes = self.plane.prefixes
        assert prefixes is not None
        assert len(prefixes) == len(self.model.index)
        for tokens in self.model.index:
            pages = prefixes.match(SPACE, [*tokens, 0])
            assert self.pool.slots[pages].reshape(-1).tolist() == self.model.content(list(tokens))


TestPlane = PlaneMachine.TestCase
TestPlane.settings = settings(
    max_examples=int(os.environ.get("PAGED_EXAMPLES", "40")), stateful_step_count=40, deadline=None
)
