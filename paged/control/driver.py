"""The driver: the only scheduling loop of the project (requirement E2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from paged.common.checks import check_choice, check_int, refuse_rows, show
from paged.common.errors import InternalError, InvalidInputError, PoolExhaustedError, UnsupportedError
from paged.common.namespace import CacheNamespace
from paged.common.page_table import PageTable
from paged.control.batch import Slice
from paged.control.counters import Counters
from paged.control.family import Family
from paged.control.outcome import Flight, StepOutcome
from paged.control.plane import ControlPlane
from paged.control.requests import Phase, Request, Result
from paged.control.runner_protocol import FAILED, RequestId, Step, StepRunner
from paged.control.running import Plan
from paged.control.schedule import Schedule
from paged.control.shapes import PinnedShapes
from paged.control.submission import check_ends, check_namespace, check_tokens, refuse_short_shapes, refuse_too_long

SCHEDULES = ("mixed", "prefill_first")
_DRAINING, _FINISHED = Phase.DRAINING, Phase.FINISHED  # an enum member costs a look-up in a loop over rows


class Driver:
    """Queue, admission, chunked prefill, decoding and preemption over one control plane and one runner.

    - `plane`: its rows and pages are the driver's alone. `runner`: runs the steps, see `StepRunner`.
    - `max_step_tokens`: budget of one step. Longer prompts are fed in chunks.
    - `schedule`: `"mixed"`: every step decodes all it can, and prompts get the rest of the budget; needs a runner that
      can mix. `"prefill_first"`: a step feeds prompts while there are any to feed, and decodes otherwise. By default
      mixed where the runner can.
    - `max_request_tokens`: tokens that a request may have in the cache, if that is fewer than the plane has room for.

    Requests go in turn: lower `priority` first, then earlier arrival. The first in turn is admitted once all its known
    tokens fit the free and evictable pages beside what admitted prompts have yet to take and one page in hand for
    every running request. When pages run out nevertheless, the newest in turn is preempted: its pages are given up, it
    keeps its turn, and its generated tokens are fed again with its prompt. So the first in turn always gets on, and
    every request that `submit` takes finishes, whatever else runs.

    Over a plane with a prefix index, a request with a namespace is fed from its first token that is not cached. Its
    whole pages are published once its prompt is in the cache, and again when it finishes; being preempted or aborted
    publishes nothing, and neither does failing.

    A request for which the runner has no token, because its logits are no numbers, fails alone, with the reason
    `"error"`.

    Over a plane with `PinnedShapes` a request's tokens are computed alike whatever runs beside it: prompts are fed in
    steps of their own, requests wait until all pages that they may ever need are certain, and only prompts are shared.

    With a runner of depth 2 the host plans a step while the device runs the one before. Pages that a step under way
    names are not given away before it is collected, and nobody is preempted as long as waiting for it may do.

    One thread at a time. Deterministic: equal calls and equal sampled tokens give equal steps.
    Raises `InvalidInputError` or `UnsupportedError` if plane, runner and options do not go together.
    """

    def __init__(
        self,
        plane: ControlPlane,
        runner: StepRunner,
        *,
        max_step_tokens: int,
        schedule: str | None = None,
        max_request_tokens: int | None = None,
    ):
        self.plane = plane
        self.runner = runner
        self.max_step_tokens = check_int("Driver", "max_step_tokens", max_step_tokens, minimum=1)
        apart = not runner.can_mix or isinstance(plane.shapes, PinnedShapes)
        self.schedule = check_choice("Driver", "schedule", schedule or SCHEDULES[apart], SCHEDULES)
        mixed = self.schedule == "mixed"
        if mixed and not runner.can_mix:
            raise UnsupportedError(
                "Driver.schedule is 'mixed', and this runner cannot hold slices of one token and longer ones in one "
                "step. Use schedule='prefill_first'.",
                capability="mixed",
            )
        self.max_request_tokens = plane.capacity_tokens
        if max_request_tokens is not None:
            most = check_int("Driver", "max_request_tokens", max_request_tokens, minimum=1)
            self.max_request_tokens = min(most, plane.capacity_tokens)
        refuse_short_shapes(plane, self.max_step_tokens, self.max_request_tokens)
        self._pinned = plane.shapes if isinstance(plane.shapes, PinnedShapes) else None
        if self._pinned is not None and (mixed or self.max_step_tokens < 4):
            raise UnsupportedError(
                f"Driver.schedule is {self.schedule!r} with steps of {self.max_step_tokens} tokens, over a plane with "
                f"pinned shapes, which keeps its phases apart. Use schedule='prefill_first', and max_step_tokens=4 or "
                f"more.",
                capability="mixed",
            )
        self.counters = Counters()
        self.finished: dict[RequestId, Result] = {}
        self._depth = check_int("Driver", "runner.depth", runner.depth, minimum=1)
        self._requests: dict[RequestId, Request] = {}
        self._flying: deque[Flight] = deque()
        self._arrivals = 0
        self._schedule = Schedule(
            plane,
            self.counters,
            max_step_tokens=self.max_step_tokens,
            mixed=mixed,
            can_mix=runner.can_mix,
            pinned=self._pinned is not None,
        )

    @property
    def idle(self) -> bool:
        """Whether every request has finished and no step is under way."""
        return not self._requests and not self._flying

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._schedule.waiting)

    @property
    def num_running(self) -> int:
        """Requests that are admitted and have not finished."""
        return len(self._schedule.running)

    @property
    def num_in_flight(self) -> int:
        """Steps that are dispatched and not collected."""
        return len(self._flying)

    def submit(
        self,
        prompt_tokens: Sequence[int] | np.ndarray,
        max_tokens: int,
        *,
        eos: Iterable[int] = (),
        priority: int = 0,
        request_id: RequestId | None = None,
        namespace: CacheNamespace | None = None,
    ) -> RequestId:
        """Queue a request and return its id, which is `request_id` if given.

        - `prompt_tokens`: at least one id. `max_tokens`: tokens to generate at most, at least 1.
        - `eos`: ids that end the generation. `priority`: lower goes first.
        - `namespace`: with whom it shares cached prefixes; by default with nobody.

        Raises `InvalidInputError` for wrong values or an id that is in use, and `PoolExhaustedError` with the
        arithmetic for a request that could never be cached whole (scenario H6). Nothing was queued then.
        """
        key = self._free_id(request_id)
        self._submit(prompt_tokens, max_tokens, eos, priority, namespace, [key])
        return key

    def submit_samples(
        self,
        prompt_tokens: Sequence[int] | np.ndarray,
        max_tokens: int,
        request_ids: Sequence[RequestId],
        *,
        eos: Iterable[int] = (),
        priority: int = 0,
        namespace: CacheNamespace | None = None,
    ) -> None:
        """Queue several requests with one prompt, one for each id; see `submit`.

        One of them feeds the prompt. The others fork its pages, feed the prompt's last token again, because each
        samples for itself, and copy a page only where they write. Where rows or pages are too few for all at once, or
        the first has gone, another one feeds the prompt.
        """
        keys = [self._free_id(key) for key in request_ids]
        if not keys or len(set(keys)) < len(keys):
            raise InvalidInputError(f"submit_samples.request_ids must be distinct, at least one; got {show(keys)}.")
        self._submit(prompt_tokens, max_tokens, eos, priority, namespace, keys)

    def _submit(
        self,
        prompt_tokens: Sequence[int] | np.ndarray,
        max_tokens: int,
        eos: Iterable[int],
        priority: int,
        namespace: CacheNamespace | None,
        keys: list[RequestId],
    ) -> None:
        tokens = check_tokens(prompt_tokens)
        max_tokens = check_int("submit", "max_tokens", max_tokens, minimum=1)
        priority = check_int("submit", "priority", priority, minimum=-(2**31))
        stop, limit = check_ends(eos), len(tokens) + max_tokens
        check_namespace(self.plane, namespace)
        refuse_too_long(self.plane, len(tokens), max_tokens, self.max_request_tokens)
        family = Family() if len(keys) > 1 else None
        for key in keys:
            turn = (priority, self._arrivals)
            request = Request(key, turn, tokens[:], len(tokens), limit, stop, namespace, family)
            if family is not None:
                family.members.append(request)
            self._arrivals += 1
            self._requests[key] = request
            self._schedule.waiting.push(request)

    def abort(self, request_id: RequestId) -> bool:
        """End a request at any point with what it has; False if it had finished already, and then nothing changes.

        Its pages become free at once, or as the steps under way that name them are collected.
        Raises `InvalidInputError` for an id that is neither unfinished nor among the results.
        """
        return self._end("abort", request_id)

    def stop(self, request_id: RequestId) -> bool:
        """Finish a request as if the last token that it sampled were an end of text, say after a stop string.

        Like `abort`, but the result's reason is `"stop"`, and its pages are published.
        """
        return self._end("stop", request_id)

    def take(self, request_id: RequestId) -> Result:
        """Remove and return the result of a finished request; its id may then be used again.

        Raises `InvalidInputError` if there is none.
        """
        if request_id not in self.finished:
            state = "has not finished" if request_id in self._requests else "is unknown"
            raise InvalidInputError(f"take: request {show(request_id)} {state}.")
        return self.finished.pop(request_id)

    def step(self) -> StepOutcome | None:
        """Keep the runner busy, wait for the oldest step under way, and return what it did; None if all is done.

        If the runner fails to start a step, its requests are as they were. If it fails to finish one, every request of
        the steps under way goes back to the queue and is computed again. The exception is passed on either way, and
        `step` may be called again.

        Raises `PoolExhaustedError` if others hold rows or pages of the plane, so that nothing can run.
        """
        while len(self._flying) < self._depth and self._launch():
            pass
        if self._flying:
            return self._commit()
        if self._requests:
            raise PoolExhaustedError(
                f"Driver.step: {len(self._requests)} requests are unfinished and none can run: "
                f"{self.plane.num_open} of {self.plane.max_requests} rows are open, {self.num_running} of them by "
                f"this driver, and {self.plane.available_pages} of {self.plane.layout.usable_pages} pages can be had. "
                f"Release what others hold; a driver needs its plane for itself."
            )
        return None

    def verify(self) -> None:
        """Prove that plane, queue, phases and steps under way agree; raises `InternalError`."""
        self.plane.verify()
        self._schedule.verify(self._requests.values())
        under_way = dict.fromkeys(self._requests.values(), 0)
        for flight in self._flying:
            for request, samples in zip(flight.plan.requests, flight.samples):
                if request in under_way:
                    under_way[request] += samples
        for request, count in under_way.items():
            if request.in_flight != count:
                raise InternalError(f"Driver: {count} samples are under way for {request}.")

    def _launch(self) -> bool:
        """Plan and dispatch one step; False if there is nothing to run, or nothing before a step under way is done."""
        chosen = self._schedule.choose(admit=True)
        while chosen.requests:
            slices = chosen.slices()
            shape = self._pinned and (self._pinned.decode if chosen.num_decode else self._pinned.prefill)
            table = self.plane.prepare(slices, self.runner.scrub, self.runner.copy, shape=shape)
            if table is not None:
                self._dispatch(chosen, slices, table)
                return True
            if self._flying:
                # As they are collected requests end and pages come free; only then is it known whether anyone has to
                # give way (scenario H9).
                return False
            self._schedule.preempt_newest(slices)
            chosen = self._schedule.choose(admit=False)
        return False

    def _dispatch(self, chosen: Plan, slices: list[Slice], table: PageTable) -> None:
        try:
            ticket = self.runner.dispatch(Step(chosen.batch, slices, chosen.known, table))
        except BaseException:
            for one in slices:
                self.plane.truncate(one.handle, one.start)
            raise
        number = self.plane.dispatch(table)
        self._flying.append(Flight(number, ticket, chosen, self._schedule.dispatched(chosen), table))
        self.counters.steps += 1
        self.counters.decode_tokens += chosen.num_decode
        self.counters.prefill_tokens += sum(chosen.counts[chosen.num_decode :])

    def _commit(self) -> StepOutcome:
        """Wait for the oldest step under way; take what it sampled, and end who is done."""
        flight = self._flying[0]
        try:
            sampled = self._collect(flight)
        except BaseException:
            self._abandon()
            raise
        self._flying.popleft()
        self.plane.retire(flight.number)
        finished: list[RequestId] = []
        gone: list[int] = []
        for i, (request, samples, token) in enumerate(zip(flight.plan.requests, flight.samples, sampled.tolist())):
            phase = request.phase
            if not samples or phase is _FINISHED:
                gone.append(i)
                continue
            if token == FAILED:
                gone.append(i)
                finished.append(request.id)
                self._finish(request, "error")
                continue
            under_way = request.in_flight
            request.tokens[-under_way] = token
            request.in_flight = under_way - 1
            if request.family is not None and i >= flight.plan.num_decode:
                self._schedule.prompt_is_cached(request)  # before it may end, and its pages with it
            if token in request.eos:
                finished.append(request.id)
                self._finish(request, "stop")
            elif phase is _DRAINING and under_way == 1:
                finished.append(request.id)
                self._finish(request, "length")
            elif i >= flight.plan.num_decode:  # its whole prompt is in the cache now
                self._schedule.publish(request, request.target)
        sampled[gone] = -1
        offsets, rows = flight.table.query_offsets, sampled.shape[0]
        query_lens = offsets[1 : rows + 1] - offsets[:rows]
        cached = flight.table.kv_lens[:rows] - query_lens
        return StepOutcome(flight.plan.batch, query_lens, cached, sampled, tuple(finished), flight.number)

    def _collect(self, flight: Flight) -> np.ndarray:
        sampled = np.array(self.runner.collect(flight.ticket))
        rows = len(flight.samples)
        if sampled.shape != (rows,) or sampled.dtype.kind not in "iu":
            raise InvalidInputError(f"runner.collect must give {rows} ints, got {sampled.dtype} of {sampled.shape}.")
        if rows and sampled.min() < 0:
            wrong = (sampled < 0) & (sampled != FAILED) & flight.samples
            refuse_rows("runner", "sampled token", sampled, wrong, "must not be negative")
        return sampled

    def _abandon(self) -> None:
        """The steps under way are lost: their requests are computed again from the tokens that are known."""
        lost = {request: None for flight in self._flying for request in flight.plan.requests}
        while self._flying:
            self.plane.retire(self._flying.popleft().number)
        for request in lost:
            if request.phase is not Phase.FINISHED:
                del request.tokens[request.num_known :]
                request.in_flight = 0
                self._schedule.requeue(request)

    def _end(self, reason: str, request_id: RequestId) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            if request_id in self.finished:
                return False
            raise InvalidInputError(f"{reason}: there is no request {show(request_id)}: never submitted, or taken.")
        self._finish(request, reason)
        return True

    def _finish(self, request: Request, reason: str) -> None:
        """The one way in which a request ends (scenario H1)."""
        del self._requests[request.id]
        # A prompt of which no step has sampled yet may turn out to have logits that are no numbers.
        if reason not in ("abort", "error") and request.phase is not Phase.PREFILL and request.namespace is not None:
            # What steps under way write is left out: they may yet be lost.
            plans = [flight.plan for flight in self._flying]
            unsure = sum(n for plan in plans for r, n in zip(plan.requests, plan.counts) if r is request)
            self._schedule.publish(request, request.cached - unsure)
        self._schedule.drop(request)
        tokens = tuple(request.tokens[request.num_prompt : request.num_known])
        self.finished[request.id] = Result(
            tokens, reason, request.num_prompt, request.preemptions, request.prefix_tokens
        )
        counted = {"abort": "aborted", "error": "failed"}.get(reason, "finished")
        setattr(self.counters, counted, getattr(self.counters, counted) + 1)

    def _free_id(self, request_id: RequestId | None) -> RequestId:
        """`request_id` if it is not in use, or a number that is not."""
        if request_id is None:
            number = self._arrivals
            while self._in_use(number):
                number += 1
            return number
        if isinstance(request_id, bool) or not isinstance(request_id, (int, str)):
            raise InvalidInputError(f"submit.request_id must be an int or a str, got {show(request_id)}.")
        if self._in_use(request_id):
            raise InvalidInputError(
                f"submit.request_id {show(request_id)} is in use. Take its result with take(), or choose another."
            )
        return request_id

    def _in_use(self, request_id: RequestId) -> bool:
        return request_id in self._requests or request_id in self.finished
