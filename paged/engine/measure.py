"""A trace run on a device by the wall clock, for the cost of a step and to hold a simulation against."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from paged.common.checks import check_int
from paged.control import Driver, StepOutcome
from paged.control.cost import sample_of
from paged.control.replay import Report, replay
from paged.control.trace import Arrival
from paged.engine.runtime import Runtime
from paged.engine.trace import Overlap, StepTrace

_LONGEST_SLEEP_S = 3600.0


class WallClock:
    """Seconds since it was made; the device was busy while nobody saw it idle."""

    def __init__(self, traces: Iterable[StepTrace]):
        self._traces = traces
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._began

    @property
    def busy_s(self) -> float:
        """Of the steps' time, what the device was not known to be idle."""
        overlap = Overlap.of(self._traces)
        return overlap.total_s - overlap.idle_s

    def wait_until(self, when: float) -> None:
        """Sleep until then, or for a part of it that the operating system can take."""
        time.sleep(min(max(0.0, when - self.now), _LONGEST_SLEEP_S))


def measure(
    runtime: Runtime,
    trace: Sequence[Arrival],
    *,
    schedule: str | None = None,
    at_once: bool = False,
    seed: int = 0,
) -> tuple[Report, list[dict[str, float]]]:
    """Run a trace on a runtime whose pool nobody uses: what it came to, and what each step was made of and took.

    - `schedule`: see `Driver`. `at_once`: all requests arrive at the start, as for a first pass that only compiles.
    - `seed`: of random prompts where the trace gives counts. Where it gives ids, equal ids stay equal and others apart
      as far as the vocabulary goes.

    The samples are those of `CostModel.fit`; the host's part is in them if the runner's depth is 1. If the plane has a
    prefix index, all requests share it. Raises `InvalidInputError` if requests are open.
    """
    vocabulary = check_int("measure", "vocab_size", runtime.model.config.vocab_size, minimum=2)
    rank: dict[int, int] = {}
    rng = np.random.default_rng(seed)
    samples: list[dict[str, float]] = []

    def prompt_of(number: int, arrival: Arrival) -> np.ndarray:
        prompt = arrival.prompt_tokens
        if isinstance(prompt, int):
            return rng.integers(1, vocabulary, prompt).astype(np.int32)
        ranks = [rank.setdefault(int(token), len(rank)) for token in prompt]
        return (np.array(ranks, np.int64) % (vocabulary - 1) + 1).astype(np.int32)

    def on_step(outcome: StepOutcome, seconds: float) -> None:
        samples.append(sample_of(outcome, seconds))

    runner = runtime.runner
    driver = Driver(
        runtime.plane,
        runner,
        max_step_tokens=runtime.max_step_tokens,
        schedule=schedule,
        max_request_tokens=runtime.max_tokens,
    )
    runner.traces.clear()
    runner.rest()
    arrivals = [arrival._replace(arrival_s=0.0) for arrival in trace] if at_once else trace
    clock = WallClock(runner.traces)
    report = replay(arrivals, driver, clock, prompts=prompt_of, on_step=on_step)
    if runtime.plane.prefixes is not None:
        runtime.plane.forget_prefixes()
    return report, samples
