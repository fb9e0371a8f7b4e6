"""Where a step's device time goes: the profiler's kernels, added up by name, for one compiled decode step.

    python -m benchmarks.profile_step [--directory MODULES] [--rows 16] [--context 1024] [--backend flashinfer]
                                            [--option NAME=VALUE …]

Prints microseconds a step and a layer for each kernel, their sum, and what of the step's time no kernel was running.
"""

from __future__ import annotations

import argparse
import collections
import glob
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

STEPS = 4


def events(folder: str) -> Iterator[Any]:
    """Kernels on the first GPU of a trace."""
    files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    data = jax.profiler.ProfileData.from_file(files[0])
    for plane in data.planes:
        if plane.name.startswith("/device:GPU:0"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from line.events


def kernels(folder: str) -> dict[str, tuple[int, float]]:
    """Kernel name -> (calls, seconds)."""
    found: dict[str, tuple[int, float]] = collections.defaultdict(lambda: (0, 0.0))
    for event in events(folder):
        calls, took = found[event.name]
        found[event.name] = calls + 1, took + event.duration_ns / 1e9
    return dict(found)


def intervals(folder: str) -> list[tuple[float, float]]:
    """Start and end of each kernel, in seconds of the profiler's clock."""
    return [(e.start_ns / 1e9, (e.start_ns + e.duration_ns) / 1e9) for e in events(folder)]


def profile(run, steps: int = STEPS) -> dict[str, tuple[int, float]]:
    """Kernels of `steps` queued calls of `run`, which returns what to wait for."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(steps)])
        return kernels(folder)


def table(found: dict[str, tuple[int, float]], steps: int, step_s: float, layers: int) -> str:
    """Lines of the report, largest share first."""
    rows = sorted(found.items(), key=lambda item: -item[1][1])
    total = sum(took for _, took in found.values()) / steps
    lines = [f"{'µs a step':>10} {'calls':>6} {'µs a call':>10}  kernel"]
    for name, (calls, took) in rows[:40]:
        each, mean = took / steps * 1e6, took / calls * 1e6
        lines.append(f"{each:10.1f} {calls / steps:6.1f} {mean:10.2f}  {name[:100]}")
    lines.append(
        f"{total * 1e6:10.1f} in kernels, of {step_s * 1e6:.1f} µs a step: {(step_s - total) * 1e6:.1f} µs "
        f"({(step_s - total) * 1e6 / layers:.1f} a layer) without one"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    from benchmarks.decode_step import LLAMA_8B, DecodeStep, llama_config
    from paged import get_backend
    from paged.models import random_decoder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--backend", default="flashinfer")
    parser.add_argument("--option", action="append", default=[])
    args = parser.parse_args()
    options = dict(pair.split("=", 1) for pair in args.option)
    if args.directory:
        options["directory"] = args.directory
    config = llama_config(LLAMA_8B, num_layers=args.layers)
    model = random_decoder(config, jax.random.key(0), "bfloat16")
    case = DecodeStep(model, get_backend(args.backend, **options), args.rows, args.context)
    measured = case.time()
    print(table(profile(case.step), STEPS, measured[0], args.layers))


if __name__ == "__main__":
    main()
