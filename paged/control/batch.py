"""What one step feeds, request by request, and the check that it continues what the cache already holds."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged.common.checks import check_int, show
from paged.common.errors import InternalError, InvalidInputError, PagedError
from paged.common.page_table import pages_for
from paged.control.page_map import Handle, PageMap


class Slice(NamedTuple):
    """`num_tokens` new tokens of one request at positions start .. start + num_tokens − 1; decode is one token."""

    handle: Handle
    start: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Slices that passed `SliceReader.read`, as int64 arrays over the batch.

    `rows` of the map; `starts`, `ends`: first new position and length after the step; `counts`: new tokens; `need`:
    pages that hold `ends` tokens; `first_pages`: number, within the request, of the page that the first token goes to.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    need: np.ndarray
    first_pages: np.ndarray


class SliceReader:
    """Checks slices against a map and its lengths (rows,) in tokens, with array arithmetic over the whole batch."""

    def __init__(self, page_map: PageMap, lengths: np.ndarray, tokens_per_page: int, capacity_tokens: int):
        self._map = page_map
        self._lengths = lengths
        self._tokens_per_page = tokens_per_page
        self._capacity = capacity_tokens
        # Decoding names the same requests step after step: what the last handles mean is remembered. Handles are
        # immutable, and whether they are open is asked anew each time.
        self._handles: tuple[Handle, ...] = ()
        self._rows = self._epochs = np.zeros(0, np.int64)

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
                if {*map(type, handles)} - {Handle}:
                    raise TypeError
                self._rows = _int64([handle.row for handle in handles])
                self._epochs = _int64([handle.epoch for handle in handles])
                self._handles = handles
            rows, start, count = self._rows, _int64(starts), _int64(counts)
            order = np.arange(rows.shape[0])
            place = np.empty(self._map.max_requests, np.int64)
            place[rows] = order  # of slices that name one row the last stays, so the others find a stranger's place
        except (TypeError, ValueError, AttributeError, OverflowError, IndexError):
            raise self._complaint(slices) from None
        good = self._map.open_epochs[rows] == self._epochs
        good &= self._lengths[rows] == start
        good &= place[rows] == order
        good &= count >= 1
        good &= count <= self._capacity - start
        if not good.all():
            raise self._complaint(slices)
        end = start + count
        first_pages = start // self._tokens_per_page
        return Batch(rows, start, count, end, pages_for(end, self._tokens_per_page), first_pages)

    def _complaint(self, slices: Sequence[Slice]) -> Exception:
        """The error for the first slice that is wrong. Reading one by one is slow, and only done once one is."""
        self._handles, self._rows, self._epochs = (), np.zeros(0, np.int64), np.zeros(0, np.int64)
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


def _int64(values: Sequence[int]) -> np.ndarray:
    """Ints as int64; floats are a `TypeError` and never rounded, ints past 64 bits an `OverflowError`."""
    return np.frombuffer(array("q", values), np.int64) if values else np.zeros(0, np.int64)
