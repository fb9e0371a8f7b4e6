"""Teacher-forced parity: the paged path's own tokens, replayed through the dense path (requirement M4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from paged.common.checks import check_int
from paged.common.errors import InvalidInputError
from paged.models import Decoder

_PAD_TO = 64


@runtime_checkable
class Completed(Protocol):
    """What of a completion is replayed; `CompletionOutput` is one."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Parity:
    """How generated tokens stand in the dense path's logits, one entry for each; logits are natural-log units.

    - `behind`: dense maximum minus the dense logit of the paged token; 0 where the paged token is an argmax.
    - `top_gap`: dense maximum minus the runner-up: below the paths' rounding difference either is right.
    - `logprobs`: the dense path's natural-log probability of the paged token.
    """

    behind: np.ndarray
    top_gap: np.ndarray
    logprobs: np.ndarray

    def flips(self, tie: float) -> list[int]:
        """Generated tokens (indices) that are behind the dense maximum by more than `tie`."""
        return np.flatnonzero(self.behind > tie).tolist()


def replay(model: Decoder, tokens: Sequence[int], prompt_tokens: int) -> Parity:
    """Feed prompt and generated `tokens` to `Decoder.dense` at once and compare at every generated one.

    One flip does not spoil what follows, since each position sees the paged path's tokens, not the dense path's.
    Raises `InvalidInputError` if nothing was generated.
    """
    prompt_tokens = check_int("replay", "prompt_tokens", prompt_tokens, minimum=1)
    if prompt_tokens >= len(tokens):
        raise InvalidInputError(f"replay: {len(tokens)} tokens with a prompt of {prompt_tokens} leave none generated.")
    padded = np.zeros(-(-len(tokens) // _PAD_TO) * _PAD_TO, np.int32)
    padded[: len(tokens)] = tokens  # what follows a position never reaches it, so padding changes nothing
    logits = np.asarray(_dense(model, jnp.asarray(padded))[prompt_tokens - 1 : len(tokens) - 1], np.float64)
    generated = np.asarray(tokens[prompt_tokens:], np.int64)
    ranked = np.sort(logits, axis=-1)
    chosen = logits[np.arange(len(generated)), generated]
    top = ranked[:, -1]
    norm = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return Parity(behind=top - chosen, top_gap=top - ranked[:, -2], logprobs=chosen - norm)


@dataclasses.dataclass(frozen=True, eq=False)
class Flips:
    """Requirement M4 over many completions: generated tokens that are no argmax of the dense path.

    - `tokens`: generated tokens that were compared. `gaps`: for each flip, how far its logit is behind the dense
      maximum, largest first. A gap that rounding explains is a tie, and either token is right.
    """

    tokens: int
    gaps: np.ndarray

    def beyond(self, tie: float) -> int:
        """Flips whose gap is larger than `tie`: faults."""
        return int(np.count_nonzero(self.gaps > tie))

    def __str__(self) -> str:
        gaps = ", ".join(f"{gap:.2g}" for gap in self.gaps[:8].tolist()) + (" …" if len(self.gaps) > 8 else "")
        return f"{len(self.gaps)} flips in {self.tokens} tokens" + (f", behind by {gaps}" if len(self.gaps) else "")


def count_flips(model: Decoder, completions: Iterable[Completed]) -> Flips:
    """Replay completions of greedy requests, see `replay`; those without a token are passed over."""
    behind = [np.zeros(0)]
    for one in completions:
        if one.token_ids:
            behind.append(replay(model, [*one.prompt_ids, *one.token_ids], len(one.prompt_ids)).behind)
    together = np.concatenate(behind)
    return Flips(len(together), np.sort(together[together > 0])[::-1])


@jax.jit
def _dense(model: Decoder, tokens: jax.Array) -> jax.Array:
    return model.dense(tokens)
