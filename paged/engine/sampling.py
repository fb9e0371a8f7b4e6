"""From logits to tokens, inside the step's own program, with log probabilities.

Sampling parameters are arrays, so no mix of them compiles anything. A random token is the argmax of logits plus Gumbel
noise (the Gumbel-max trick), and the noise of a token depends on the seed, the sample, the position and its id alone:
neither the batch nor the filters move the draws.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from paged.common.checks import check_int
from paged.engine.params import NUM_WORDS

_BITS = 32


class Sampled(eqx.Module):
    """What one step sampled, by row; rows that did not ask for a token hold values without meaning.

    - `tokens` (r,): the chosen token; `logprobs` (r,): its natural-log probability, in float32.
    - `top_tokens`, `top_logprobs` (r, n): the n likeliest tokens, likeliest first; n may be 0.
    """

    tokens: Int32[Array, " r"]
    logprobs: Float32[Array, " r"]
    top_tokens: Int32[Array, "r n"]
    top_logprobs: Float32[Array, "r n"]


class RowParams(eqx.Module):
    """Sampling parameters by row; see `SamplingParams`. Rows of temperature 0 are greedy."""

    seed: UInt32[Array, "r 2"]
    sample: Int32[Array, " r"]
    top_k: Int32[Array, " r"]
    temperature: Float32[Array, " r"]
    top_p: Float32[Array, " r"]
    min_p: Float32[Array, " r"]

    @classmethod
    def unpack(cls, words: Int32[Array, " n"]) -> RowParams:
        """From what `SamplingParams.words` packed, row after row."""
        words = words.reshape(-1, NUM_WORDS)
        seed = lax.bitcast_convert_type(words[:, 1::-1], jnp.uint32)  # high word first
        temperature, top_p, min_p = (lax.bitcast_convert_type(words[:, i], jnp.float32) for i in (4, 5, 6))
        return cls(seed, words[:, 2], words[:, 3], temperature, top_p, min_p)


def log_probabilities(logits: Float[Array, "r v"]) -> Float32[Array, "r v"]:
    """Natural-log softmax over the vocabulary, in float32 whatever the logits' dtype."""
    return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def scored(logits: Float[Array, "r v"], tokens: Int32[Array, " r"], *, num_top: int = 0) -> Sampled:
    """These tokens of each row with their log probabilities, and the `num_top` likeliest beside them."""
    num_top = check_int("scored", "num_top", num_top, minimum=0, maximum=logits.shape[1])
    logprobs = log_probabilities(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    # Ranked by logits: equal ones stay in the order of their ids, so the first is the greedy token.
    top_tokens = lax.top_k(logits, num_top)[1].astype(jnp.int32)
    return Sampled(tokens, chosen, top_tokens, jnp.take_along_axis(logprobs, top_tokens, axis=-1))


def greedy_tokens(logits: Float[Array, "r v"]) -> Int32[Array, " r"]:
    """The likeliest token of each row; among equal logits, the one with the lowest id.

    Ties are those of the logits as the model rounded them: log probabilities never decide. A row that holds NaN gets
    the first of them, as `jnp.argmax` gives it.
    """
    return lax.platform_dependent(logits, cpu=_argmax_on_cpu, default=_argmax)


def _argmax(logits: Float[Array, "r v"]) -> Int32[Array, " r"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _argmax_on_cpu(logits: Float[Array, "r v"]) -> Int32[Array, " r"]:
    """`_argmax` in plain reductions, nearly 4 times as fast: XLA's CPU backend reduces pairs one by one."""
    size = logits.shape[-1]
    at, nan = jnp.arange(size, dtype=jnp.int32), jnp.isnan(logits)

    def first(found: Bool[Array, "r v"]) -> Int32[Array, " r"]:
        return jnp.where(found, at[None, :], size).min(axis=-1)

    top = jnp.where(nan, -jnp.inf, logits).max(axis=-1, keepdims=True)  # not left to what max makes of NaN
    first_nan = first(nan)
    return jnp.where(first_nan < size, first_nan, first(logits == top))


def greedy(logits: Float[Array, "r v"], *, num_top: int = 0) -> Sampled:
    """The likeliest token of each row, scored."""
    return scored(logits, greedy_tokens(logits), num_top=num_top)


def random_tokens(
    logits: Float[Array, "r v"], positions: Int32[Array, " r"], params: RowParams, *, filtered: bool
) -> Int32[Array, " r"]:
    """A token of each row drawn by its parameters; greedy where the temperature is 0.

    - `positions`: of the tokens to come. `filtered`: whether any row asks for top_k, top_p or min_p; they are ignored
      otherwise.
    """
    logits = logits.astype(jnp.float32)
    is_greedy = params.temperature == 0
    temperature = jnp.where(is_greedy, jnp.float32(1), params.temperature)
    # Differences first: they cannot overflow, and the smallest temperature gives −∞, never NaN.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    if filtered:
        scaled = jnp.where(_kept(logits, scaled, params), scaled, -jnp.inf)

    def noise(seed: Array, sample: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    drawn = jnp.argmax(scaled + jax.vmap(noise)(params.seed, params.sample, positions), axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy, greedy_tokens(logits), drawn)


def _kept(logits: Float32[Array, "r v"], scaled: Float32[Array, "r v"], params: RowParams) -> Bool[Array, "r v"]:
    """Which tokens the three filters leave.

    Thresholds are found by bisection over the bits of the logits, 32 passes that compare and add: exact, and cheaper
    than sorting a vocabulary.
    """
    rank = _ordered(logits)
    weight = jnp.exp(scaled)  # of the likeliest token: 1
    top_k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, logits.shape[1]), logits.shape[1])
    ones = jnp.ones_like(weight)
    kept = _likeliest(rank, ones, top_k.astype(jnp.float32))
    weight = jnp.where(kept, weight, 0)
    all_of_it = weight.sum(axis=-1)
    wanted = jnp.where(params.top_p < 1, params.top_p * all_of_it, jnp.inf)
    kept &= _likeliest(rank, weight, wanted)
    best = rank == rank.max(axis=-1, keepdims=True)
    return kept & ((weight >= params.min_p[:, None]) | best)


def _ordered(logits: Float32[Array, "r v"]) -> UInt32[Array, "r v"]:
    """Unsigned integers in the order of the logits; both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, jnp.float32(0), logits), jnp.uint32)
    sign = jnp.uint32(1 << (_BITS - 1))
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _likeliest(
    rank: UInt32[Array, "r v"], weight: Float32[Array, "r v"], wanted: Float32[Array, " r"]
) -> Bool[Array, "r v"]:
    """The fewest tokens, highest rank first and then lowest id, whose weights add up to `wanted`; all if none do.

    Tokens of equal rank have equal weights.
    """

    def mass(at_least: Array) -> Array:
        return jnp.where(rank >= at_least[:, None], weight, 0).sum(axis=-1)

    def bisect(i: Array, lowest: Array) -> Array:
        higher = lowest | (jnp.uint32(1) << (jnp.uint32(_BITS - 1) - i.astype(jnp.uint32)))
        return jnp.where(mass(higher) >= wanted, higher, lowest)

    # The largest threshold that leaves enough, then of the tokens exactly at it only as many as are needed.
    threshold = lax.fori_loop(0, _BITS, bisect, jnp.zeros(rank.shape[0], jnp.uint32))
    above, tied = rank > threshold[:, None], rank == threshold[:, None]
    missing = wanted - jnp.where(above, weight, 0).sum(axis=-1)
    each = jnp.where(tied, weight, 0).max(axis=-1)
    count = jnp.ceil(missing / jnp.where(each > 0, each, 1))
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32).astype(jnp.float32) <= count[:, None]))
