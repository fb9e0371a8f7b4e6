"""What a driver counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Counters:
    """Sums since the driver was made; steps and their tokens count when dispatched.

    - `recomputed_tokens`: cached tokens that preemptions and failed steps threw away.
    - `prefix_tokens`: tokens that admitted requests, preempted ones again, found cached and did not feed.
    - `failed`: requests whose logits were no numbers.
    - `forked_tokens`: tokens that admitted requests, preempted ones again, shared with another sample of their prompt.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_tokens: int = 0
    forked_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
