"""What one step feeds, request by request, and the check that it continues what the cache already holds."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paged.common.checks import check_int
from paged.common.errors import InvalidInputError
from paged.common.page_table import pages_for
from paged.control.page_map import Handle, PageMap


class Slice(NamedTuple):
    """`num_tokens` new tokens of one request at positions start .. start + num_tokens − 1; decode is one token."""

    handle: Handle
    start: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Slices that passed `read_slices`, as int64 arrays over the batch.

    `rows` of the map; `starts`, `ends`: first new position and length after the step; `counts`: new tokens; `need`:
    pages that hold `ends` tokens; `first_pages`: number, within the request, of the page that the first token goes to.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    need: np.ndarray
    first_pages: np.ndarray


def read_slices(
    slices: Sequence[Slice], page_map: PageMap, lengths: np.ndarray, tokens_per_page: int, capacity_tokens: int
) -> Batch:
    """Check slices against the map and the lengths (rows,) in tokens; one pass of array arithmetic for the batch.

    Raises `StaleHandleError` for a request that is not open, and `InvalidInputError` naming the slice, the request,
    and the value: a start that is not the request's length (gap or overlap), fewer tokens than one, an end past
    the capacity, a request named twice.
    """
    flat: list[int] = []
    try:
        for handle, start, num_tokens in slices:
            flat += (handle.row, handle.epoch, start, num_tokens)
        columns = np.frombuffer(array("q", flat), np.int64).reshape(-1, 4)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise _complaint(slices, page_map, lengths, capacity_tokens) from None
    rows, epochs, starts, counts = np.ascontiguousarray(columns.T)
    if (rows.view(np.uint64) >= page_map.max_requests).any():
        raise _complaint(slices, page_map, lengths, capacity_tokens)
    order = np.arange(rows.shape[0])
    place = np.empty(page_map.max_requests, np.int64)
    place[rows] = order  # of slices that name one row the last stays, so the others find a stranger's place
    good = (page_map.open_epochs[rows] == epochs) & (lengths[rows] == starts) & (place[rows] == order)
    good &= (counts >= 1) & (counts <= capacity_tokens - starts)
    if not good.all():
        raise _complaint(slices, page_map, lengths, capacity_tokens)
    ends = starts + counts
    return Batch(rows, starts, counts, ends, pages_for(ends, tokens_per_page), starts // tokens_per_page)


def _complaint(slices: Sequence[Slice], page_map: PageMap, lengths: np.ndarray, capacity_tokens: int) -> Exception:
    """The error for the first slice that is wrong. Reading one by one is slow, and only done once one is."""
    seen: dict[int, int] = {}
    for i, item in enumerate(slices):
        where = f"slice {i}"
        if not isinstance(item, tuple) or len(item) != 3 or not isinstance(item[0], Handle):
            return InvalidInputError(f"{where} must be a Slice(handle, start, num_tokens), got {item!r}.")
        handle, start, num_tokens = item
        who = f"{where} (request at row {handle.row}, epoch {handle.epoch})"
        try:
            row = page_map.row(handle)
            start = check_int(who, "start", start, minimum=0)
            num_tokens = check_int(who, "num_tokens", num_tokens, minimum=1)
        except Exception as error:
            return error
        if row in seen:
            return InvalidInputError(f"{who} names the request of slice {seen[row]} again. Join them into one slice.")
        seen[row] = i
        if start != lengths[row]:
            fault = "leaves a gap" if start > lengths[row] else "overlaps what is cached"
            return InvalidInputError(
                f"{who}: start={start} {fault}: the request's length is {lengths[row]}. Start there, or truncate."
            )
        if start + num_tokens > capacity_tokens:
            return InvalidInputError(
                f"{who}: start={start} + num_tokens={num_tokens} is past a request's {capacity_tokens} tokens."
            )
    return InvalidInputError(f"slices must be Slice(handle, start, num_tokens) of ints, got {_shorten(slices)}.")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
