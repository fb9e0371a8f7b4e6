"""Keeps a page from being freed while a dispatched step may still touch it (requirement C7, scenarios H4, H9)."""

from __future__ import annotations

import numpy as np

from paged.common.checks import check_int
from paged.common.errors import InternalError, InvalidInputError


class RetirementFence:
    """Numbers dispatched steps from 1 and holds pages back until the last step that names them has retired.

    Steps retire in the order of their dispatch. A held page keeps the reference of whoever let go of it, so the
    allocator counts it as allocated; `num_pending` counts such pages apart.
    """

    def __init__(self, num_pages: int):
        self._last_step = np.zeros(num_pages, np.int64)
        self._pending = np.zeros(num_pages, np.bool_)
        self._dispatched = 0
        self._retired = 0

    @property
    def dispatched(self) -> int:
        """Number of the latest dispatched step; 0 before the first."""
        return self._dispatched

    @property
    def retired(self) -> int:
        """Number of the latest retired step; 0 before the first."""
        return self._retired

    @property
    def num_pending(self) -> int:
        """Pages that wait for a step to retire before they are freed."""
        return int(np.count_nonzero(self._pending))

    @property
    def pending(self) -> np.ndarray:
        """(num_pages,) bool: which pages wait (a copy)."""
        return self._pending.copy()

    def dispatch(self, pages: np.ndarray) -> int:
        """Number of a new step in flight, which names `pages`."""
        self._dispatched += 1
        self._last_step[pages] = self._dispatched
        return self._dispatched

    def in_flight(self, pages: np.ndarray) -> np.ndarray:
        """bool for each page: a step that names it has not retired."""
        if self._dispatched == self._retired:
            return np.zeros(pages.shape[0], np.bool_)
        return self._last_step[pages] > self._retired

    def hold(self, pages: np.ndarray) -> None:
        """Take over the last reference of pages that are in flight."""
        self._pending[pages] = True

    def retire(self, step: int) -> np.ndarray:
        """Step `step` and all before it are done; returns the pages (int32) whose reference the caller now drops.

        Raises `InvalidInputError` if the step was never dispatched or has retired before.
        """
        if self._dispatched == self._retired:
            raise InvalidInputError(
                f"retire: no step is in flight (the latest is {self._dispatched}), got step {step}."
            )
        step = check_int("retire", "step", step, minimum=self._retired + 1, maximum=self._dispatched)
        self._retired = step
        done = np.flatnonzero(self._pending)
        done = done[self._last_step[done] <= step]
        self._pending[done] = False
        return done.astype(np.int32)

    def verify(self) -> None:
        """Prove that every held page is named by a step in flight; raises `InternalError` naming the page."""
        bad = self._pending & (self._last_step <= self._retired)
        if bad.any():
            raise InternalError(f"RetirementFence: page {int(np.argmax(bad))} waits for a step that has retired.")
