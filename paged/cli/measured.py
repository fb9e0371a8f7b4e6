"""A short trace measured with a model on this machine, and simulated with the cost that was fitted to it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from paged.cli.backend import ready
from paged.cli.progress import Progress
from paged.common.errors import InvalidInputError
from paged.common.page_table import pages_for
from paged.control import ControlPlane, PrefixIndex
from paged.control.cost import CostModel
from paged.control.replay import Report, beside
from paged.control.simulate import simulate
from paged.control.trace import Arrival
from paged.engine.compile_cache import use_compile_cache
from paged.engine.measure import measure
from paged.engine.runtime import Runtime
from paged.models.checkpoint import load_model


@dataclasses.dataclass(frozen=True)
class Measured:
    """Two runs of one short trace. `samples`: steps of another pass, to which `cost` was fitted."""

    what: str
    cost: CostModel
    samples: int
    simulated: Report
    measured: Report

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "what": self.what,
            "fitted_steps": self.samples,
            "simulated": self.simulated.as_dict(),
            "measured": self.measured.as_dict(),
        }

    def cost_json(self) -> str:
        """The fitted cost, as `--cost` reads it."""
        fitted = dataclasses.asdict(self.cost)
        host_s = fitted.pop("host_s")
        return json.dumps({"coefficients": fitted, "host_s": host_s}) + "\n"

    def lines(self) -> list[str]:
        """As text."""
        return [
            f"measured: {self.what}; cost fitted to the {self.samples} steps of another pass",
            *beside({"simulated": self.simulated, "measured": self.measured}),
        ]


def measured_run(args: argparse.Namespace, trace: Sequence[Arrival], progress: Progress) -> Measured:
    """Run the trace a few times: to compile, to fit the cost, and to hold the simulation against.

    Pool, rows, budget and schedule are the simulation's; the pool has no more pages than these requests need at once.
    """
    import jax

    use_compile_cache()
    backend = ready(args.backend, args.option)
    loaded = load_model(
        args.measure,
        dtype=args.dtype,
        progress=lambda name, done, total: progress.update("loading weights", done, total, name),
    )
    lengths = [a.prompt_tokens if isinstance(a.prompt_tokens, int) else len(a.prompt_tokens) for a in trace]
    positions = loaded.config.max_positions
    tokens = [min(n + a.output_tokens, positions) for n, a in zip(lengths, trace)]
    rows = min(args.max_requests, len(trace))
    need = sum(sorted((pages_for(t, args.tokens_per_page) for t in tokens), reverse=True)[:rows])
    num_pages = min(args.num_pages, 1 + need)

    def runtime(depth: int) -> Runtime:
        return Runtime(
            loaded.model,
            backend,
            num_pages=num_pages,
            tokens_per_page=args.tokens_per_page,
            max_requests=rows,
            max_step_tokens=args.step_tokens,
            max_request_tokens=max(tokens),
            few_programs=True,
            depth=depth,
            prefix_cache=args.prefix_cache,
            fingerprint="measured",
        )

    def passed(what: str, on: Runtime, **options: Any) -> tuple[Report, list[dict[str, float]]]:
        progress.say(f"{what}: {len(trace)} requests, {sum(lengths)} tokens of prompts")
        return measure(on, trace, schedule=args.schedule, **options)

    one = runtime(1)
    passed("compiling", one, at_once=True)
    passed("warming up", one)  # other shapes come with other arrivals
    _, samples = passed("fitting", one)
    try:
        cost = CostModel.fit(samples)
    except InvalidInputError as error:
        error.add_note(
            f"the first {len(trace)} requests ran {len(samples)} steps; --measure-requests takes more of them"
        )
        raise
    if args.depth > 1:
        one = runtime(2)
        passed("warming up", one)
    real, _ = passed("measuring", one)
    plane = ControlPlane(
        one.layout,
        max_requests=rows,
        max_pages_per_request=pages_for(one.max_tokens, args.tokens_per_page),
        shapes=one.plane.shapes,
        prefixes=PrefixIndex(one.layout) if args.prefix_cache else None,
    )
    told = simulate(
        trace,
        plane,
        cost,
        max_step_tokens=args.step_tokens,
        schedule=args.schedule,
        depth=args.depth,
        can_mix=one.runner.can_mix,
        max_request_tokens=one.max_tokens,
    )
    device = jax.devices()[0]
    what = f"{args.measure} in {args.dtype} on {device.device_kind}, the first {len(trace)} requests, {num_pages} pages"
    return Measured(what, cost, len(samples), told, real)
