"""Teacher-forced parity: the paged path's own tokens, replayed through the dense path (requirement M4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paged.common.checks import check_int
from paged.common.errors import InvalidInputError
from paged.models import Decoder

_PAD_TO = 64


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


@jax.jit
def _dense(model: Decoder, tokens: jax.Array) -> jax.Array:
    return model.dense(tokens)
