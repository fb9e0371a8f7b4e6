"""Admitted requests by phase, each in the order of turns, and what the next step takes from them."""

from __future__ import annotations

import bisect
import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from paged.control.batch import Slice
from paged.control.page_map import Handle
from paged.control.requests import Phase, Request
from paged.control.runner_protocol import RequestId

_turn = attrgetter("turn")
_cached = attrgetter("cached")
# A thousand slices a step: made in C, without the keyword handling of a NamedTuple's constructor.
_slice: Callable[[tuple[Handle | None, int, int]], Slice] = functools.partial(tuple.__new__, Slice)


class Plan(NamedTuple):
    """Slices of one step. `counts[i]` tokens of `requests[i]`; the first `num_decode` requests decode."""

    requests: Sequence[Request]
    handles: Sequence[Handle | None]
    batch: tuple[RequestId, ...]
    known: Sequence[array[int]]
    counts: Sequence[int]
    num_decode: int

    def slices(self) -> list[Slice]:
        """The plan as the control plane takes it."""
        return list(map(_slice, zip(self.handles, map(_cached, self.requests), self.counts)))


class Running:
    """Requests that hold a row of the map: some prefill, some decode, some only wait for their last token."""

    def __init__(self) -> None:
        self.prefill: list[Request] = []
        self.decode: list[Request] = []
        self.draining: set[Request] = set()
        self._decode_plan: Plan | None = None  # it is the same step after step, unless somebody comes or goes

    def __len__(self) -> int:
        return len(self.prefill) + len(self.decode) + len(self.draining)

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self.prefill, self.decode, self.draining)

    def enter(self, request: Request, phase: Phase) -> None:
        """Put a request that is in no phase here into this one."""
        request.phase = phase
        if phase is Phase.PREFILL:
            bisect.insort(self.prefill, request, key=_turn)
        elif phase is Phase.DECODE:
            bisect.insort(self.decode, request, key=_turn)
            self._decode_plan = None
        else:
            self.draining.add(request)

    def leave(self, request: Request) -> None:
        """Take a request out of its phase."""
        if request.phase is Phase.PREFILL:
            self.prefill.remove(request)
        elif request.phase is Phase.DECODE:
            self.decode.remove(request)
            self._decode_plan = None
        else:
            self.draining.remove(request)

    def newest(self) -> Request:
        """The last in turn of those that take part in further steps."""
        return max(self.prefill[-1:] + self.decode[-1:], key=_turn)

    def decode_plan(self, most: int) -> Plan:
        """One token each of the first `most` decoding requests."""
        if most < len(self.decode):
            return plan(self.decode[:most], [1] * most, most)
        if self._decode_plan is None:
            self._decode_plan = plan(tuple(self.decode), [1] * len(self.decode), len(self.decode))
        return self._decode_plan


def plan(requests: Sequence[Request], counts: Sequence[int], num_decode: int) -> Plan:
    """The plan that gives each request its count."""
    return Plan(
        requests,
        [r.handle for r in requests],
        tuple([r.id for r in requests]),
        [r.tokens for r in requests],
        counts,
        num_decode,
    )
