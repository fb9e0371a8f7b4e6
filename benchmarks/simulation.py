"""A cost model fitted from a measured run, and a short trace simulated with it beside the same trace measured.

1. The trace `mixed24` runs on a real model, one step at a time; what each step was made of and how long it took are the
   samples of the fit. `--write-cost FILE` keeps it for `paged simulate --cost FILE`.
2. The trace `short32`, whose requests arrive by the clock, runs through the simulator with that cost, and measured
   through the engine: same driver, same pool, same budget of a step, same shapes.

The first tells how fast this machine is; that the second column is near the first is what is checked here. Both passes
are warm. The model is linear in tokens and rows, while steps are padded to a few shapes: what it cannot know is which
shape a step was padded to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.harness import Figures, Spread, align, main
from paged.common.page_table import pages_for
from paged.control import ControlPlane
from paged.control.cost import CostModel
from paged.control.simulate import PERCENTILES, simulate

SLOTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    workload.add_model_argument(parser)
    parser.add_argument("--write-cost", metavar="FILE", help="write the fitted coefficients there, for paged simulate")


def run(args: argparse.Namespace) -> Figures:
    """Fit, simulate, measure."""
    model, budgets = workload.load_weights(args.model), workload.budgets()
    slot_tokens, size, rows = budgets["slot_tokens"], budgets["tokens_per_page"], budgets["max_requests"]
    arm = workload.PagedArm(
        model,
        pages=SLOTS * slot_tokens // size,
        max_requests=rows,
        max_request_tokens=slot_tokens,
        max_step_tokens=budgets["max_step_tokens"],
        tokens_per_page=size,
        depth=1,
        backend=workload.backend_of(args),
    )
    samples: list[dict[str, float]] = []
    for name in ("mixed24", "short32"):  # every shape of either trace is compiled before anything is measured
        trace = workload.load_trace(name)
        arm.run(trace, workload.prompts_of(trace, model.config.vocab_size))
    trace = workload.load_trace("mixed24")
    prompts = workload.prompts_of(trace, model.config.vocab_size)
    for _ in range(args.passes):
        samples += arm.run(trace, prompts, record=True).samples
    cost = CostModel.fit(samples)
    if args.write_cost:
        text = {key: value for key, value in dataclasses.asdict(cost).items() if key != "host_s"}
        Path(args.write_cost).write_text(json.dumps({"coefficients": text}, indent=1) + "\n", encoding="utf-8")

    trace = workload.load_trace("short32")
    plane = ControlPlane(
        arm.layout, max_requests=rows, max_pages_per_request=pages_for(slot_tokens, size), shapes=arm.shapes
    )
    told = simulate(trace, plane, cost, max_step_tokens=budgets["max_step_tokens"])
    prompts = workload.prompts_of(trace, model.config.vocab_size)
    passes = [arm.run(trace, prompts) for _ in range(args.passes)]
    return {
        "model": args.model,
        "samples": len(samples),
        "cost": dataclasses.asdict(cost),
        "simulated": {
            "seconds": told.seconds,
            "tokens_per_s": told.generated_tokens / told.seconds,
            "mean_running": told.mean_running,
            "steps": told.counters.steps,
            "preemptions": told.counters.preemptions,
            "leaked": told.leaked_pages,
            "first_token_ms": {f"p{p}": 1e3 * s for p, s in told.time_to_first_token_s.items()},
            "between_tokens_ms": {f"p{p}": 1e3 * s for p, s in told.between_tokens_s.items()},
        },
        "measured": [
            {
                "seconds": p.seconds,
                "tokens_per_s": p.tokens_per_s,
                "mean_running": p.mean_running,
                "steps": p.steps,
                "preemptions": p.preemptions,
                "leaked": p.leaked,
                "first_token_ms": workload.milliseconds(p.first_token_s, *PERCENTILES),
                "between_tokens_ms": workload.milliseconds(p.between_tokens_s, *PERCENTILES),
            }
            for p in passes
        ],
        "broken": ["leaked"] * bool(told.leaked_pages or max(p.leaked for p in passes)),
    }


def lines(figures: Figures) -> list[str]:
    """The fit, then simulated beside measured."""
    cost = figures["cost"]
    cells: list[list[object]] = [["", "simulated", "measured (lowest .. highest pass)"]]
    simulated, measured = figures["simulated"], figures["measured"]

    def row(label: str, digits: int, *keys: str) -> None:
        def value(of: Any) -> float:
            for key in keys:
                of = of[key]
            return of

        cells.append([label, f"{value(simulated):.{digits}f}", Spread.of(map(value, measured)).text(digits)])

    row("seconds", 2, "seconds")
    row("generated tokens/s", 1, "tokens_per_s")
    row("requests at once, mean", 1, "mean_running")
    row("steps", 0, "steps")
    row("preemptions", 0, "preemptions")
    for key, label in (("first_token_ms", "first token"), ("between_tokens_ms", "between tokens")):
        for p in PERCENTILES[:3]:
            row(f"{label} p{p} ms", 1, key, f"p{p}")
    fitted = ", ".join(f"{name[:-2]} {1e6 * value:.3g} µs" for name, value in cost.items() if name != "host_s")
    return [f"fitted from {figures['samples']} steps: {fitted}", *align(cells)]


if __name__ == "__main__":
    raise SystemExit(main("simulation"))
