"""Pieces of a decoder layer that are not attention."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from paged.models.config import DecoderConfig


def linear(
    x: Float[Array, "t i"], weight: Float[Array, "o i"], out: jnp.dtype | type | None = None
) -> Float[Array, "t o"]:
    """x · weightᵀ, in dtype `out`, by default that of `x`.

    float32 is multiplied as float32: some devices would round its factors by default.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract_inputs = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract_inputs, precision=precision, preferred_element_type=out)


def rms_norm(x: Float[Array, "t m"], weight: Float[Array, " m"], eps: float) -> Float[Array, "t m"]:
    """x / sqrt(mean(x²) + eps) in float32, rounded to the dtype of `x`, then times `weight`."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + jnp.float32(eps))).astype(x.dtype) * weight[None, :]


class Rotary(eqx.Module):
    """Cosines and sines of one step's tokens, float32, shared by every layer."""

    cos: Float[Array, "t half"]
    sin: Float[Array, "t half"]

    @classmethod
    def at(cls, positions: Int32[Array, " t"], config: DecoderConfig) -> Rotary:
        """Angles at absolute positions, which are given and never restarted (scenario M7)."""
        exponent = np.arange(0, config.head_dim, 2) / config.head_dim
        frequency = config.rope_theta**-exponent / np.asarray(config.rope_factors or 1.0)
        angle = positions[:, None].astype(jnp.float32) * jnp.asarray(frequency, jnp.float32)[None, :]
        return cls(jnp.cos(angle), jnp.sin(angle))

    def __call__(self, x: Float[Array, "t h d"]) -> Float[Array, "t h d"]:
        """Turn the pairs (i, i + head_dim / 2) of every head; float32 inside, rounded once."""
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(x.dtype)


class Mlp(eqx.Module):
    """SwiGLU: down · (silu(gate · x) × (up · x))."""

    gate: Float[Array, "*l f m"]
    up: Float[Array, "*l f m"]
    down: Float[Array, "*l m f"]

    def __call__(self, x: Float[Array, "t m"]) -> Float[Array, "t m"]:
        return linear(jax.nn.silu(linear(x, self.gate)) * linear(x, self.up), self.down)
