"""A trace run to its end through a driver, by any clock, and what that came to."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paged.common.errors import PoolExhaustedError
from paged.common.namespace import CacheNamespace
from paged.control.counters import Counters
from paged.control.driver import Driver
from paged.control.outcome import StepOutcome
from paged.control.submission import refuse_too_long
from paged.control.timeline import Timeline
from paged.control.trace import Arrival, own_ids

PERCENTILES = (50, 90, 99, 100)

Prompts = Callable[[int, Arrival], Sequence[int] | np.ndarray]
"""prompts(number, arrival): the token ids of an arrival's prompt."""


@runtime_checkable
class Clock(Protocol):
    """Seconds since a run began: `now`, and how many of them the device was `busy_s`."""

    @property
    def now(self) -> float: ...

    @property
    def busy_s(self) -> float: ...

    def wait_until(self, when: float) -> None:
        """Nothing is to do before `when`; it may come back earlier."""
        ...


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run came to. Times are seconds of its clock, except `host_s`, which it took by the wall clock.

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
        elif (rate := _throughput(self)) is not None:
            out.append(f"throughput    {rate:.1f} generated tokens a second")
        return out


def beside(reports: Mapping[str, Report]) -> list[str]:
    """Reports by name as the columns of a table. One with preemptions has no throughput (requirement T1)."""
    rows: list[tuple[str, Callable[[Report], float | None], int]] = [
        ("seconds", lambda r: r.seconds, 2),
        ("finished", lambda r: r.finished, 0),
        ("generated tokens/s", _throughput, 1),
        ("device busy %", lambda r: 100 * r.busy_s / r.seconds if r.seconds else 0.0, 1),
        ("requests at once, mean", lambda r: r.mean_running, 1),
        ("pages held, most", lambda r: r.peak_pages, 0),
        ("pages leaked", lambda r: r.leaked_pages, 0),
        ("prompt tokens found cached", lambda r: r.prefix_tokens or 0, 0),
        ("steps", lambda r: r.counters.steps, 0),
        ("preemptions", lambda r: r.counters.preemptions, 0),
    ]
    for p in PERCENTILES:
        name = "longest" if p == 100 else f"p{p}"
        rows.append((f"first token {name}, ms", lambda r, p=p: 1e3 * r.time_to_first_token_s.get(p, 0.0), 1))
    for p in PERCENTILES:
        name = "longest" if p == 100 else f"p{p}"
        rows.append((f"between tokens {name}, ms", lambda r, p=p: 1e3 * r.between_tokens_s.get(p, 0.0), 1))
    label = max(len(row[0]) for row in rows)
    cells = [
        ["–" if (found := value(report)) is None else f"{found:.{digits}f}" for report in reports.values()]
        for _, value, digits in rows
    ]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(reports)]
    lines = [" " * label + "".join(f"  {name:>{width}}" for name, width in zip(reports, widths))]
    for (name, _, _), row in zip(rows, cells):
        lines.append(f"{name:{label}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row, widths)))
    return lines


def ids_of(number: int, arrival: Arrival) -> Sequence[int] | np.ndarray:
    """The prompt's ids; for a count, ids that no other prompt begins with."""
    prompt = arrival.prompt_tokens
    return own_ids(number, prompt) if isinstance(prompt, int) else prompt


def replay(
    trace: Iterable[Arrival],
    driver: Driver,
    clock: Clock,
    *,
    prompts: Prompts | None = None,
    on_progress: Callable[[int], object] | None = None,
    on_step: Callable[[StepOutcome, float], object] | None = None,
) -> Report:
    """Run a trace, in the order of its arrivals, to its end through a driver that is its alone.

    - `prompts`: ids of the prompts; by default see `ids_of`.
    - `on_progress(requests that arrived)`: called now and then. `on_step(outcome, seconds)`: after each step.

    If the plane has a prefix index, all requests share it. Raises what `Driver` raises. Ctrl-C gets a note that says
    how far the run was.
    """
    began, plane = time.perf_counter(), driver.plane
    prompts = ids_of if prompts is None else prompts
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
            while coming is not None and coming[1].arrival_s <= clock.now:
                number, arrival = coming
                coming = next(arrivals, None)
                try:
                    if isinstance(arrival.prompt_tokens, int):  # before there are ids of it
                        most = driver.max_request_tokens
                        refuse_too_long(plane, arrival.prompt_tokens, arrival.output_tokens, most)
                    prompt = prompts(number, arrival)
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
            before, running, pages = clock.now, driver.num_running, plane.held_pages
            outcome = driver.step()
            if outcome is None:
                if coming is None:
                    break
                clock.wait_until(coming[1].arrival_s)
                continue
            running_s += max(running, driver.num_running) * (clock.now - before)
            pages_s += max(pages, plane.held_pages) * (clock.now - before)
            peak_running = max(peak_running, running, driver.num_running)
            peak_pages = max(peak_pages, pages, plane.held_pages)
            timeline.observe(outcome, clock.now)
            if on_step is not None:
                on_step(outcome, clock.now - before)
            for key in outcome.finished:
                result = driver.take(key)
                generated_tokens += len(result.tokens)
                prefix_tokens += result.prefix_tokens
                timeline.forget(key)
    except KeyboardInterrupt as stopped:
        stopped.add_note(
            f"{driver.counters.finished} requests were finished, {driver.num_running} ran and {driver.num_waiting} "
            f"waited after {clock.now:.1f} seconds of the run's clock and {driver.counters.steps} steps; there is no "
            f"report of a part"
        )
        raise
    seconds = clock.now
    return Report(
        finished=driver.counters.finished,
        refused=refused,
        seconds=seconds,
        busy_s=clock.busy_s,
        host_s=time.perf_counter() - began,
        prompt_tokens=prompt_tokens,
        prefix_tokens=None if namespace is None else prefix_tokens,
        generated_tokens=generated_tokens,
        peak_running=peak_running,
        mean_running=running_s / seconds if seconds else 0.0,
        usable_pages=plane.layout.usable_pages,
        peak_pages=peak_pages,
        mean_pages=pages_s / seconds if seconds else 0.0,
        leaked_pages=plane.leaked_pages(),
        time_to_first_token_s=_summary(timeline.time_to_first_token_s),
        between_tokens_s=_summary(timeline.between_tokens_s),
        counters=driver.counters,
    )


def _throughput(report: Report) -> float | None:
    """Generated tokens a second, where that is what the run measured."""
    if report.counters.preemptions or not report.seconds:
        return None
    return report.generated_tokens / report.seconds


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
