"""From logits to tokens, inside the step's own program, with log probabilities."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from paged.common.checks import check_int


class Sampled(eqx.Module):
    """What one step sampled, by row; rows that did not ask for a token hold values without meaning.

    - `tokens` (r,): the chosen token; `logprobs` (r,): its natural-log probability, in float32.
    - `top_tokens`, `top_logprobs` (r, n): the n likeliest tokens, likeliest first; n may be 0.
    """

    tokens: Int32[Array, " r"]
    logprobs: Float32[Array, " r"]
    top_tokens: Int32[Array, "r n"]
    top_logprobs: Float32[Array, "r n"]


def log_probabilities(logits: Float[Array, "r v"]) -> Float32[Array, "r v"]:
    """Natural-log softmax over the vocabulary, in float32 whatever the logits' dtype."""
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def greedy(logits: Float[Array, "r v"], *, num_top: int = 0) -> Sampled:
    """The likeliest token of each row; among equal logits, the one with the lowest id.

    Ties are those of the logits as the model rounded them: log probabilities never decide.
    """
    num_top = check_int("greedy", "num_top", num_top, minimum=0, maximum=logits.shape[1])
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logprobs = log_probabilities(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    # Ranked by logits: equal ones stay in the order of their ids, so the first is the chosen token.
    top_tokens = jax.lax.top_k(logits, num_top)[1].astype(jnp.int32)
    return Sampled(tokens, chosen, top_tokens, jnp.take_along_axis(logprobs, top_tokens, axis=-1))
