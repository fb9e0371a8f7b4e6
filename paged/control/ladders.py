"""Power-of-two ladders: few static shapes for steps of any size (requirement C4)."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

from paged.common.checks import check_int
from paged.common.errors import InvalidInputError
from paged.common.page_table import PageTable, pages_for
from paged.control.shapes import FixedShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeLadders:
    """Pads rows, tokens and the longest KV length of a step, each to its own ladder.

    A ladder is the powers of two from its `min_` up, ended by its `max_` itself. The page list is as wide as the rows'
    rung times the pages of the KV rung. A step in which every row decodes has as many tokens as rows and query length
    1; in any other step one row may bring all tokens, so the query length's bound is the tokens' rung.

    The lower ends are floors: tiny shapes cost as much as small ones, and kernels may pick another order of summation
    for them (scenario B3). Shapes depend on nothing but the sizes of a step, so equal steps run equal programs.

    - `wide_mixed`: steps that are no decode steps have the top rung of rows, whatever their own number: fewer programs,
      for a little more work on logits that nobody wants.

    A minimum above its maximum leaves one rung, the maximum. Raises `InvalidInputError` if a size is below 1.
    """

    tokens_per_page: int
    max_rows: int
    max_tokens: int
    max_kv_len: int
    min_rows: int = 8
    min_tokens: int = 64
    min_kv_len: int = 512
    wide_mixed: bool = False
    rows: tuple[int, ...] = dataclasses.field(init=False)
    tokens: tuple[int, ...] = dataclasses.field(init=False)
    kv_lens: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        check_int("ShapeLadders", "tokens_per_page", self.tokens_per_page, minimum=1)
        for ladder, name in (("rows", "rows"), ("tokens", "tokens"), ("kv_lens", "kv_len")):
            top = check_int("ShapeLadders", f"max_{name}", getattr(self, f"max_{name}"), minimum=1)
            low = check_int("ShapeLadders", f"min_{name}", getattr(self, f"min_{name}"), minimum=1)
            object.__setattr__(self, ladder, _ladder(low, top))
        _ = self._mixed(self.rows[-1], self.tokens[-1], self.kv_lens[-1])

    def shape_for(self, need: FixedShape) -> FixedShape:
        """The smallest rung that holds a step; raises `InvalidInputError` naming the ladder that ends below it."""
        rows, kv_len = self._climb("rows", need.rows), self._climb("kv_lens", need.max_kv_len)
        if need.max_query_len <= 1 and need.tokens <= need.rows:
            return self._decode(rows, kv_len)
        return self._mixed(self.rows[-1] if self.wide_mixed else rows, self._climb("tokens", need.tokens), kv_len)

    def pad(self, table: PageTable) -> PageTable:
        """The table padded to `shape_for` its size."""
        return self.shape_for(FixedShape.of(table)).pad(table)

    def rungs(self) -> Iterator[FixedShape]:
        """Every shape that `shape_for` can give, once: what a warm-up compiles."""
        for low_rows, rows in zip((0, *self.rows), self.rows):
            for kv_len in self.kv_lens:
                yield self._decode(rows, kv_len)
                if self.wide_mixed:
                    if rows < self.rows[-1]:
                        continue
                    low_rows = 0
                for low_tokens, tokens in zip((0, *self.tokens), self.tokens):
                    # A step that is no decode step has more tokens than rows, and no row has more than kv_len.
                    if tokens >= low_rows + 2 and low_tokens < rows * kv_len and kv_len > 1:
                        yield self._mixed(rows, tokens, kv_len)

    def _climb(self, ladder: str, need: int) -> int:
        steps: tuple[int, ...] = getattr(self, ladder)
        at = bisect.bisect_left(steps, need)
        if at == len(steps):
            raise InvalidInputError(
                f"ShapeLadders.{ladder} ends at {steps[-1]}, the step needs {need}. Schedule a smaller step."
            )
        return steps[at]

    def _decode(self, rows: int, kv_len: int) -> FixedShape:
        return FixedShape(rows, rows, rows * pages_for(kv_len, self.tokens_per_page), 1, kv_len)

    def _mixed(self, rows: int, tokens: int, kv_len: int) -> FixedShape:
        listed = rows * pages_for(kv_len, self.tokens_per_page)
        return FixedShape(rows, tokens, listed, min(tokens, kv_len), kv_len)


def _ladder(low: int, top: int) -> tuple[int, ...]:
    """Powers of two from the first at or above `low` while below `top`, then `top`."""
    first = 1 << (min(low, top) - 1).bit_length()
    powers = []
    while first < top:
        powers.append(first)
        first *= 2
    return (*powers, top)
