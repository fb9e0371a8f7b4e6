"""When requests arrived and when their tokens came: the driver's outcomes seen with a clock in hand."""

from __future__ import annotations

import dataclasses

import numpy as np

from paged.common.checks import show
from paged.common.errors import InvalidInputError
from paged.control.outcome import StepOutcome
from paged.control.runner_protocol import RequestId


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one request, in seconds of the caller's clock; NaN for a token that has not come."""

    arrival: float
    first_token: float
    last_token: float


class Timeline:
    """Side table of times by request id, and all times to first token and between tokens so far.

    The caller says what time it is: a wall clock beside a device, or the simulated one. A preempted request's wait
    counts like any other: it is what its user sees.
    """

    def __init__(self) -> None:
        self._place: dict[RequestId, int] = {}
        self._vacant: list[int] = []
        self._times = np.zeros((3, 64))  # arrival, first token, last token
        self._batch: tuple[RequestId, ...] = ()
        self._places = np.zeros(0, np.int64)
        self._first_token_s = _Samples()
        self._between_tokens_s = _Samples()

    @property
    def time_to_first_token_s(self) -> np.ndarray:
        """(first tokens,) float32 seconds from arrival, in the order in which they came."""
        return self._first_token_s.values

    @property
    def between_tokens_s(self) -> np.ndarray:
        """(other tokens,) float32 seconds since the request's token before."""
        return self._between_tokens_s.values

    def arrive(self, request_id: RequestId, now: float) -> None:
        """A request arrived. Raises `InvalidInputError` if one of this id is in the table."""
        if request_id in self._place:
            raise InvalidInputError(f"Timeline: request {show(request_id)} has arrived already. Forget it first.")
        if not self._vacant:
            size = len(self._place)
            if size == self._times.shape[1]:
                self._times = np.concatenate([self._times, np.zeros_like(self._times)], axis=1)
            self._vacant.append(size)
        place = self._place[request_id] = self._vacant.pop()
        self._times[:, place] = now, np.nan, np.nan

    def observe(self, outcome: StepOutcome, now: float) -> None:
        """The tokens of a step came. Every request that sampled must have arrived."""
        if outcome.batch is not self._batch:  # requests that decode together do so step after step
            self._places = np.array([self._place.get(i, -1) for i in outcome.batch], np.int64)
            self._batch = outcome.batch
        places = self._places[outcome.tokens >= 0]
        if places.shape[0] and places.min() < 0:
            row = int(np.argmax((self._places < 0) & (outcome.tokens >= 0)))
            raise InvalidInputError(f"Timeline: request {show(outcome.batch[row])} sampled and never arrived.")
        arrival, first, last = self._times
        fresh = np.isnan(first[places])
        new, old = places[fresh], places[~fresh]
        self._first_token_s.extend(now - arrival[new])
        self._between_tokens_s.extend(now - last[old])
        first[new] = now
        last[places] = now

    def timing(self, request_id: RequestId) -> Timing:
        """Times of a request; raises `InvalidInputError` if it is not in the table."""
        return Timing(*self._times[:, self._find(request_id)].tolist())

    def forget(self, request_id: RequestId) -> None:
        """Take a request out of the table; its times stay among all the times."""
        self._vacant.append(self._find(request_id))
        del self._place[request_id]
        self._batch = ()

    def _find(self, request_id: RequestId) -> int:
        if request_id not in self._place:
            raise InvalidInputError(f"Timeline: request {show(request_id)} is not in the table.")
        return self._place[request_id]


class _Samples:
    """float32 values that grow at the end."""

    def __init__(self) -> None:
        self._buffer = np.zeros(1024, np.float32)
        self._count = 0

    @property
    def values(self) -> np.ndarray:
        return self._buffer[: self._count]

    def extend(self, values: np.ndarray) -> None:
        count = self._count + values.shape[0]
        if count > self._buffer.shape[0]:
            self._buffer = np.concatenate([self.values, np.zeros(max(count, 2 * self._count), np.float32)])
        self._buffer[self._count : count] = values
        self._count = count
