"""What the benchmarks share: repeated passes, a machine's description, printing, JSON and pictures."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Figures = dict[str, Any]

NAMES = {
    "capacity": "requests at once against pool budget and length, paged beside dense",
    "control": "host cost of ControlPlane.prepare a step, beside vLLM's KVCacheManager",
    "driver": "host cost of Driver.step a step, with a runner that does nothing",
    "offline": "tokens a second of a batch of prompts, beside vLLM on CPU",
    "prefix": "prefill tokens that a prefix cache avoids, two arms of one engine",
    "serving": "paged against a dense KV cache at equal budgets",
    "simulation": "a cost model fitted from a measured run; a short trace simulated and measured",
}
"""Benchmarks that `paged bench` runs, and what each measures."""


class Spread(NamedTuple):
    """Median of repeated passes, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, digits: int = 1) -> str:
        """`median (low .. high)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} .. {self.high:.{digits}f})"


def alternate(arms: dict[str, Callable[[], Any]], passes: int) -> dict[str, list[Any]]:
    """What each arm returned in each pass; the arms take turns, so that a busy machine is busy for all of them."""
    found: dict[str, list[Any]] = {name: [] for name in arms}
    for number in range(passes):
        # Every other pass starts at the other end: what drifts within a pass then favours nobody.
        for name in sorted(arms, reverse=bool(number % 2)):
            found[name].append(arms[name]())
    return found


def machine() -> dict[str, Any]:
    """Where and when this was measured. The load tells whether others were at work on the machine, too."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next((s.split(":", 1)[1].strip() for s in info.read_text().splitlines() if "model name" in s), model)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
    }


def align(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell; the first row is the heading."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths)).rstrip() for row in cells]


def add_arguments(parser: argparse.ArgumentParser, module: Any) -> None:
    """A benchmark's own options and those that all have."""
    module.add_arguments(parser)
    parser.add_argument("--passes", type=int, default=3, help="repeated passes, of which the median is told (3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", metavar="FILE", help="draw them there: .png or .svg; needs matplotlib")


def load(name: str) -> Any:
    """The module of one benchmark."""
    return importlib.import_module(f"benchmarks.{name}")


def run(name: str, module: Any, args: argparse.Namespace) -> int:
    """Measure, print, save and draw; exit status 1 if the benchmark says that a promise did not hold."""
    if args.plot and not hasattr(module, "plot"):
        print(f"{name} has no picture; leave --plot out.", file=sys.stderr)
        return 2
    if args.plot:
        try:
            import matplotlib
        except ImportError:
            print("--plot needs matplotlib: pip install 'paged[plot]'.", file=sys.stderr)
            return 2
        matplotlib.use("Agg")
    began = machine()
    try:
        figures: Figures = {"benchmark": name, "machine": began, **module.run(args)}
    except KeyboardInterrupt as stopped:
        stopped.add_note(f"the passes of {name} were not finished; no figure is told and nothing was written")
        raise
    figures["machine"]["load_after"] = machine()["load"]
    m = figures["machine"]
    print(f"{m['cpu']}, {m['cores']} cores, load {m['load']} .. {m['load_after']}, {m['date']} UTC")
    print("\n".join(module.lines(figures)))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        _draw(module, figures, args.plot)
    return 1 if figures.get("broken") else 0


def _draw(module: Any, figures: Figures, path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    module.plot(figures, axes)
    figure.savefig(path)
    pyplot.close(figure)


def main(name: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """`python -m benchmarks.NAME`, and `paged bench NAME`: parse the options, then `run`."""
    module = load(name)
    parser = argparse.ArgumentParser(
        prog=prog or f"python -m benchmarks.{name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, module)
    return run(name, module, parser.parse_args(argv))
