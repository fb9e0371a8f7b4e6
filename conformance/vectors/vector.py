"""What a generator returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.case import AttendProblem, MoveProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a family guarantees by construction, and what the bounds may use.

    - `exact_logits`: q·k has no rounding in float32, in any order.
    - `dyadic`: the differences of logits are so close to multiples of ln 2 that a 16-bit P snaps to powers of two.
    - `statistic`: the root mean square of the error is judged as well (generic inputs only).
    """

    exact_logits: bool = False
    dyadic: bool = False
    statistic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Vector:
    """A problem, and what is known of its answer before any kernel runs.

    - `family`: the generator's name. `problem`: the inputs.
    - `predicted`: smallest and largest word (t, h, e) of the answer where the family predicts it, else None. They
      differ only where a quotient lies on a rounding tie.
    - `facts`: see `Facts`. `explain`: data for diagnoses.
    """

    family: str
    problem: MoveProblem | AttendProblem
    predicted: tuple[np.ndarray, np.ndarray] | None = None
    facts: Facts = Facts()
    explain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
