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

    - `family`: the generator's name. `problem`: the inputs; of a trace, those of all its steps.
    - `predicted`: smallest and largest word (t, h, e) of the answer where the family predicts it, else None. They
      differ only where a quotient lies on a rounding tie.
    - `facts`: see `Facts`. `explain`: data for diagnoses.
    """

    family: str
    problem: MoveProblem | AttendProblem | Trace
    predicted: tuple[np.ndarray, np.ndarray] | None = None
    facts: Facts = Facts()
    explain: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """What happens to pages between two steps, as rows of the pool over all layers.

    `kind` is `write` (the host puts `keys`, `values` there: what a freed page holds), `scrub`, or `copy_pages` from
    `source` to `rows`.
    """

    kind: str
    rows: np.ndarray
    source: np.ndarray | None = None
    keys: np.ndarray | None = None
    values: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceStep:
    """One step: what happens before it, then every layer's append and attention, in order.

    - `layers`: one vector a layer; its problem's pool is what all layers hold after that layer's append.
    - `tokens`: for each token but padding a name of what it is: equal names are equal tokens after equal prefixes.
    """

    text: str
    operations: tuple[Operation, ...]
    layers: tuple[Vector, ...]
    tokens: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Steps over one pool; `keys`, `values` are its words before the first."""

    dtype: str
    kv_dtype: str
    num_layers: int
    num_pages: int
    keys: np.ndarray
    values: np.ndarray
    steps: tuple[TraceStep, ...]
