"""Cost of `Driver.step`, all that the host does in a step beside packing its inputs, with a runner that does nothing.

Every row decodes, contexts spread evenly over 256 .. 768 tokens, pages of 16 tokens, shapes padded by `ShapeLadders`.
Time is this thread's CPU time; each pass is the median of its steps over a fresh driver. `step` is planning, `prepare`,
dispatch, retirement and commit together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.harness import Figures, Spread, align, main
from paged import StorageLayout
from paged.control import ControlPlane, Driver, ShapeLadders, Step

PAGE, LONGEST = 16, 768
ROWS = (16, 64, 256, 1024)


class NoDevice:
    """A `StepRunner` that samples zeros."""

    can_mix = True

    def __init__(self, depth: int):
        self.depth = depth

    def scrub(self, pages: np.ndarray) -> None:
        """Nothing to scrub."""

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Nothing to copy."""

    def dispatch(self, step: Step) -> int:
        return len(step.slices)

    def collect(self, ticket: int) -> np.ndarray:
        return np.zeros(ticket, np.int32)


def make(rows: int, depth: int, steps: int) -> Driver:
    """A driver in which `rows` requests decode, with more than `steps` tokens to go each."""
    wide = -(-(LONGEST + steps + 64) // PAGE)
    layout = StorageLayout(
        num_layers=1,
        num_pages=rows * (wide + 1) + 1,
        tokens_per_page=PAGE,
        num_kv_heads=1,
        head_dim=64,
        dtype="bfloat16",
    )
    budget = max(2048, rows)
    shapes = ShapeLadders(tokens_per_page=PAGE, max_rows=rows, max_tokens=budget, max_kv_len=wide * PAGE)
    plane = ControlPlane(layout, max_requests=rows, max_pages_per_request=wide, shapes=shapes)
    driver = Driver(plane, NoDevice(depth), max_step_tokens=budget)
    for length in np.linspace(LONGEST // 3, LONGEST, rows).astype(int).tolist():
        driver.submit(np.ones(length, np.int32), wide * PAGE - length)
    decoding = -1
    while driver.num_waiting or driver.counters.decode_tokens - decoding < rows:
        decoding = driver.counters.decode_tokens
        driver.step()
    return driver


def one_pass(rows: int, depth: int, steps: int) -> float:
    """Microseconds of CPU time of a step, median over `steps` of them."""
    driver = make(rows, depth, steps)
    times = []
    for _ in range(steps):
        start = time.thread_time()
        outcome = driver.step()
        times.append(time.thread_time() - start)
        assert outcome is not None
        assert len(outcome.batch) == rows
    assert driver.counters.preemptions == 0
    return statistics.median(times) * 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=200, help="steps a pass (200)")


def run(args: argparse.Namespace) -> Figures:
    """Measure every depth and batch size."""
    found = []
    for depth in (1, 2):
        for rows in ROWS:
            passes = Spread.of(one_pass(rows, depth, args.steps) for _ in range(args.passes))
            found.append({"depth": depth, "rows": rows, "step_us": passes._asdict()})
    return {"steps": args.steps, "passes": args.passes, "rows": found}


def lines(figures: Figures) -> list[str]:
    """A table by depth and batch size."""
    cells = [[row["depth"], row["rows"], Spread(**row["step_us"]).text()] for row in figures["rows"]]
    return align([["depth", "rows", "step µs"], *cells])


def plot(figures: Figures, axes: Any) -> None:
    """Microseconds of a step over decoding requests, both scales logarithmic."""
    for depth in (1, 2):
        rows = [row for row in figures["rows"] if row["depth"] == depth]
        axes.plot([r["rows"] for r in rows], [r["step_us"]["median"] for r in rows], marker="o", label=f"depth {depth}")
    axes.set(xscale="log", yscale="log", xlabel="decoding requests", ylabel="µs of CPU time a step")
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(main("driver"))
