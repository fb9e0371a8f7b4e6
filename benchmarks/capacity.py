"""How many requests a pool carries: concurrency against budget and length, dense beside it (requirement T5).

The driver and the control plane as they are, with a runner that does nothing: who runs at once is a matter of pages,
not of speed. For each budget, in dense slots, and each length, 64 requests of that length on average (half of it
prompt, half generated, lengths drawn evenly between 0.5 and 1.5 of it) arrive at once; counted are the steps in which
some still wait. *ideal* is the budget over three quarters of the mean length, what a request holds in the middle of its
generation; *dense* is the number of slots. With short requests the steps' budget of 512 prompt tokens and the number of
requests bound what runs at once, not the pool.

*overhead* is held slots over tokens; *memory* is how much larger the process had become at its peak, after the first
sweep over what it was then: the sweep runs twice, and its second half may allocate nothing that stays.
"""

from __future__ import annotations

import argparse
import resource
from typing import Any

import numpy as np

from benchmarks.driver import NoDevice
from benchmarks.harness import Figures, align, main
from paged import StorageLayout
from paged.control import ControlPlane, Driver

PAGE, SLOT_TOKENS, REQUESTS = 16, 1024, 64
SLOTS = (2, 4, 8)
LENGTHS = (64, 128, 256, 512, 680)


def one(slots: int, length: int) -> dict[str, Any]:
    """Run one pool and one length to the end, checking the books at every step."""
    rng = np.random.default_rng([slots, length])
    whole = rng.integers(length // 2, length * 3 // 2 + 1, REQUESTS)
    layout = StorageLayout(
        num_layers=1,
        num_pages=slots * SLOT_TOKENS // PAGE + 1,
        tokens_per_page=PAGE,
        num_kv_heads=1,
        head_dim=1,
        dtype="int8",
    )
    plane = ControlPlane(layout, max_requests=REQUESTS, max_pages_per_request=SLOT_TOKENS // PAGE)
    driver = Driver(plane, NoDevice(1), max_step_tokens=512)
    for tokens in whole.tolist():
        driver.submit(np.ones(tokens // 2, np.int32), max(1, tokens - tokens // 2))
    running, held, live, leaked = [], 0, 0, 0
    while (outcome := driver.step()) is not None:
        # While requests wait, the pool and not the trace decides how many run.
        if driver.num_waiting:
            running.append(driver.num_running)
            held += plane.held_pages * PAGE
            live += sum(plane.length(r.handle) for r in driver._requests.values() if r.handle is not None)
        leaked = max(leaked, plane.leaked_pages())
        assert outcome.batch
    plane.verify()
    return {
        "slots": slots,
        "length": length,
        "mean_running": float(np.mean(running)) if running else float(REQUESTS),
        "peak_running": max(running, default=REQUESTS),
        "waited": bool(running),
        "ideal": slots * SLOT_TOKENS / (0.75 * float(whole.mean())),
        "overhead": held / live if live else 1.0,
        "preemptions": driver.counters.preemptions,
        "recomputed": driver.counters.recomputed_tokens,
        "leaked": leaked,
        "finished": driver.counters.finished,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own: the run is deterministic, so one pass tells all."""


def run(args: argparse.Namespace) -> Figures:
    """Sweep twice: the second time shows whether memory grows."""
    rows = [one(slots, length) for slots in SLOTS for length in LENGTHS]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    again = [one(slots, length) for slots in SLOTS for length in LENGTHS]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    broken = [r for r in rows if r["leaked"] or r["finished"] != REQUESTS]
    broken += ["two equal sweeps differ"] * (rows != again)
    return {"rows": rows, "peak_memory_kib": before, "grown_kib": grown, "broken": broken}


def lines(figures: Figures) -> list[str]:
    """A table by budget and length."""
    head = ["slots", "tokens", "dense", "paged mean", "peak", "ideal", "overhead", "preempted", "recomputed", "leaked"]
    cells: list[list[object]] = [[*head]]
    for r in figures["rows"]:
        mean = f"{r['mean_running']:.1f}" if r["waited"] else f"all {REQUESTS}"
        more = [r["preemptions"], r["recomputed"], r["leaked"]]
        ideal, over = f"{r['ideal']:.1f}", f"{r['overhead']:.3f}"
        cells.append([r["slots"], r["length"], r["slots"], mean, r["peak_running"], ideal, over, *more])
    memory = (
        f"peak memory {figures['peak_memory_kib'] / 1024:.0f} MiB, {figures['grown_kib']} KiB more in a second sweep"
    )
    return [*align(cells), memory]


def plot(figures: Figures, axes: Any) -> None:
    """Requests at once over their length, a line for each budget."""
    for slots in SLOTS:
        rows = [r for r in figures["rows"] if r["slots"] == slots]
        (line,) = axes.plot([r["length"] for r in rows], [r["mean_running"] for r in rows], marker="o")
        line.set_label(f"paged, {slots} slots' budget")
        axes.axhline(slots, linestyle=":", color=line.get_color(), label=f"dense, {slots} slots")
    axes.set(xlabel="mean tokens of a request", ylabel="requests at once", yscale="log")
    axes.legend(fontsize="small")


if __name__ == "__main__":
    raise SystemExit(main("capacity"))
