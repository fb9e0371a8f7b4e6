"""What one step feeds, request by request, and the check that it continues what the cache already holds."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged.common.checks import check_int, show
from paged.common.errors import InternalError, InvalidInputError, PagedError
from paged.control.page_map import Handle, PageMap


class Slice(NamedTuple):
    """`num_tokens` new tokens of one request at positions start .. start + num_tokens − 1; decode is one token."""

    handle: Handle
    start: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Slices that passed `SliceReader.read`, as int64 arrays over the batch.

    - `rows` of the map; `starts`, `ends`: first new position and length after the step; `counts`: new tokens.
    - `first_pages`: number, within the request, of the page that the first token goes to.
    - `need`: pages that hold `ends` tokens, and `page_ends`, their running sum.
    - `num_tokens`, `num_pages`: sums of `counts` and `need`; `max_query_len`, `max_kv_len`: largest count and end.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    first_pages: np.ndarray
    need: np.ndarray
    page_ends: np.ndarray
    num_tokens: int
    num_pages: int
    max_query_len: int
    max_kv_len: int


class SliceReader:
    """Checks slices against a map and its lengths (rows,) in tokens, with array arithmetic over the whole batch."""

    def __init__(self, page_map: PageMap, lengths: np.ndarray, tokens_per_page: int, capacity_tokens: int):
        self._map = page_map
        self._lengths = lengths
        self._tokens_per_page = tokens_per_page
        self._capacity = capacity_tokens
        # Decoding names the same requests step after step: what the last handles mean is remembered. Handles are
        # immutable, and whether they are open is asked anew each time.
        self._remember((), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def read(self, slices: Sequence[Slice]) -> Batch:
        """The batch that the slices describe.

        Raises `StaleHandleError` for a request that is not open, and `InvalidInputError` naming the slice, the request
        and the value: a start that is not the request's length (gap or overlap), fewer tokens than one, an end past
        the capacity, a request named twice.
        """
        try:
            slices = tuple(slices)
            handles, starts, counts = zip(*slices, strict=True) if slices else ((), (), ())
            if handles != self._handles:
                self._read_handles(handles)
            start = array("q", starts)
            count = np.frombuffer(array("i", counts), np.int32) if counts else np.zeros(0, np.int32)
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise self._complaint(slices) from None
        rows = self._rows
        # As bytes, because that compares all rows in one call.
        is_open = self._map.open_epochs.take(rows).tobytes() == self._epochs
        begins = self._lengths.take(rows).tobytes() == start.tobytes()
        starts = np.frombuffer(start, np.int64) if slices else np.zeros(0, np.int64)
        ends = starts + count
        fewest, most, longest = (_extreme(count, np.minimum), _extreme(count, np.maximum), _extreme(ends, np.maximum))
        if not (is_open and begins) or longest > self._capacity or (fewest < 1 and slices):
            raise self._complaint(slices)
        need = (ends + (self._tokens_per_page - 1)) // self._tokens_per_page
        page_ends = np.add.accumulate(need)
        return Batch(
            rows=rows,
            starts=starts,
            counts=count,
            ends=ends,
            first_pages=starts // self._tokens_per_page,
            need=need,
            page_ends=page_ends,
            num_tokens=len(slices) if most <= 1 else int(np.add.reduce(count)),
            num_pages=int(page_ends[-1]) if slices else 0,
            max_query_len=most,
            max_kv_len=longest,
        )

    def _read_handles(self, handles: tuple[Handle, ...]) -> None:
        """Remember these handles; raises `ValueError` unless they are handles of distinct rows of this map."""
        if {*map(type, handles)} - {Handle}:
            raise ValueError
        rows = [handle.row for handle in handles]
        if len(set(rows)) < len(rows) or max(rows, default=0) >= self._map.max_requests:
            raise ValueError
        epochs = array("q", [handle.epoch for handle in handles])
        self._remember(handles, np.array(rows, np.int64), epochs)

    def _remember(self, handles: tuple[Handle, ...], rows: np.ndarray, epochs: array[int] | np.ndarray) -> None:
        self._handles, self._rows, self._epochs = handles, rows, epochs.tobytes()

    def _complaint(self, slices: Sequence[Slice]) -> Exception:
        """The error for the first slice that is wrong. Reading one by one is slow, and only done once one is."""
        if not isinstance(slices, tuple):
            return InvalidInputError(f"slices must be a sequence of Slice, got {show(slices)}.")
        seen: dict[int, int] = {}
        for i, item in enumerate(slices):
            where = f"slice {i}"
            if not isinstance(item, tuple) or len(item) != 3 or not isinstance(item[0], Handle):
                return InvalidInputError(f"{where} must be a Slice(handle, start, num_tokens), got {show(item)}.")
            handle, start, num_tokens = item
            who = f"{where} (request at row {handle.row}, epoch {handle.epoch})"
            try:
                row = self._map.row(handle)
                start = check_int(who, "start", start, minimum=0)
                num_tokens = check_int(who, "num_tokens", num_tokens, minimum=1)
            except PagedError as error:
                return error
            length = int(self._lengths[row])
            if row in seen:
                return InvalidInputError(f"{who} names the request of slice {seen[row]} again. Join the two.")
            seen[row] = i
            if start != length:
                fault = "leaves a gap" if start > length else "overlaps what is cached"
                return InvalidInputError(
                    f"{who}: start={start} {fault}: the request's length is {length}. Start there."
                )
            if start + num_tokens > self._capacity:
                return InvalidInputError(
                    f"{who}: start={start} + num_tokens={num_tokens} is past a request's {self._capacity} tokens."
                )
        return InternalError(f"the slices {show(slices)} were refused, and each of them is right.")


def _extreme(values: np.ndarray, of: np.ufunc) -> int:
    return int(of.reduce(values)) if values.shape[0] else 0
