"""What passes between the catalogue, the generators, the runner and the judge.

All element arrays are *words*: the bits of the elements as unsigned integers (uint8, uint16, uint32), because numpy
cannot name bfloat16 or fp8 and a bit-for-bit judgement has no use for values that were converted on the way.
`conformance.formats` turns words into float64 and back with one rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged.common import AttentionSpec, PageTable

LEVELS = ("move", "core", "sharded", "serving", "long")
DEVICE = "device"
"""Detail of a result that names the device on which it was made; a certificate has it in every row."""
STATUSES = ("pass", "fail", "error", "not-claimed", "waived")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One entry of the catalogue: a generator's name and parameters, not arrays.

    - `id`: slash-separated, unique; also the seed of the counter-based generator behind its inputs.
    - `tier` 1 movement, 2 exact vectors, 3 certified rounding, 4 a backend against itself; 0 for refusals and
      structural checks (compiled program, addresses).
    - `level`: see `LEVELS`; `quick`: member of the stratified tenth.
    - `generator`: a name from the closed list of `conformance.vectors.GENERATORS`.
    - `params`: its bounded, JSON-able parameters.
    - `needs`: demands on the declaration; one that is not declared makes the case `not-claimed`. The vocabulary:
      `dtype:D`, `kv_dtype:D`, `page:N`, `head_dim:N`, `group:N`, `promise:P`, `regime:R`, `max_page_id:N` (after the
      layer offset), `pool_bytes:N` (of one array of one layer times the layers), or a bare feature of
      `paged.common.capabilities.FEATURES`.
    - `clause`: clauses of docs/semantics.md that it tests.
    - `flags`: hint name -> what a failure of this shape means.
    - `kills`: names of the mutants that this case must catch.
    - `inputs`, `expected`: `sha256:…` of the generated words and of the predicted ones; None if nothing is predicted.
    """

    id: str
    tier: int
    level: str
    quick: bool = False
    generator: str
    params: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    clause: tuple[str, ...]
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kills: tuple[str, ...] = ()
    inputs: str | None = None
    expected: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MoveProblem:
    """Tier 1: a pool before, one operation, the pool after. Arrays are words over all layers.

    `operation` is `append`, `scrub` or `copy_pages`. For append, `slots` are layer-relative with −1 = padding, `layer`
    is the layer appended to, and `new_keys`, `new_values` (t, k, d) are the tokens; `table` is the step whose write
    slots these are, or None where the slots belong to no table. For scrub, `pages` (n,) are rows of the pool; for
    copy_pages, `source` and `target` (n,) are. Sentinel rows are compared to nothing.
    """

    operation: str
    dtype: str
    num_layers: int
    num_pages: int
    keys: np.ndarray
    values: np.ndarray
    expected_keys: np.ndarray
    expected_values: np.ndarray
    layer: int = 0
    new_keys: np.ndarray | None = None
    new_values: np.ndarray | None = None
    slots: np.ndarray | None = None
    table: PageTable | None = None
    pages: np.ndarray | None = None
    source: np.ndarray | None = None
    target: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttendProblem:
    """One attend call over a pool that already holds what append would have written.

    - `query` words (t, h, d) of `dtype`; `keys`, `values` words (layers × pages, s, k, d) of `kv_dtype`.
    - `table`: the step, padded or not. `layer`: the layer attended to; the other layers hold poison.
    - `sinks` float32 (h,), `key_scale`, `value_scale` Python floats or None.
    """

    dtype: str
    kv_dtype: str
    table: PageTable
    spec: AttentionSpec
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    num_layers: int = 1
    layer: int = 0
    sinks: np.ndarray | None = None
    key_scale: float | None = None
    value_scale: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttendExpected:
    """What the judge demands of an attend call, as closed ranges on the grid of the output's dtype.

    - `low`, `high` words (t, h, e): equal where the element is decided, and then the bits are demanded; otherwise the
      output must lie in the range.
    - `lse_low`, `lse_high` float64 (t, h), or None where the LSE is not judged.
    - `exact`, `deviation` float64 (t, h, e): the exact answer and the standard deviation expected of an honest
      kernel's error, or None where no such statistic is judged.
    - `explain`: data for a diagnosis, e.g. the address table of an address vector; see `conformance.judge`.
    """

    low: np.ndarray
    high: np.ndarray
    lse_low: np.ndarray | None = None
    lse_high: np.ndarray | None = None
    exact: np.ndarray | None = None
    deviation: np.ndarray | None = None
    explain: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Outcome of one case.

    - `status`: one of `STATUSES`. `diagnosis`: what went wrong, in a sentence a kernel author can act on.
    - `clause`: the clause found broken, for a failure.
    - `elements`, `decided`: how many output elements were judged, and how many of them had their bits demanded.
    - `output`: `sha256:…` of the output words that every conformant backend must share (decided elements), or None.
    - `details`: JSON-able facts, e.g. first wrong index, largest error over bound, RMS ratio.
    """

    id: str
    status: str
    diagnosis: str = ""
    clause: str | None = None
    elements: int = 0
    decided: int = 0
    output: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
