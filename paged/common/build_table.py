"""From lengths and pages to a `PageTable`."""

from __future__ import annotations

import numpy as np

from paged.common.checks import check_int, check_int32_vector, refuse_rows, show
from paged.common.errors import InvalidInputError
from paged.common.page_table import MAX_ENTRIES, PageTable, pages_for


def build_page_table(
    *,
    query_lens: list[int] | np.ndarray,
    kv_lens: list[int] | np.ndarray,
    pages: list[list[int]] | list[np.ndarray] | np.ndarray,
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
    refuse_rows(owner, "query_lens", query, query < 0, "must not be negative")
    refuse_rows(owner, "kv_lens", kv, kv < 0, "must not be negative")
    short = (kv > 0) & (kv < query)
    refuse_rows(owner, "kv_lens", kv, short, "must be 0 or at least the row's query length")
    need = pages_for(kv, size)
    query_offsets = np.concatenate([[0], np.cumsum(query, dtype=np.int64)])
    page_offsets = np.concatenate([[0], np.cumsum(need, dtype=np.int64)])
    for field, total in (("query_lens", query_offsets[-1]), ("pages", page_offsets[-1])):
        if total > MAX_ENTRIES:
            raise InvalidInputError(f"{owner}.{field} sums to {total}; one step has at most {MAX_ENTRIES}.")
    page_ids = _listed_pages(owner, pages, need)
    rows = np.repeat(np.arange(query.shape[0]), query)
    position = np.arange(rows.shape[0]) - query_offsets[rows] + kv[rows] - query[rows]
    live = kv[rows] > 0
    slots = np.full(rows.shape[0], -1, np.int64)
    listed = page_offsets[rows[live]] + position[live] // size
    slots[live] = page_ids[listed].astype(np.int64) * size + position[live] % size
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


def _listed_pages(owner: str, pages: object, need: np.ndarray) -> np.ndarray:
    """The first `need[r]` pages of each row, end to end."""
    if isinstance(pages, np.ndarray) and pages.ndim == 2:
        pages = list(pages)
    if not isinstance(pages, (list, tuple)) or len(pages) != need.shape[0]:
        got = f"{len(pages)}" if isinstance(pages, (list, tuple)) else show(pages)
        raise InvalidInputError(
            f"{owner}.pages must be a list with one list of pages for each of {need.shape[0]} rows, got {got}."
        )
    used = []
    for row, (held, count) in enumerate(zip(pages, need.tolist())):
        if not (isinstance(held, np.ndarray) and held.ndim == 1 and held.dtype in (np.int32, np.int64)):
            held = check_int32_vector(owner, f"pages[{row}]", held)
        if held.shape[0] < count:
            raise InvalidInputError(
                f"{owner}.pages: row {row} holds {held.shape[0]} pages, fewer than the {count} that its kv_len needs."
            )
        used.append(held[:count])
    return np.concatenate(used) if used else np.zeros(0, np.int32)
