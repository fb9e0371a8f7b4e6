"""Cost of `Driver.step`, all that the host does in a step beside packing its inputs, with a runner that does nothing.

    python benchmarks/driver.py [--steps N] [--json FILE]

Every row decodes, contexts spread evenly over 256 .. 768 tokens, pages of 16 tokens, shapes padded by `ShapeLadders`.
Time is this thread's CPU time; three passes over fresh drivers, the median step of each, the middle one reported with
the spread. `step` is planning, `prepare`, dispatch, retirement and commit together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from paged import StorageLayout
from paged.control import ControlPlane, Driver, ShapeLadders, Step

PAGE, PASSES, LONGEST = 16, 3, 768
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


def measure(rows: int, depth: int, steps: int) -> dict[str, float]:
    """Microseconds of CPU time a step, and the spread of its passes."""
    passes = []
    for _ in range(PASSES):
        driver = make(rows, depth, steps)
        times = []
        for _ in range(steps):
            start = time.thread_time()
            outcome = driver.step()
            times.append(time.thread_time() - start)
            assert outcome is not None
            assert len(outcome.batch) == rows
        assert driver.counters.preemptions == 0
        passes.append(statistics.median(times) * 1e6)
    middle, low, high = (round(f(passes), 1) for f in (statistics.median, min, max))
    return {"rows": rows, "depth": depth, "step_us": middle, "low_us": low, "high_us": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps a pass (default 200)")
    parser.add_argument("--json", help="write the figures here, too")
    options = parser.parse_args()
    results = []
    print("depth  rows  step µs  (lowest .. highest pass)")
    for depth in (1, 2):
        for rows in ROWS:
            results.append(measure(rows, depth, options.steps))
            print("{depth:5}  {rows:4}  {step_us:7}  ({low_us} .. {high_us})".format(**results[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
