"""How host and device share the time of each step."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

_KEPT = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class StepTrace:
    """One step, in seconds of the host's clock.

    - `rows`: requests in it; `rung_tokens`: tokens that its program computes, padding included.
    - `plan_s`: from the end of the host's last device call to the dispatch: scheduling, page tables, texts.
    - `dispatch_s`: the dispatch itself. `wait_s`: how long the host waited for the step's tokens.
    - `idle_s`: how long the device had nothing to run before this step, at most: 0 if an earlier step was under way
      when it was dispatched; otherwise all the time since the host last waited or dispatched, because when in it the
      device ran dry is not known.
    """

    rows: int
    rung_tokens: int
    plan_s: float
    dispatch_s: float
    idle_s: float
    wait_s: float = 0.0

    @staticmethod
    def log() -> deque[StepTrace]:
        """An empty log, which keeps the latest 65,536 steps."""
        return deque(maxlen=_KEPT)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Sums over steps, in seconds; see `StepTrace`."""

    steps: int
    plan_s: float
    dispatch_s: float
    wait_s: float
    idle_s: float

    @classmethod
    def of(cls, traces: Iterable[StepTrace]) -> Overlap:
        """The sums over these steps."""
        traces = list(traces)
        fields = ("plan_s", "dispatch_s", "wait_s", "idle_s")
        return cls(len(traces), *(sum((getattr(trace, field) for trace in traces), 0.0) for field in fields))

    @property
    def total_s(self) -> float:
        """Time of all the steps: what the host planned, dispatched and waited."""
        return self.plan_s + self.dispatch_s + self.wait_s

    @property
    def idle_share(self) -> float:
        """Share of the time in which the device waited for the host, at most; 0 without a step."""
        return self.idle_s / self.total_s if self.total_s else 0.0

    def lines(self) -> list[str]:
        """As text."""
        if not self.steps:
            return ["no step was run"]
        each = [1e6 * x / self.steps for x in (self.plan_s, self.dispatch_s, self.wait_s)]
        return [
            f"{self.steps} steps, on average: host plans {each[0]:.0f} µs, dispatches {each[1]:.0f} µs, waits for the "
            f"device {each[2]:.0f} µs",
            f"the device waited for the host at most {100 * self.idle_share:.1f} % of the time",
        ]
