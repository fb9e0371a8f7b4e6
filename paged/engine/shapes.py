"""A few fixed shapes, the smallest that fits: the runtime's default padding policy."""

from __future__ import annotations

import dataclasses

from paged.common.checks import check_int
from paged.common.errors import InvalidInputError
from paged.common.page_table import PageTable
from paged.control.shapes import FixedShape


@dataclasses.dataclass(frozen=True)
class FirstFit:
    """Pads a step to the first of `ladder` that holds it; one program is compiled for each rung that is used."""

    ladder: tuple[FixedShape, ...]

    def shape_for(self, need: FixedShape) -> FixedShape:
        """The first rung that holds `need`. Raises `InvalidInputError` naming the field in which the last is short."""
        for shape in self.ladder:
            if all(getattr(need, f.name) <= getattr(shape, f.name) for f in dataclasses.fields(FixedShape)):
                return shape
        if not self.ladder:
            raise InvalidInputError("FirstFit.ladder is empty; give at least one FixedShape.")
        return self.ladder[-1].shape_for(need)

    def pad(self, table: PageTable) -> PageTable:
        """The same step at `shape_for` its size."""
        return self.shape_for(FixedShape.of(table)).pad(table)


def phase_ladder(*, max_requests: int, max_step_tokens: int, listed_pages: int, max_kv_len: int) -> FirstFit:
    """One rung for decode (one token for each request), then prefill at 16, 64, 256 … tokens up to `max_step_tokens`.

    Rows, listed pages and the length bound are the same on every rung, so at most log4(max_step_tokens / 16) + 3
    programs exist.
    """
    rows = check_int("phase_ladder", "max_requests", max_requests, minimum=1)
    most = check_int("phase_ladder", "max_step_tokens", max_step_tokens, minimum=1)
    tokens = [16]
    while tokens[-1] < most:
        tokens.append(tokens[-1] * 4)
    tokens = [t for t in tokens if t < most] + [most]
    rungs = [FixedShape(rows, rows, listed_pages, 1, max_kv_len)]
    rungs += [FixedShape(rows, t, listed_pages, min(t, max_kv_len), max_kv_len) for t in tokens]
    return FirstFit(tuple(rungs))
