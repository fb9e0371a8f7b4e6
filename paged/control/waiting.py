"""Requests that wait to be admitted, in the order of their turns."""

from __future__ import annotations

import heapq

from paged.control.family import Family
from paged.control.requests import Phase, Request


class WaitingQueue:
    """A queue by priority, then arrival. A request that is sent back takes the place that its turn gives it."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, request: Request) -> None:
        """Let a request wait. Turns are unique, so requests themselves are never compared."""
        request.phase = Phase.WAITING
        heapq.heappush(self._heap, (request.turn, request))
        self._live += 1

    def first(self) -> Request | None:
        """The request whose turn it is; it stays. One whose family is being fed its prompt stands aside."""
        while self._heap:
            request = self._heap[0][1]
            if request.phase is Phase.WAITING:
                family = request.family
                if family is None or family.leader is None:
                    return request
                family.held.append(request)
            heapq.heappop(self._heap)  # it was dropped, or stands aside
        return None

    def call_back(self, family: Family) -> None:
        """Nobody leads this family any more: who stood aside waits at its turn again."""
        for request in family.held:
            if request.phase is Phase.WAITING:
                heapq.heappush(self._heap, (request.turn, request))
        family.held.clear()

    def take(self) -> Request:
        """Remove and return the first."""
        request = self.first()
        if request is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        self._live -= 1
        return request

    def drop(self, request: Request) -> None:
        """Forget a waiting request; its entry goes when it comes to the front."""
        request.phase = Phase.FINISHED
        self._live -= 1
