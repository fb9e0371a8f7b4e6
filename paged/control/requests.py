"""A request as the driver keeps it, and what is left of it at its end."""

from __future__ import annotations

import dataclasses
import enum
from array import array

from paged.common.namespace import CacheNamespace
from paged.control.family import Family
from paged.control.page_map import Handle
from paged.control.runner_protocol import RequestId


class Phase(enum.Enum):
    """Where a request stands. Set when it gets there, never guessed from token counts (scenario H13)."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DRAINING = "draining"  # its last token is being sampled; it takes part in no further step
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One unfinished request.

    - `turn`: (priority, arrival). It never changes, so a preempted request keeps its turn (scenario H10).
    - `tokens`: prompt, generated tokens, then an `IN_FLIGHT` for each of the `in_flight` samples under way.
    - `limit`: length of `tokens` at which generation ends.
    - `cached`: tokens that dispatched steps have fed, or that were found cached; the plane's length.
    - `target`: tokens to feed before it decodes: all that were known when it was admitted, generated ones included.
    - `family`: the samples of its prompt, if there are several; `shares_prompt`: its whole prompt is in the cache, and
      every step that wrote it is collected.
    - `namespace`: of the prefixes that it may attach to and publish; None shares nothing. `prefix_tokens`: those that
      it found cached when it was first admitted.
    """

    id: RequestId
    turn: tuple[int, int]
    tokens: array[int]
    num_prompt: int
    limit: int
    eos: frozenset[int]
    namespace: CacheNamespace | None = None
    family: Family | None = None
    shares_prompt: bool = False
    phase: Phase = Phase.WAITING
    handle: Handle | None = None
    cached: int = 0
    target: int = 0
    in_flight: int = 0
    preemptions: int = 0
    prefix_tokens: int = 0

    @property
    def num_known(self) -> int:
        """Prompt and generated tokens that the host has seen."""
        return len(self.tokens) - self.in_flight


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a request came to.

    - `tokens`: generated ids; an end-of-text token is the last.
    - `reason`: `"stop"` at an end-of-text token, `"length"` at `max_tokens`, `"abort"`, `"error"` where its logits were
      no numbers.
    - `preemptions`: how often it was sent back to the queue.
    - `prefix_tokens`: tokens of its prompt that it found cached and did not feed.
    """

    tokens: tuple[int, ...]
    reason: str
    num_prompt: int
    preemptions: int
    prefix_tokens: int
