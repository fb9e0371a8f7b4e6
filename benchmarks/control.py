"""Cost of `ControlPlane.prepare`, the host's share of a step before the device is asked for anything (requirement C10).

    python benchmarks/control.py [--steps N] [--json FILE]

Every row decodes; contexts are spread evenly over 0.5 .. 1.5 of the one named; pages of 16 tokens. The table is padded
to one fixed shape, as in serving. Time is this thread's CPU time, so a busy machine shows as less than it would by the
wall clock; three passes over fresh planes, the median of each, the middle one reported with the spread. `slices` is
what the caller spends on making the 256 `Slice` objects, beside what `prepare` spends on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from paged import StorageLayout
from paged.control import ControlPlane, FixedShape, Handle, PrefixIndex, Slice

PAGE, PASSES = 16, 3
CASES = [(rows, 1024) for rows in (1, 8, 64, 256)] + [(256, 128), (256, 8192), (256, 21000)]


def nothing(pages: np.ndarray) -> None:
    """The scrub of a device that is not there."""


def make(rows: int, context: int, steps: int, prefixes: bool) -> tuple[ControlPlane, list[Handle]]:
    """A plane in which `rows` requests have their contexts cached and room for `steps` more tokens each."""
    wide = -(-(context * 3 // 2 + steps) // PAGE)
    layout = StorageLayout(
        num_layers=1, num_pages=rows * wide + 1, tokens_per_page=PAGE, num_kv_heads=1, head_dim=64, dtype="bfloat16"
    )
    index = PrefixIndex(layout) if prefixes else None
    plane = ControlPlane(layout, max_requests=rows, max_pages_per_request=wide, prefixes=index)
    handles = []
    for length in np.linspace(context // 2, context * 3 // 2, rows).astype(int).tolist():
        handle = plane.open()
        assert handle is not None
        assert plane.prepare([Slice(handle, 0, length)], nothing) is not None
        handles.append(handle)
    plane.shapes = FixedShape(rows, rows, rows * wide, 1, wide * PAGE)
    return plane, handles


def measure(rows: int, context: int, steps: int, *, prefixes: bool = False) -> dict[str, float]:
    """Microseconds of CPU time a step: the caller's slices, `prepare`, and the spread of its passes."""
    slicing, preparing = [], []
    for _ in range(PASSES):
        plane, handles = make(rows, context, steps, prefixes)
        made, prepared = [], []
        for _ in range(steps):
            start = time.thread_time()
            slices = [Slice(handle, plane.length(handle), 1) for handle in handles]
            middle = time.thread_time()
            assert plane.prepare(slices, nothing) is not None
            end = time.thread_time()
            made.append(middle - start)
            prepared.append(end - middle)
        slicing.append(statistics.median(made) * 1e6)
        preparing.append(statistics.median(prepared) * 1e6)
    return {
        "rows": rows,
        "context": context,
        "slices_us": round(statistics.median(slicing), 1),
        "prepare_us": round(statistics.median(preparing), 1),
        "low_us": round(min(preparing), 1),
        "high_us": round(max(preparing), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps a pass (default 200)")
    parser.add_argument("--json", help="write the figures here, too")
    options = parser.parse_args()
    results = []
    print("rows  context  slices µs  prepare µs  (lowest .. highest pass)")
    for rows, context in CASES:
        result = measure(rows, context, options.steps)
        results.append(result)
        print("{rows:4}  {context:7}  {slices_us:9}  {prepare_us:10}  ({low_us} .. {high_us})".format(**result))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
