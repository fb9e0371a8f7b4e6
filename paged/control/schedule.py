"""Who takes part in the next step, who is admitted, and who gives way when pages are short."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paged.common.checks import show
from paged.common.errors import InternalError, PoolExhaustedError
from paged.common.page_table import pages_for
from paged.control.batch import Slice
from paged.control.counters import Counters
from paged.control.page_map import Handle
from paged.control.plane import ControlPlane
from paged.control.requests import Phase, Request
from paged.control.runner_protocol import IN_FLIGHT
from paged.control.running import Plan, Running, plan
from paged.control.waiting import WaitingQueue


class Schedule:
    """Queue and running requests of one driver, which documents the policy.

    - `mixed`: prompts go beside decoding requests. `can_mix`: slices of one token and longer ones may share a step.
    - `pinned`: a request's tokens are computed alike whatever runs beside it. So nobody is admitted before all pages
      that it may ever need are certain, only what was fed as a prompt is published, and a prompt is fed two tokens or
      more at a time, because backends may have other arithmetic for one.
    """

    def __init__(
        self,
        plane: ControlPlane,
        counters: Counters,
        *,
        max_step_tokens: int,
        mixed: bool,
        can_mix: bool,
        pinned: bool = False,
    ):
        self.plane = plane
        self.waiting = WaitingQueue()
        self.running = Running()
        self._counters = counters
        self._refused: tuple[object, ...] | None = None
        self._max_step_tokens = max_step_tokens
        self._mixed = mixed
        self._can_mix = can_mix
        self._pinned = pinned
        self._least = 1 + pinned  # tokens of a prompt that are fed at a time

    def choose(self, *, admit: bool) -> Plan:
        """The next step, empty if nobody can run; with `admit` waiting requests are admitted into it."""
        if not self._mixed:
            requests, counts = self._chunks(self._max_step_tokens, admit)
            return plan(requests, counts, 0) if requests else self.running.decode_plan(self._max_step_tokens)
        decode = self.running.decode_plan(self._max_step_tokens)
        requests, counts = self._chunks(self._max_step_tokens - len(decode.requests), admit)
        if not requests:
            return decode
        return plan([*decode.requests, *requests], [*decode.counts, *counts], decode.num_decode)

    def _chunks(self, room: int, admit: bool) -> tuple[list[Request], list[int]]:
        """Prompts to feed, as many tokens as there is room for; those that were admitted before go first."""
        requests: list[Request] = []
        counts: list[int] = []
        admitted = iter(tuple(self.running.prefill))
        while room:
            request = next(admitted, None) or (self._admit() if admit else None)
            if request is None:
                break
            count = chunk_tokens(request.target - request.cached, room, self._least)
            if not count:
                break
            if counts and not self._can_mix and (count == 1) != (counts[0] == 1):
                continue  # it goes in a later step
            requests.append(request)
            counts.append(count)
            room -= count
        return requests, counts

    def _admit(self) -> Request | None:
        """Give the first in turn a row of the map, if its tokens fit beside what the others are about to take.

        A running request takes at most a page in a step besides what its prompt was promised, so a step that admits
        somebody always gets its pages (scenario H11).
        """
        request = self.waiting.first()
        if request is None:
            return None
        plane, size = self.plane, self.plane.layout.tokens_per_page
        taken, need = len(self.running), pages_for(self._promised(request), size)
        there = self.running if self._pinned else self.running.prefill
        taken += sum(pages_for(self._promised(r), size) - pages_for(r.cached, size) for r in there)
        available = plane.available_pages
        source = None if request.family is None else request.family.source()
        if source is not None:
            return self._fork(request, source, need + taken, available)
        if request.namespace is None and need + taken > available:
            return None
        # A request that did not fit is not matched again before something changed.
        asked = (request.turn, taken, available, 0 if plane.prefixes is None else len(plane.prefixes))
        if asked == self._refused:
            return None
        handle = plane.open()
        if handle is None:
            return None
        cached = 0
        if request.namespace is not None:
            # Attached first and counted then: what it holds can no longer be evicted for it (scenario C3).
            cached = plane.attach(handle, request.namespace, request.tokens[: len(request.tokens) + 1 - self._least])
            if need - cached // size + taken > plane.available_pages:
                plane.release(handle)
                self._refused = asked
                return None
        if not request.preemptions:
            request.prefix_tokens = cached
        self._counters.prefix_tokens += cached
        self._enter(handle, cached)
        if request.family is not None:
            request.family.leader = request
        return request

    def _fork(self, request: Request, source: Request, want: int, available: int) -> Request | None:
        """Admit the first in turn with the pages of another sample's prompt, if `want` less those fit `available`."""
        assert source.handle is not None
        size = self.plane.layout.tokens_per_page
        shared = max(0, min(source.num_prompt, len(request.tokens) - self._least))
        # A page that is shared in part is copied by the first of the two that writes into it.
        if want - pages_for(shared, size) + bool(shared % size) > available:
            return None
        handle = self.plane.fork(source.handle)
        if handle is None:
            return None
        self.plane.truncate(handle, shared)
        self._counters.forked_tokens += shared
        return self._enter(handle, shared)

    def _enter(self, handle: Handle, cached: int) -> Request:
        request = self.waiting.take()
        request.handle, request.cached, request.target = handle, cached, len(request.tokens)
        self.running.enter(request, Phase.PREFILL)
        return request

    def _promised(self, request: Request) -> int:
        """Tokens whose pages are kept for a request: all that are known, or all that it can ever have."""
        if self._pinned:
            return request.limit - 1  # the last is never fed
        return len(request.tokens) if request.handle is None else request.target

    def prompt_is_cached(self, request: Request) -> None:
        """Every step that fed this sample its prompt is collected: admit other samples of it while it is here."""
        family = request.family
        if family is None or request.shares_prompt:
            return
        request.shares_prompt = True
        self._let_go(request)
        while (first := self.waiting.first()) is not None and first.family is family:
            if self._admit() is None:
                break

    def _let_go(self, request: Request) -> None:
        """If a request leads its family, it does no longer."""
        if request.family is not None and request.family.leader is request:
            request.family.leader = None
            self.waiting.call_back(request.family)

    def preempt_newest(self, slices: Sequence[Slice]) -> None:
        """Send the last in turn back to the queue, because `slices` do not fit.

        Only while no step is under way: then what it gives up is free at once, and one after the other is preempted no
        longer than needed (scenario H9).
        """
        if len(self.running) == 1:
            raise PoolExhaustedError(
                f"the only running request needs {self.plane.pages_needed(slices)} more pages, and "
                f"{self.plane.available_pages} of {self.plane.layout.usable_pages} can be had: somebody else holds the "
                f"others. Release them; a driver needs its plane for itself."
            )
        self._counters.preemptions += 1
        self.requeue(self.running.newest())

    def requeue(self, request: Request) -> None:
        """Give up a running request's pages; it waits, at its turn, to be fed all its tokens again. Publishes none."""
        assert request.handle is not None
        assert not request.in_flight
        self._counters.recomputed_tokens += request.cached
        self.running.leave(request)
        self.plane.release(request.handle)
        request.handle, request.cached, request.shares_prompt = None, 0, False
        request.preemptions += 1
        self._let_go(request)
        self.waiting.push(request)

    def dispatched(self, chosen: Plan) -> list[bool]:
        """Move the requests of a step that was dispatched on; which of them sample."""
        samples = [True] * len(chosen.requests)
        onward: list[Request] = []
        for request in chosen.requests[: chosen.num_decode]:
            request.cached += 1
            request.in_flight += 1
            request.tokens.append(IN_FLIGHT)
            if len(request.tokens) == request.limit:
                onward.append(request)
        for i in range(chosen.num_decode, len(samples)):
            request = chosen.requests[i]
            request.cached += chosen.counts[i]
            samples[i] = request.cached == request.target
            if samples[i]:
                request.in_flight += 1
                request.tokens.append(IN_FLIGHT)
                onward.append(request)
        for request in onward:
            self.running.leave(request)
            self.running.enter(request, Phase.DRAINING if len(request.tokens) == request.limit else Phase.DECODE)
        return samples

    def publish(self, request: Request, num_tokens: int) -> None:
        """Let others share the first `num_tokens` tokens of a running request, if it shares at all."""
        if request.namespace is not None and request.handle is not None:
            if self._pinned:
                num_tokens = min(num_tokens, request.num_prompt)
            self.plane.publish(request.handle, request.namespace, request.tokens[:num_tokens])

    def drop(self, request: Request) -> None:
        """End a request, waiting or running; the one place where a finished or aborted one gives up its pages."""
        if request.family is not None:
            request.family.members.remove(request)
        if request.handle is None:
            self.waiting.drop(request)
            return
        self.running.leave(request)
        self.plane.release(request.handle)
        request.phase, request.handle, request.shares_prompt = Phase.FINISHED, None, False
        self._let_go(request)

    def verify(self, requests: Collection[Request]) -> None:
        """Prove that plane, queue and phases agree about these, all the unfinished ones; raises `InternalError`."""
        running = self.running
        places = {
            Phase.WAITING: len(self.waiting),
            Phase.PREFILL: len(running.prefill),
            Phase.DECODE: len(running.decode),
            Phase.DRAINING: len(running.draining),
        }
        for phase, count in places.items():
            there = sum(r.phase is phase for r in requests)
            if there != count:
                raise InternalError(f"Schedule: {there} requests are in phase {phase.value}, {count} in its place.")
        for there in (running.prefill, running.decode):
            if [r.turn for r in there] != sorted(r.turn for r in there):
                raise InternalError(f"Schedule: requests are not in the order of turns: {[r.turn for r in there]}.")
        for request in requests:
            self._verify_request(request)
        for family in {id(r.family): r.family for r in requests if r.family is not None}.values():
            family.verify()

    def _verify_request(self, r: Request) -> None:
        fed = 0 if r.handle is None else self.plane.length(r.handle)
        known, under_way = r.tokens[: r.num_known], r.tokens[r.num_known :]
        for rule, good in (
            ("has a row and waits, or neither", (r.handle is None) == (r.phase is Phase.WAITING)),
            ("does not know its length", fed == r.cached),
            ("mistakes a token under way", IN_FLIGHT not in known and set(under_way) <= {IN_FLIGHT}),
            ("has nothing left to feed", r.phase is not Phase.PREFILL or fed < r.target <= len(known)),
            ("does not decode its last token", r.phase is not Phase.DECODE or fed == len(r.tokens) - 1),
            ("should drain, or should not", (len(r.tokens) == r.limit) == (r.phase is Phase.DRAINING)),
        ):
            if not good:
                raise InternalError(f"Schedule: request {show(r.id)} {rule} ({r}).")


def chunk_tokens(left: int, room: int, least: int) -> int:
    """How many of a prompt's `left` tokens to feed where there is `room`: never fewer than `least` at a time, now or
    at the end, unless there are no more; 0 if that takes more room."""
    if left <= room:
        return left
    count = min(room, left - least)
    return count if count >= least else 0
