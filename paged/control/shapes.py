"""Static shapes that steps are padded to, so that few programs are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from paged.common.checks import INT32_LIMIT, check_int
from paged.common.errors import InvalidInputError
from paged.common.page_table import MAX_ENTRIES, PageTable, pages_for

_TOPS = dict.fromkeys(("rows", "tokens", "listed_pages"), MAX_ENTRIES) | dict.fromkeys(
    ("max_query_len", "max_kv_len"), INT32_LIMIT - 1
)


@dataclasses.dataclass(frozen=True)
class FixedShape:
    """Shape of one compiled program; also the policy that pads every step to it.

    - `rows`, `tokens`, `listed_pages`: lengths of the arrays.
    - `max_query_len`, `max_kv_len`: static bounds on every row, in tokens.
    """

    rows: int
    tokens: int
    listed_pages: int
    max_query_len: int
    max_kv_len: int

    def __post_init__(self) -> None:
        for field, top in _TOPS.items():
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value <= top:  # made in every step: the full check only where needed
                object.__setattr__(self, field, check_int("FixedShape", field, value, minimum=0, maximum=top))

    @classmethod
    def of(cls, table: PageTable) -> FixedShape:
        """The smallest shape that holds a table's rows, tokens and pages."""
        listed = int(table.page_offsets[-1])
        return cls(table.num_rows, table.num_tokens, listed, table.max_query_len, table.max_kv_len)

    def shape_for(self, need: FixedShape) -> FixedShape:
        """This shape; raises `InvalidInputError` naming the field in which `need` exceeds it."""
        for field in _TOPS:
            if getattr(need, field) > getattr(self, field):
                raise InvalidInputError(
                    f"FixedShape.{field} is {getattr(self, field)}, the step needs {getattr(need, field)}. "
                    f"Schedule a smaller step or build a larger shape."
                )
        return self

    def pad(self, table: PageTable) -> PageTable:
        """The same step at this shape: empty rows, tokens that write nothing, pages naming the sentinel."""
        self.shape_for(FixedShape.of(table))
        return table.pad(
            rows=self.rows,
            tokens=self.tokens,
            listed_pages=self.listed_pages,
            max_query_len=self.max_query_len,
            max_kv_len=self.max_kv_len,
        )


@dataclasses.dataclass(frozen=True)
class PinnedShapes:
    """One shape for steps that feed prompts and one for steps that decode, whatever their sizes.

    A driver over a plane with pinned shapes keeps the phases apart and takes each step's shape from its phase, so that
    every token of a request is computed by the same program wherever and beside whom it runs (requirement R6).
    """

    prefill: FixedShape
    decode: FixedShape

    @classmethod
    def of(cls, *, tokens_per_page: int, max_rows: int, max_tokens: int, max_kv_len: int) -> PinnedShapes:
        """The shapes that hold the largest steps."""
        listed = max_rows * pages_for(max_kv_len, tokens_per_page)
        return cls(
            FixedShape(max_rows, max_tokens, listed, min(max_tokens, max_kv_len), max_kv_len),
            FixedShape(max_rows, max_rows, listed, 1, max_kv_len),
        )

    def shape_for(self, need: FixedShape) -> FixedShape:
        """By size, for those who do not say the phase; raises `InvalidInputError` for a step that is too large."""
        decodes = need.max_query_len <= 1 and need.tokens <= need.rows
        return (self.decode if decodes else self.prefill).shape_for(need)

    def pad(self, table: PageTable) -> PageTable:
        """The table padded to `shape_for` its size."""
        return self.shape_for(FixedShape.of(table)).pad(table)

    def rungs(self) -> Iterator[FixedShape]:
        """Both shapes."""
        return iter((self.decode, self.prefill))


@runtime_checkable
class Shapes(Protocol):
    """A padding policy: `FixedShape`, `PinnedShapes` or `ShapeLadders`."""

    def shape_for(self, need: FixedShape) -> FixedShape:
        """The shape to pad a step of this size to; raises `InvalidInputError` if there is none."""
        ...

    def pad(self, table: PageTable) -> PageTable:
        """The table padded to `shape_for` its size."""
        ...
