"""Steps by slices: reserved and packed first, then run or given up, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paged.common.checks import refuse_rows
from paged.common.errors import InvalidInputError, UnsupportedError
from paged.common.page_table import PageTable
from paged.control import ControlPlane, FixedShape, Slice
from paged.engine.runner import DeviceRunner, Packed, Token


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step whose pages are reserved and clean; run or cancel it once, before its requests' next one."""

    slices: tuple[Slice, ...]
    table: PageTable
    packed: Packed


class PreparedSteps:
    """The steps of one plane and one runner that are prepared and neither run nor cancelled.

    - `max_tokens`: positions that a request may have.
    """

    def __init__(self, plane: ControlPlane, runner: DeviceRunner, max_tokens: int):
        self._plane, self._runner, self._max_tokens = plane, runner, max_tokens
        self._prepared: set[PreparedStep] = set()

    def prepare(
        self, slices: Sequence[Slice], known: Sequence[Sequence[int] | np.ndarray], shape: FixedShape | None
    ) -> PreparedStep | None:
        """See `Runtime.prepare_step`."""
        ends = np.array([s.start + s.num_tokens for s in slices], np.int64)
        lengths = np.array([len(k) for k in known], np.int64)
        refuse_rows("Runtime", "start + num_tokens", ends, ends > lengths, "goes past the known tokens")
        refuse_rows("Runtime", "positions", ends, ends > self._max_tokens, f"exceed the {self._max_tokens} that fit")
        runner = self._runner
        if not runner.can_mix and len({s.num_tokens == 1 for s in slices}) > 1:
            raise UnsupportedError(
                f"backend {runner.program.backend.name!r} does not declare 'mixed': one step cannot hold slices of one "
                f"token and longer ones. Schedule them apart.",
                capability="mixed",
            )
        table = self._plane.prepare(slices, runner.scrub, runner.copy, shape=shape)
        if table is None:
            return None
        packed = runner.pack([s.handle for s in slices], slices, known, table)
        prepared = PreparedStep(tuple(slices), table, packed)
        self._prepared.add(prepared)
        return prepared

    def cancel(self, prepared: PreparedStep) -> None:
        """Give up a prepared step: the requests are as they were before it."""
        self._take(prepared)
        self._undo(prepared)

    def run(self, prepared: PreparedStep) -> list[Token | None]:
        """See `Runtime.run`."""
        self._take(prepared)
        number = self._plane.dispatch(prepared.table)
        try:
            return self._runner.read(self._runner.launch(prepared.packed))
        except BaseException:
            self._undo(prepared)
            raise
        finally:
            self._plane.retire(number)

    def _take(self, prepared: PreparedStep) -> None:
        if prepared not in self._prepared:
            raise InvalidInputError("this step ran or was cancelled already; prepare another one.")
        self._prepared.remove(prepared)

    def _undo(self, prepared: PreparedStep) -> None:
        """The plane counted the step's tokens as cached when it built the table; they are not."""
        for s in prepared.slices:
            self._plane.truncate(s.handle, s.start)
