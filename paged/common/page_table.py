"""One step's bookkeeping: which tokens, over which pages, written where."""

from __future__ import annotations

import dataclasses
from typing import Any, overload

import numpy as np

from paged.common import codec
from paged.common.checks import INT32_LIMIT, check_int, check_int32_vector, place, refuse_rows, show
from paged.common.errors import InvalidInputError
from paged.common.layout import SENTINEL_PAGE

_ARRAYS = ("query_offsets", "page_offsets", "page_ids", "last_page_len", "kv_lens", "write_slots")
_OWNER = "PageTable"

MAX_ENTRIES = 1 << 26
"""Tokens or listed pages of one step, so that a damaged length is refused before it is allocated."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PageTable:
    """Page table of one ragged batch, padded or not (requirement K5). All arrays are int32, copied and read-only.

    - `query_offsets` (rows + 1,): row r's tokens are query_offsets[r] .. query_offsets[r + 1]. Tokens from
      query_offsets[rows] on are padding.
    - `page_offsets` (rows + 1,): row r's pages are page_ids[page_offsets[r] : page_offsets[r + 1]].
    - `page_ids` (listed pages,): pages of one layer in the order of the row's tokens; entries from
      page_offsets[rows] on are padding and name the sentinel.
    - `last_page_len` (rows,): tokens in the row's last page, 1 .. tokens_per_page; 0 exactly for empty rows.
    - `kv_lens` (rows,): tokens after this step's append. A row has q_len ≥ 0 and kv_len ≥ q_len, or kv_len = 0.
    - `write_slots` (tokens,): page × tokens_per_page + offset within one layer; −1 = the token is not written. A token
      that is written goes to the slot of its own position in its own row's pages.
    - `max_query_len`, `max_kv_len`: static bounds, at least the largest of the rows.
    - `tokens_per_page`, `num_pages`: geometry of one layer, for validation.

    Page counts are ceil(kv_len / tokens_per_page), never the pages that a request happens to hold.
    Raises `InvalidInputError` naming the field, the row and the value.
    """

    query_offsets: np.ndarray
    page_offsets: np.ndarray
    page_ids: np.ndarray
    last_page_len: np.ndarray
    kv_lens: np.ndarray
    write_slots: np.ndarray
    max_query_len: int
    max_kv_len: int
    tokens_per_page: int
    num_pages: int

    def __post_init__(self) -> None:
        for field, minimum in (("tokens_per_page", 1), ("num_pages", 2), ("max_query_len", 0), ("max_kv_len", 0)):
            object.__setattr__(self, field, check_int(_OWNER, field, getattr(self, field), minimum=minimum))
        slots = self.num_pages * self.tokens_per_page
        if slots >= INT32_LIMIT:
            raise InvalidInputError(
                f"PageTable: num_pages × tokens_per_page must be below 2^31 (slots are int32), got {self.num_pages} × "
                f"{self.tokens_per_page} = {slots}."
            )
        for field in _ARRAYS:
            object.__setattr__(self, field, check_int32_vector(_OWNER, field, getattr(self, field)))
        if self.query_offsets.shape[0] < 1:
            raise InvalidInputError("PageTable.query_offsets must have length rows + 1, got 0.")
        rows = self.query_offsets.shape[0] - 1
        for field, length in (("page_offsets", rows + 1), ("last_page_len", rows), ("kv_lens", rows)):
            if getattr(self, field).shape[0] != length:
                raise InvalidInputError(
                    f"PageTable.{field} must have length {length} for {rows} rows, got {getattr(self, field).shape[0]}."
                )
        self._check_offsets("query_offsets", "write_slots")
        self._check_offsets("page_offsets", "page_ids")
        self._check_rows()
        self._check_pages()
        self._check_slots()

    @classmethod
    def trusted(cls, **fields: np.ndarray | int) -> PageTable:
        """A table whose fields the caller derived by rules that imply every check of the constructor, taken unchecked.

        For the two places that build a table in every step: `pad`, from a table that was checked, and the control
        plane, from its own map. Arrays must be fresh, contiguous int32; they become read-only. The tests of both
        hold such tables against the checking constructor.
        """
        table = object.__new__(cls)
        for field, value in fields.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(table, field, value)
        return table

    def _check_offsets(self, field: str, target: str) -> None:
        offsets = getattr(self, field)
        if offsets[0] != 0:
            raise InvalidInputError(f"PageTable.{field} must start at 0: row 0 has {offsets[0]}.")
        refuse_rows(_OWNER, field, offsets[1:], offsets[1:] < offsets[:-1], "must not decrease")
        entries = getattr(self, target).shape[0]
        if offsets[-1] > entries:
            raise InvalidInputError(f"PageTable.{field} ends at {offsets[-1]}, past the {entries} entries of {target}.")

    def _check_rows(self) -> None:
        query_lens, kv_lens, size = self.query_lens, self.kv_lens, self.tokens_per_page
        refuse_rows(_OWNER, "kv_lens", kv_lens, kv_lens < 0, "must not be negative")
        short = (kv_lens > 0) & (kv_lens < query_lens)
        refuse_rows(_OWNER, "kv_lens", kv_lens, short, "must be 0 or at least the row's query length")
        rule = f"must not exceed max_kv_len={self.max_kv_len}"
        refuse_rows(_OWNER, "kv_lens", kv_lens, kv_lens > self.max_kv_len, rule)
        rule = f"must give no query length above max_query_len={self.max_query_len}"
        refuse_rows(_OWNER, "query_offsets", query_lens, query_lens > self.max_query_len, rule)
        last, expected = self.last_page_len, kv_lens - size * (np.maximum(pages_for(kv_lens, size), 1) - 1)
        refuse_rows(_OWNER, "last_page_len", last, (last < 0) | (last > size), f"must be in 0..{size}")
        refuse_rows(_OWNER, "last_page_len", last, (last == 0) != (kv_lens == 0), "must be 0 exactly for empty rows")
        refuse_rows(_OWNER, "last_page_len", last, last != expected, "must agree with kv_lens")
        counts = np.diff(self.page_offsets)
        wrong = counts != pages_for(kv_lens, size)
        refuse_rows(_OWNER, "page_offsets", counts, wrong, f"must list ceil(kv_len / {size}) pages a row")

    def _check_pages(self) -> None:
        ids, used, top = self.page_ids, int(self.page_offsets[-1]), self.num_pages - 1
        # Two reductions, because a long context lists a hundred thousand pages; masks only to name an offender.
        if used and (ids[:used].min() <= SENTINEL_PAGE or ids[:used].max() > top):
            listed = np.arange(ids.shape[0]) < used
            sentinel = listed & (ids == SENTINEL_PAGE)
            rule = "must not name the sentinel page 0"
            refuse_rows(_OWNER, "page_ids", ids, sentinel, rule, "entry", self.page_offsets)
            outside = listed & ((ids < 0) | (ids > top))
            refuse_rows(_OWNER, "page_ids", ids, outside, f"must be in 1..{top}", "entry", self.page_offsets)
        if ids[used:].any():
            loose = (np.arange(ids.shape[0]) >= used) & (ids != SENTINEL_PAGE)
            refuse_rows(_OWNER, "page_ids", ids, loose, "must name page 0 in padding", "entry", self.page_offsets)

    def _check_slots(self) -> None:
        slots, size, offsets = self.write_slots, self.tokens_per_page, self.query_offsets
        limit = self.num_pages * size
        bad = (slots < -1) | (slots >= limit) | ((slots >= 0) & (slots < size))
        rule = f"must be -1 or in {size}..{limit - 1}"
        refuse_rows(_OWNER, "write_slots", slots, bad, rule, "token", offsets)
        written = np.sort(slots[slots >= 0])
        twice = written[1:] == written[:-1]
        if twice.any():
            slot = int(written[1:][twice][0])
            where = " and ".join(place(int(i), "token", offsets) for i in np.flatnonzero(slots == slot)[:2])
            raise InvalidInputError(f"PageTable.write_slots: slot {slot} is written twice, by {where}.")
        own = self._own_slots()
        refuse_rows(_OWNER, "write_slots", slots, (own < 0) & (slots >= 0), "must be -1 in padding", "token", offsets)
        wrong = (slots >= 0) & (slots != own)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise InvalidInputError(
                f"PageTable.write_slots: {place(i, 'token', offsets)} is at position {self.positions()[i]}, whose slot "
                f"is {own[i]}; got {slots[i]}. Pass that slot, or -1 if the token is not written."
            )

    def _own_slots(self) -> np.ndarray:
        """(tokens,) the slot of every token's position in its own row's pages; −1 where it has no position."""
        position, size = self.positions(), self.tokens_per_page
        out = np.full(self.num_tokens, -1, np.int64)
        live = np.flatnonzero(position >= 0)
        rows = np.repeat(np.arange(self.num_rows), self.query_lens)[live]
        page, offset = np.divmod(position[live], size)
        out[live] = self.page_ids[self.page_offsets[rows] + page].astype(np.int64) * size + offset
        return out

    @property
    def num_rows(self) -> int:
        """Rows, padding rows included."""
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens, padding included."""
        return self.write_slots.shape[0]

    @property
    def query_lens(self) -> np.ndarray:
        """(rows,) int32 new tokens of each row."""
        return np.diff(self.query_offsets)

    def pages_of(self, row: int) -> np.ndarray:
        """Page ids of one row, in token order."""
        row = check_int("PageTable.pages_of", "row", row, minimum=0, maximum=self.num_rows - 1)
        return self.page_ids[self.page_offsets[row] : self.page_offsets[row + 1]]

    def positions(self) -> np.ndarray:
        """(tokens,) int32 absolute position of every token: kv_len − q_len + i; −1 for padding and empty rows."""
        out = np.full(self.num_tokens, -1, np.int32)
        rows = np.repeat(np.arange(self.num_rows), self.query_lens)
        tokens = np.arange(rows.shape[0])
        out[: rows.shape[0]] = (self.kv_lens - self.query_offsets[1:])[rows] + tokens
        out[: rows.shape[0]][self.kv_lens[rows] == 0] = -1
        return out

    def pad(self, *, rows: int, tokens: int, listed_pages: int, max_query_len: int, max_kv_len: int) -> PageTable:
        """The same step at larger static shapes: empty rows, tokens that write nothing, pages naming the sentinel.

        Raises `InvalidInputError` that names the shape which is too small for this step.
        """
        owner, top, live = "PageTable.pad", MAX_ENTRIES, int(self.page_offsets[-1])
        rows = check_int(owner, "rows", rows, minimum=self.num_rows, maximum=top)
        tokens = check_int(owner, "tokens", tokens, minimum=self.num_tokens, maximum=top)
        listed_pages = check_int(owner, "listed_pages", listed_pages, minimum=live, maximum=top)
        return PageTable.trusted(
            query_offsets=_extend(self.query_offsets, rows + 1, int(self.query_offsets[-1])),
            page_offsets=_extend(self.page_offsets, rows + 1, live),
            page_ids=_extend(self.page_ids[:live], listed_pages, SENTINEL_PAGE),
            last_page_len=_extend(self.last_page_len, rows, 0),
            kv_lens=_extend(self.kv_lens, rows, 0),
            write_slots=_extend(self.write_slots, tokens, -1),
            max_query_len=check_int(owner, "max_query_len", max_query_len, minimum=self.max_query_len),
            max_kv_len=check_int(owner, "max_kv_len", max_kv_len, minimum=self.max_kv_len),
            tokens_per_page=self.tokens_per_page,
            num_pages=self.num_pages,
        )

    def to_bytes(self) -> bytes:
        """Versioned encoding; `from_bytes` gives an equal table."""
        names = ("max_query_len", "max_kv_len", "tokens_per_page", "num_pages")
        fields = {name: getattr(self, name) for name in names}
        return codec.encode("PageTable", 1, fields, {name: getattr(self, name) for name in _ARRAYS})

    @classmethod
    def from_bytes(cls, data: bytes) -> PageTable:
        """Decode and validate what `to_bytes` wrote."""
        return codec.load(cls, 1, data, _ARRAYS)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageTable) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]


def _extend(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    out = np.full(length, fill, np.int32)
    out[: array.shape[0]] = array
    return out


@overload
def pages_for(kv_lens: int, tokens_per_page: int) -> int: ...
@overload
def pages_for(kv_lens: Any, tokens_per_page: int) -> Any: ...
def pages_for(kv_lens: Any, tokens_per_page: int) -> Any:
    """Pages that `kv_lens` ≥ 0 tokens need: ceil division (scenario L10), for an int or an array of an integer dtype.

    The values of an array that is not numpy's may be unknown (traced), and are not looked at; of others a negative one
    is refused.
    """
    size = check_int("pages_for", "tokens_per_page", tokens_per_page, minimum=1)
    dtype = getattr(kv_lens, "dtype", None)
    if dtype is None or isinstance(kv_lens, np.generic):
        return -(-check_int("pages_for", "kv_lens", kv_lens, minimum=0) // size)
    if getattr(dtype, "kind", None) not in ("i", "u"):
        raise InvalidInputError(f"pages_for.kv_lens must be of an integer dtype, got {show(dtype)}.")
    if isinstance(kv_lens, np.ndarray) and kv_lens.size and kv_lens.min() < 0:
        raise InvalidInputError(f"pages_for.kv_lens must not be negative, got {kv_lens.min()}.")
    if isinstance(kv_lens, np.ndarray) and dtype.itemsize < 4:
        kv_lens = kv_lens.astype(np.int32)  # a page size need not fit the dtype of short lengths
    # -(-n // size) would wrap unsigned lengths, and (n + size - 1) // size lengths near the top of int32.
    return kv_lens // size + (kv_lens % size != 0).astype(kv_lens.dtype)
