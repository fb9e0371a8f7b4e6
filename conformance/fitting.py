"""Faults that are a number off by a factor: which scale, or which soft cap, would have returned this output?

Asked after `conformance.hypotheses` has found no known fault. The LSE tells the factor best, since it is float32 even
where the output is not; without one, the output tells it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from conformance.case import AttendProblem
from conformance.formats import decode, format_of
from conformance.oracle import attend

if TYPE_CHECKING:
    from conformance.hypotheses import Hypothesis

GRID = np.exp2(np.linspace(-3.0, 3.0, 25))
REFINEMENTS = 30
EXPLAINED = 0.8
"""Share of the wrong elements that a fitted answer must reproduce to a few units in the last place."""
GAIN = 0.1
"""Share of the right answer's distance that a fitted answer may still have."""


def fitted(problem: AttendProblem, output: np.ndarray, lse: np.ndarray | None, struck: np.ndarray) -> Hypothesis | None:
    """A factor on the scale or on the soft cap that explains what the heads `struck` (t, h) returned, or None."""
    from conformance.hypotheses import Hypothesis

    only = np.flatnonzero(struck.any(1))[:6].tolist()
    spec, used = problem.spec, struck[only]
    got = decode(output[only], problem.dtype)[used]

    def altered(name: str, factor: float) -> AttendProblem:
        return dataclasses.replace(problem, spec=dataclasses.replace(spec, **{name: getattr(spec, name) * factor}))

    def distance(name: str) -> Callable[[float], float]:
        def at(factor: float) -> float:
            answer = attend(altered(name, factor), only=only)
            with np.errstate(all="ignore"):
                if lse is not None:
                    off = np.abs(answer.lse[only][used] - lse[only][used])
                else:
                    off = np.abs(answer.output[only][used] - got) / (np.abs(got) + 1e-30)
            return float(np.mean(np.minimum(np.nan_to_num(off, nan=1e6), 1e6)))

        return at

    for name, clause, what in (("soft_cap", "attend.5", "soft cap"), ("scale", "attend.2", "scale")):
        if getattr(spec, name) is None:
            continue
        measure = distance(name)
        right = measure(1.0)
        factor, left = _least(measure)
        if right == 0 or left > GAIN * right or abs(factor - 1) < 1e-4:
            continue
        if not _reproduces(problem, altered(name, factor), output, struck, only):
            continue
        value = getattr(spec, name)
        text = f"The output is that of a {what} of {value * factor:.6g} instead of {value:.6g}, {factor:.5g} times it."
        return Hypothesis(f"fitted-{name}", clause, text, altered(name, factor))
    return None


def _reproduces(
    problem: AttendProblem, other: AttendProblem, output: np.ndarray, struck: np.ndarray, only: list[int]
) -> bool:
    """Whether the output of the struck heads lies as much closer to the fitted answer as the LSE does, if it is off."""
    got, used = decode(output[only], problem.dtype)[struck[only]], struck[only]
    right, answer = (attend(p, only=only).output[only][used] for p in (problem, other))
    near = max(4 * format_of(problem.dtype).unit_roundoff, 2.0**-14)
    off = [np.abs(x - got) / (np.abs(got) + np.abs(x) + 1e-30) for x in (right, answer)]
    wrong = off[0] > near
    return not wrong.any() or float((off[1] <= near)[wrong].mean()) > EXPLAINED


def _least(measure: Callable[[float], float]) -> tuple[float, float]:
    """The factor with the least distance, and that distance: a grid, then golden sections around its best point."""
    values = [measure(float(f)) for f in GRID]
    at = int(np.argmin(values))
    low, high = GRID[max(at - 1, 0)], GRID[min(at + 1, len(GRID) - 1)]
    best = float(GRID[at]), values[at]
    for _ in range(REFINEMENTS):
        third = (high - low) / 3
        pair = [float(low + third), float(high - third)]
        found = [measure(f) for f in pair]
        k = int(found[1] < found[0])
        if found[k] < best[1]:
            best = pair[k], found[k]
        low, high = (low + third, high) if k else (low, high - third)
    return best
