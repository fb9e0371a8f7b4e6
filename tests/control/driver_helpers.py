"""A runner whose pool holds token ids instead of K and V, so that every sampled token proves what was read."""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from plane_helpers import POISONED, SCRUBBED, FakePool, checked, make_layout

from paged.control import ControlPlane, Driver, Handle, PrefixIndex, Result, Shapes, Step
from paged.control.runner_protocol import FAILED, IN_FLIGHT

VOCABULARY = 50


def next_token(history: Sequence[int]) -> int:
    """The token after a history: depends on every token and every position of it."""
    return zlib.crc32(np.asarray(history, np.int32).tobytes()) % VOCABULARY + 1


def expected(
    prompt: Sequence[int], max_tokens: int, eos: Collection[int] = (), bad: int | None = None
) -> tuple[tuple[int, ...], str]:
    """What a request must come to, whatever ran beside it: its tokens and why it ended."""
    history = list(prompt)
    for _ in range(max_tokens):
        if bad in history:
            return tuple(history[len(prompt) :]), "error"
        history.append(next_token(history))
        if history[-1] in eos:
            return tuple(history[len(prompt) :]), "stop"
    return tuple(history[len(prompt) :]), "length"


@dataclasses.dataclass
class _Flight:
    step: Step
    fed: list[list[int]]
    samples: list[bool]
    sampled: np.ndarray | None = None


class FakeRunner:
    """Runs a step when it is collected, and scrubs at once: the worst order that a fence has to survive. Only a copy
    waits for the steps that were dispatched before it.

    Slices that do not sample get −7, which must never show up anywhere. Requests that hold the token `bad` fail.
    """

    def __init__(self, plane: ControlPlane, depth: int = 1, can_mix: bool = True):
        self.plane = plane
        self.depth, self.can_mix = depth, can_mix
        self.pool = FakePool(plane)
        self.steps: list[list[tuple[object, int, int]]] = []
        self.scrub = self.pool.scrub
        self.fail_dispatch = self.fail_collect = False
        self.failures = 0
        self.bad: int | None = None
        self._flying: deque[_Flight] = deque()
        self._sampled: dict[Handle, int] = {}

    def dispatch(self, step: Step) -> int:
        if self.fail_dispatch:
            self.failures += 1
            raise ConnectionError("no device")
        assert len(self._flying) < self.depth
        assert len(step.batch) == len(step.slices) == len(step.known) > 0
        fed, samples = [], []
        for (handle, start, count), known in zip(step.slices, step.known):
            assert self.plane.length(handle) == start + count <= len(known)
            fed.append(list(known[start : start + count]))
            samples.append(start + count == len(known))
            assert IN_FLIGHT not in known[start : start + count - 1]
            assert self.depth > 1 or IN_FLIGHT not in known
        if not self.can_mix:
            assert len({s.num_tokens == 1 for s in step.slices}) == 1
        self.steps.append([(i, s.start, s.num_tokens) for i, s in zip(step.batch, step.slices)])
        self._flying.append(_Flight(step._replace(table=checked(step.table)), fed, samples))
        return len(self.steps)

    def collect(self, ticket: int) -> np.ndarray:
        assert ticket == len(self.steps) - len(self._flying) + 1
        if self.fail_collect:
            self.failures += 1
            self._flying.clear()
            raise ConnectionError("device lost")
        flight = self._flying.popleft()
        return self._run(flight)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        for flight in self._flying:
            self._run(flight)
        self.pool.copy(source, target)

    def _run(self, flight: _Flight) -> np.ndarray:
        if flight.sampled is not None:
            return flight.sampled
        step = flight.step
        values = [
            self._sampled[s.handle] if token == IN_FLIGHT else token
            for s, tokens in zip(step.slices, flight.fed)
            for token in tokens
        ]
        self.pool.run(step.table, values)
        out = []
        for i, s in enumerate(step.slices):
            history = self.pool.read(step.table, i)
            assert not {SCRUBBED, POISONED} & set(history), f"a page of {step.batch[i]} was given away"
            self._sampled[s.handle] = next_token(history)
            token = FAILED if self.bad in history else self._sampled[s.handle]
            out.append(token if flight.samples[i] else -7)
        flight.sampled = np.array(out, np.int32)
        return flight.sampled


def make_driver(
    num_pages: int = 13,
    tokens_per_page: int = 4,
    *,
    max_requests: int = 4,
    depth: int = 1,
    can_mix: bool = True,
    max_step_tokens: int = 16,
    prefixes: bool = False,
    shapes: Shapes | None = None,
    **options,
) -> tuple[Driver, FakeRunner]:
    """A driver whose every step shows that admission and reservation agree (scenario H11)."""

    def poison(pages: np.ndarray) -> None:
        runner.pool.poison(pages)

    layout = make_layout(num_pages, tokens_per_page)
    index = PrefixIndex(layout) if prefixes else None
    plane = ControlPlane(layout, max_requests=max_requests, shapes=shapes, prefixes=index, poison_freed=poison)
    runner = FakeRunner(plane, depth, can_mix)
    driver = Driver(plane, runner, max_step_tokens=max_step_tokens, **options)
    take, prepare = driver._schedule.waiting.take, plane.prepare
    admitted = []

    def watched_take():
        admitted.append(take())
        return admitted[-1]

    def watched_prepare(*args, **options):
        fresh = admitted.copy()
        admitted.clear()
        table = prepare(*args, **options)
        assert table is not None or not fresh, f"{fresh} were admitted and did not get their pages"
        return table

    driver._schedule.waiting.take, plane.prepare = watched_take, watched_prepare
    return driver, runner


def published(driver: Driver, runner: FakeRunner) -> list[list[int]]:
    """Tokens of each published page, which are what the pool holds there."""
    index = driver.plane.prefixes
    assert index is not None
    contents = []
    for page in np.flatnonzero(index.held).tolist():
        contents.append(np.frombuffer(index._content[page][1], "<u4").tolist())
        assert runner.pool.slots[page].tolist() == contents[-1], f"page {page} is published with other tokens"
    return sorted(contents)


def run(driver: Driver, limit: int = 2000) -> dict[object, Result]:
    """Step until all is done, everything proved after each step; all results so far."""
    for _ in range(limit):
        outcome = driver.step()
        driver.verify()
        assert driver.plane.leaked_pages() == 0
        if outcome is None:
            assert driver.idle
            assert driver.plane.num_open == driver.plane.pending_pages == 0
            assert driver.plane.held_pages == driver.plane.retained_pages()
            assert driver.plane.available_pages == driver.plane.layout.usable_pages
            return dict(driver.finished)
    raise AssertionError(f"not done after {limit} steps")
