"""Certified rounding against many simulated honest kernels: `PYTHONPATH=. python tools/honest_kernels.py 200`.

Prints for every numeric model how many kernels were tried, how many outputs were checked, how many lay outside their
certified range (each one is a fault of the bounds), the decided share, and the largest ratio of the statistic.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "conformance"))

from kernel_simulator import Kernel
from test_judge_bounds import FAMILIES, suits, verdict

from paged.common.capabilities import NUMERIC_MODELS


def main() -> int:
    """1 if a kernel was accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", type=int, nargs="?", default=200, help="kernels over all models")
    parser.add_argument("--first", type=int, default=1000, help="first seed")
    options = parser.parse_args()
    models = [name for name, model in NUMERIC_MODELS.items() if not model.exact]
    accused = 0
    for at, name in enumerate(models):
        seeds = range(options.first + at, options.first + options.kernels, len(models))
        elements = decided = alarms = 0
        ratio = 0.0
        for seed in seeds:
            kernel = Kernel.draw(seed, NUMERIC_MODELS[name])
            wrong = False
            for family in FAMILIES:
                if not suits(name, family):
                    continue
                for dtype in ("bfloat16", "float16", "float32"):
                    result = verdict(kernel, family, dtype)
                    elements, decided = elements + result.elements, decided + result.decided
                    ratio = max(ratio, result.details.get("rms_ratio", 0.0))
                    if result.status != "pass":
                        wrong = True
                        print(f"accused: {kernel} on {family} {dtype}: {result.diagnosis}")
            alarms += wrong
        accused += alarms
        share = 100 * decided / max(elements, 1)
        print(
            f"{name:7} {len(seeds):4} kernels {elements:10,} elements {share:5.1f} % decided {alarms} accused, "
            f"largest statistic {ratio:.2f}"
        )
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main())
