"""What runs the steps that the driver plans: a device, or a clock or a fake that stands in for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from paged.common.page_table import PageTable
from paged.control.batch import Slice

RequestId = int | str
"""Names a request to its user; handles name it to the control plane."""

IN_FLIGHT = -1
"""Stands among known tokens for one that an earlier step samples and the host has not seen yet."""

FAILED = -2
"""Stands among sampled tokens where a request's logits were no numbers: there is no token, and there will be none."""


class Step(NamedTuple):
    """One step, its pages ready. Row i of `table` is `slices[i]`; further rows are padding.

    - `batch[i]`: id of the request that slice i belongs to.
    - `known[i]`: all tokens known of that request, prompt and generated, of which the slice feeds those at positions
      start .. start + num_tokens − 1. A slice that ends where they end samples the next token. The sequences go on
      growing: read them in `dispatch` and keep none. An `IN_FLIGHT` is the last of the tokens to feed, and means the
      token that this request sampled in the latest dispatched step that it was in.
    """

    batch: tuple[RequestId, ...]
    slices: list[Slice]
    known: Sequence[Sequence[int]]
    table: PageTable


@runtime_checkable
class StepRunner(Protocol):
    """Runs steps in the order of their dispatch.

    - `depth`: steps that may be dispatched before the first of them is collected. At 1 the runner is synchronous and
      never meets `IN_FLIGHT`; at 2 the host plans a step while the device runs the one before.
    - `can_mix`: whether one step may hold slices of one token beside longer ones.
    """

    @property
    def depth(self) -> int: ...

    @property
    def can_mix(self) -> bool: ...

    def scrub(self, pages: np.ndarray) -> object:
        """Overwrite these pages (int32, of every layer) with zeros, before any step that is dispatched later."""
        ...

    def copy(self, source: np.ndarray, target: np.ndarray) -> object:
        """Copy pages whole, all sources read before any target is written: after the steps that were dispatched, which
        may still write into the sources, and before any that is dispatched later."""
        ...

    def dispatch(self, step: Step) -> Any:
        """Start a step and return a ticket for it. If this raises, the step does not run."""
        ...

    def collect(self, ticket: Any) -> np.ndarray:
        """Wait for the oldest step that is not collected: (slices,) sampled token ids, int; those of slices that do not
        sample have no meaning. `FAILED` ends that request, and it alone. If this raises, the results of all steps under
        way are lost."""
        ...
