"""The driver on a clock instead of a device: how many requests a pool carries, and how long they wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from paged.control.cost import CostModel
from paged.control.driver import Driver
from paged.control.plane import ControlPlane
from paged.control.replay import PERCENTILES as PERCENTILES
from paged.control.replay import Report, replay
from paged.control.runner_protocol import Step
from paged.control.trace import Arrival


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

    def wait_until(self, when: float) -> None:
        """The host has nothing to do before `when`."""
        self.now = max(self.now, when)


def simulate(
    trace: Iterable[Arrival],
    plane: ControlPlane,
    cost: CostModel,
    *,
    max_step_tokens: int,
    schedule: str | None = None,
    depth: int = 1,
    can_mix: bool = True,
    max_request_tokens: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> Report:
    """Run a trace, in the order of its arrivals, to its end through a `Driver` on `plane`.

    - `depth`, `can_mix`: of the simulated runner. The other options are those of `Driver`.
    - `on_progress(requests that arrived)`: called now and then.

    A prompt given as a count stands for ids that no other prompt begins with. If the plane has a prefix index, all
    requests share it. Raises what `Driver` raises. Ctrl-C gets a note that says how far the run was.
    """
    runner = SimulatedRunner(cost, depth=depth, can_mix=can_mix)
    driver = Driver(
        plane, runner, max_step_tokens=max_step_tokens, schedule=schedule, max_request_tokens=max_request_tokens
    )
    return replay(trace, driver, runner, on_progress=on_progress)
