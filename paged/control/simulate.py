"""The driver on a clock instead of a device: how many requests a pool carries, and how long they wait."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from paged.common.errors import PoolExhaustedError
from paged.common.namespace import CacheNamespace
from paged.control.cost import CostModel
from paged.control.counters import Counters
from paged.control.driver import Driver
from paged.control.plane import ControlPlane
from paged.control.runner_protocol import Step
from paged.control.timeline import Timeline
from paged.control.trace import Arrival, own_ids

PERCENTILES = (50, 90, 99, 100)


class SimulatedRunner:
    """A `StepRunner` whose device only takes time. `now` is the host's clock, in simulated seconds."""

    def __init__(self, cost: CostModel, *, depth: int = 1, can_mix: bool = True):
        self.cost = cost
        self.depth = depth
        self.can_mix = can_mix
        self.now = 0.0
        self.busy_s = 0.0
        self._free_at = 0.0

    def scrub(self, pages: np.ndarray) -> None:
        """Part of a step's own time."""

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Part of a step's own time."""

    def dispatch(self, step: Step) -> tuple[float, int]:
        """The device runs the step when it is done with those before."""
        rows = len(step.slices)
        seconds = self.cost.seconds(step.table, rows)
        self.now += self.cost.host_s
        self.busy_s += seconds
        self._free_at = max(self._free_at, self.now) + seconds
        return self._free_at, rows

    def collect(self, ticket: tuple[float, int]) -> np.ndarray:
        """Wait until the step is done."""
        done_at, rows = ticket
        self.now = max(self.now, done_at)
        return np.zeros(rows, np.int32)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a simulated run came to. Times are simulated seconds, except `host_s`, which the simulation itself took.

    - `finished`, `refused`: requests that ran to their end, and that could never fit.
    - `mean_running`, `mean_pages`: over time; `peak_running`, `peak_pages`: at the end of a step. Pages that the prefix
      index retains count as held.
    - `prefix_tokens`: of the prompts, found cached when a request was first admitted; None without an index.
    - `time_to_first_token_s`, `between_tokens_s`: by percentile, 100 is the longest; empty if there was no such token.
    """

    finished: int
    refused: int
    seconds: float
    busy_s: float
    host_s: float
    prompt_tokens: int
    prefix_tokens: int | None
    generated_tokens: int
    peak_running: int
    mean_running: float
    usable_pages: int
    peak_pages: int
    mean_pages: float
    leaked_pages: int
    time_to_first_token_s: dict[int, float]
    between_tokens_s: dict[int, float]
    counters: Counters

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """As text. A run with preemptions tells capacity and no throughput (requirement T1)."""
        c = self.counters
        out = [
            f"requests      {self.finished} finished, {self.refused} refused because they can never fit",
            f"time          {self.seconds:.1f} s simulated, device busy {_share(self.busy_s, self.seconds)}, "
            f"{c.steps} steps; took {self.host_s:.1f} s",
            f"tokens        {self.prompt_tokens} of prompts, {self.generated_tokens} generated",
            f"capacity      {self.mean_running:.1f} requests at once on average, {self.peak_running} at most",
            f"pages         {_share(self.mean_pages, self.usable_pages)} of {self.usable_pages} held on average, "
            f"{_share(self.peak_pages, self.usable_pages)} at most, {self.leaked_pages} leaked",
            f"preemptions   {c.preemptions}, {c.recomputed_tokens} tokens computed again",
            f"first token   {_percentiles(self.time_to_first_token_s)}",
            f"between       {_percentiles(self.between_tokens_s)}",
        ]
        if self.prefix_tokens is not None:
            out.append(f"prefix hits   {_share(self.prefix_tokens, self.prompt_tokens)} of the prompts' tokens")
        if c.preemptions:
            out.append("throughput    not reported: with preemptions this run measures capacity")
        elif self.seconds:
            out.append(f"throughput    {self.generated_tokens / self.seconds:.1f} generated tokens a second")
        return out


def simulate(
    trace: Iterable[Arrival],
    plane: ControlPlane,
    cost: CostModel,
    *,
    max_step_tokens: int,
    schedule: str | None = None,
    depth: int = 1,
    can_mix: bool = True,
    on_progress: Callable[[int], object] | None = None,
) -> Report:
    """Run a trace, in the order of its arrivals, to its end through a `Driver` on `plane`.

    - `depth`, `can_mix`: of the simulated runner. The other options are those of `Driver`.
    - `on_progress(requests that arrived)`: called now and then.

    A prompt given as a count stands for ids that no other prompt begins with. If the plane has a prefix index, all
    requests share it. Raises what `Driver` raises. Ctrl-C gets a note that says how far the run was.
    """
    began = time.perf_counter()
    runner = SimulatedRunner(cost, depth=depth, can_mix=can_mix)
    driver = Driver(plane, runner, max_step_tokens=max_step_tokens, schedule=schedule)
    timeline = Timeline()
    arrivals = enumerate(trace)
    coming = next(arrivals, None)
    namespace = None
    if plane.prefixes is not None:
        namespace = CacheNamespace(weights="simulated", revision=0, tokenizer="", kv_dtype=plane.layout.dtype)
    refused = prompt_tokens = prefix_tokens = generated_tokens = peak_running = peak_pages = 0
    running_s = pages_s = 0.0
    try:
        while True:
            while coming is not None and coming[1].arrival_s <= runner.now:
                number, arrival = coming
                coming = next(arrivals, None)
                try:
                    prompt = arrival.prompt_tokens
                    prompt = own_ids(number, prompt) if isinstance(prompt, int) else prompt
                    driver.submit(
                        prompt, arrival.output_tokens, priority=arrival.priority, request_id=number, namespace=namespace
                    )
                except PoolExhaustedError:
                    refused += 1
                    continue
                prompt_tokens += len(prompt)
                timeline.arrive(number, arrival.arrival_s)
                if on_progress is not None and (number + 1) % 1000 == 0:
                    on_progress(number + 1)
            before, running, pages = runner.now, driver.num_running, plane.held_pages
            outcome = driver.step()
            if outcome is None:
                if coming is None:
                    break
                runner.now = max(runner.now, coming[1].arrival_s)
                continue
            running_s += max(running, driver.num_running) * (runner.now - before)
            pages_s += max(pages, plane.held_pages) * (runner.now - before)
            peak_running = max(peak_running, running, driver.num_running)
            peak_pages = max(peak_pages, pages, plane.held_pages)
            timeline.observe(outcome, runner.now)
            for key in outcome.finished:
                result = driver.take(key)
                generated_tokens += len(result.tokens)
                prefix_tokens += result.prefix_tokens
                timeline.forget(key)
    except KeyboardInterrupt as stopped:
        stopped.add_note(
            f"{driver.counters.finished} requests were finished, {driver.num_running} ran and {driver.num_waiting} "
            f"waited after {runner.now:.1f} simulated seconds and {driver.counters.steps} steps; there is no "
            f"report of a part"
        )
        raise
    return Report(
        finished=driver.counters.finished,
        refused=refused,
        seconds=runner.now,
        busy_s=runner.busy_s,
        host_s=time.perf_counter() - began,
        prompt_tokens=prompt_tokens,
        prefix_tokens=None if namespace is None else prefix_tokens,
        generated_tokens=generated_tokens,
        peak_running=peak_running,
        mean_running=running_s / runner.now if runner.now else 0.0,
        usable_pages=plane.layout.usable_pages,
        peak_pages=peak_pages,
        mean_pages=pages_s / runner.now if runner.now else 0.0,
        leaked_pages=plane.leaked_pages(),
        time_to_first_token_s=_summary(timeline.time_to_first_token_s),
        between_tokens_s=_summary(timeline.between_tokens_s),
        counters=driver.counters,
    )


def _share(part: float | int, whole: float | int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _summary(seconds: np.ndarray) -> dict[int, float]:
    if not seconds.shape[0]:
        return {}
    return dict(zip(PERCENTILES, np.percentile(seconds, PERCENTILES).tolist()))


def _percentiles(summary: dict[int, float]) -> str:
    if not summary:
        return "none"
    return ", ".join(f"{'max' if p == 100 else f'p{p}'} {1e3 * s:.1f} ms" for p, s in summary.items())
