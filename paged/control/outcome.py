"""A step while it is under way, and what it came to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paged.common.page_table import PageTable
from paged.control.runner_protocol import RequestId
from paged.control.running import Plan


class StepOutcome(NamedTuple):
    """What one step did, request by request.

    - `batch`: ids of the requests that took part.
    - `query_lens`, `cached` (batch,) int32: tokens that each fed, and tokens that it had in the cache before.
    - `tokens` (batch,) int32: the token that each sampled and keeps; −1 where a prompt goes on or the request is gone.
    - `finished`: ids of the requests that finished with it, failed ones included; their results are in
      `Driver.finished`.
    - `number`: of the step, counted by the plane from 0.
    """

    batch: tuple[RequestId, ...]
    query_lens: np.ndarray
    cached: np.ndarray
    tokens: np.ndarray
    finished: tuple[RequestId, ...]
    number: int = 0


class Flight(NamedTuple):
    """A step under way: its number at the plane, and which of its slices sample."""

    number: int
    ticket: Any
    plan: Plan
    samples: Sequence[bool]
    table: PageTable
