"""One step's bookkeeping: which tokens, over which pages, written where."""

from __future__ import annotations

import dataclasses

import numpy as np

from paged.common import codec
from paged.common.checks import check_int, check_int32_vector, refuse_rows
from paged.common.errors import InvalidInputError
from paged.common.layout import SENTINEL_PAGE

_ARRAYS = ("query_offsets", "page_offsets", "page_ids", "last_page_len", "kv_lens", "write_slots")
_OWNER = "PageTable"


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
    - `write_slots` (tokens,): page × tokens_per_page + offset within one layer; −1 = the token is not written.
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
        refuse_rows(_OWNER, "kv_lens", kv_lens, kv_lens > self.max_kv_len, f"exceeds max_kv_len={self.max_kv_len}")
        longest = f"exceeds max_query_len={self.max_query_len}"
        refuse_rows(_OWNER, "query lengths", query_lens, query_lens > self.max_query_len, longest)
        last, expected = self.last_page_len, kv_lens - size * (np.maximum(pages_for(kv_lens, size), 1) - 1)
        refuse_rows(_OWNER, "last_page_len", last, (last < 0) | (last > size), f"must be in 0..{size}")
        refuse_rows(_OWNER, "last_page_len", last, (last == 0) != (kv_lens == 0), "is 0 exactly for an empty row")
        refuse_rows(_OWNER, "last_page_len", last, last != expected, "disagrees with kv_lens")
        counts = np.diff(self.page_offsets)
        wrong = counts != pages_for(kv_lens, size)
        refuse_rows(_OWNER, "pages listed", counts, wrong, f"must be ceil(kv_len / {size})")

    def _check_pages(self) -> None:
        ids, used = self.page_ids, int(self.page_offsets[-1])
        live = ids[:used]
        bad = (live < 0) | (live >= self.num_pages)
        refuse_rows(_OWNER, "page_ids", live, bad, f"must be in 1..{self.num_pages - 1}", "entry")
        refuse_rows(_OWNER, "page_ids", live, live == SENTINEL_PAGE, "must not name the sentinel page 0", "entry")
        refuse_rows(_OWNER, "page_ids", ids[used:], ids[used:] != SENTINEL_PAGE, "padding must name page 0", "entry")

    def _check_slots(self) -> None:
        slots, size, tokens = self.write_slots, self.tokens_per_page, int(self.query_offsets[-1])
        refuse_rows(_OWNER, "write_slots", slots[tokens:], slots[tokens:] != -1, "must be -1 for padding", "token")
        limit = self.num_pages * size
        bad = (slots < -1) | (slots >= limit) | ((slots >= 0) & (slots < size))
        refuse_rows(_OWNER, "write_slots", slots, bad, f"must be -1 or in {size}..{limit - 1}", "token")
        written = np.sort(slots[slots >= 0])
        twice = written[1:] == written[:-1]
        if twice.any():
            slot = int(written[1:][twice][0])
            rows = np.flatnonzero(slots == slot).tolist()
            raise InvalidInputError(f"PageTable.write_slots: slot {slot} is written twice, by tokens {rows}.")

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
        """The same step at larger static shapes: empty rows, tokens that write nothing, pages naming the sentinel."""
        owner = "PageTable.pad"
        rows = check_int(owner, "rows", rows, minimum=self.num_rows)
        tokens = check_int(owner, "tokens", tokens, minimum=self.num_tokens)
        listed_pages = check_int(owner, "listed_pages", listed_pages, minimum=int(self.page_offsets[-1]))
        live = int(self.page_offsets[-1])
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
        return codec.build(cls, "PageTable", codec.decode("PageTable", 1, data, _ARRAYS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageTable) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]


def _extend(array: np.ndarray, length: int, fill: int) -> np.ndarray:
    out = np.full(length, fill, np.int32)
    out[: array.shape[0]] = array
    return out


def pages_for(kv_lens, tokens_per_page: int):
    """Pages that `kv_lens` tokens need: ceil division, for an int or an array (scenario L10)."""
    return -(-kv_lens // tokens_per_page)


def build_page_table(
    *,
    query_lens: list[int] | np.ndarray,
    kv_lens: list[int] | np.ndarray,
    pages: list[list[int]] | list[np.ndarray],
    tokens_per_page: int,
    num_pages: int,
    max_query_len: int | None = None,
    max_kv_len: int | None = None,
) -> PageTable:
    """`PageTable` of rows that write each of their new tokens at its own position.

    - `query_lens`, `kv_lens` (rows,): new tokens, and tokens after the step.
    - `pages`: for each row the pages it holds, at least ceil(kv_len / tokens_per_page); surplus pages are not listed.

    Raises `InvalidInputError` if a row holds too few pages, and whatever `PageTable` refuses.
    """
    owner = "build_page_table"
    size = check_int(owner, "tokens_per_page", tokens_per_page, minimum=1)
    query = check_int32_vector(owner, "query_lens", query_lens)
    kv = check_int32_vector(owner, "kv_lens", kv_lens, length=query.shape[0])
    if len(pages) != query.shape[0]:
        raise InvalidInputError(
            f"{owner}.pages must have one list for each of {query.shape[0]} rows, got {len(pages)}."
        )
    refuse_rows(owner, "query_lens", query, query < 0, "must not be negative")
    refuse_rows(owner, "kv_lens", kv, kv < 0, "must not be negative")
    need = pages_for(kv, size)
    held = np.fromiter((len(p) for p in pages), np.int64, len(pages))
    refuse_rows(owner, "pages", held, held < need, "holds fewer pages than ceil(kv_len / tokens_per_page)")
    used = [np.asarray(p[:n], np.int64) for p, n in zip(pages, need.tolist())]
    page_ids = np.concatenate(used) if used else np.zeros(0, np.int64)
    page_offsets, query_offsets = (np.concatenate([[0], np.cumsum(x, dtype=np.int64)]) for x in (need, query))
    rows = np.repeat(np.arange(query.shape[0]), query)
    position = np.arange(rows.shape[0]) - query_offsets[rows] + kv[rows] - query[rows]
    live = (kv[rows] > 0) & (position >= 0)
    slots = np.full(rows.shape[0], -1, np.int64)
    listed = page_offsets[rows[live]] + position[live] // size
    slots[live] = page_ids[listed] * size + position[live] % size
    return PageTable(
        query_offsets=query_offsets,
        page_offsets=page_offsets,
        page_ids=page_ids,
        last_page_len=np.where(kv > 0, kv - size * (np.maximum(need, 1) - 1), 0),
        kv_lens=kv,
        write_slots=slots,
        max_query_len=int(query.max(initial=0)) if max_query_len is None else max_query_len,
        max_kv_len=int(kv.max(initial=0)) if max_kv_len is None else max_kv_len,
        tokens_per_page=size,
        num_pages=num_pages,
    )
