"""Pieces of a decoder layer that are not attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int32

from paged.backends.protocol import PackedHeads, turned
from paged.models.config import DecoderConfig

_FEW_TOKENS = 128


def linear(
    x: Float[Array, "t i"], weight: Float[Array, "*o i"], out: jnp.dtype | type | None = None
) -> Float[Array, "t *o"]:
    """x · weightᵀ, in dtype `out`, by default that of `x`; the weight may have several axes of outputs.

    float32 is multiplied as float32: some devices would round its factors by default.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = partial(lax.dot_general, precision=precision, preferred_element_type=out)

    def plain(x: Array, weight: Array) -> Array:
        return product(x, weight, (((1,), (weight.ndim - 1,)), ((), ())))

    return lax.platform_dependent(x, weight, cpu=partial(_on_cpu, product), default=plain)


@custom_partitioning
def _row_major(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """`x` in memory in the order of its axes, each shard where it is: by itself XLA would gather them first."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _each_share(mesh: Any, arguments: Any, result: Any) -> tuple[Any, ...]:
    sharding = arguments[0].sharding
    return mesh, _row_major.fun, sharding, (sharding,)


_row_major.def_partition(
    partition=_each_share,
    infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
    sharding_rule="... -> ...",
)


def _on_cpu(product: Callable[..., Array], x: Float[Array, "t i"], weight: Float[Array, "*o i"]) -> Array:
    """`linear` in forms that XLA's CPU backend multiplies without a transposed copy of the weight.

    For few tokens weight · xᵀ is up to 1.7 times as fast; behind a barrier, or XLA turns it back. Its layout is set, or
    what reads it would choose one, and with it the order of sums over outputs. For many tokens a weight of several axes
    would be copied in every step. Two axes of outputs are then a batch and its outputs, and not merged, because the
    second may be laid over devices.
    """
    contract_inputs = (((weight.ndim - 1,), (1,)), ((), ()))
    if x.shape[0] <= _FEW_TOKENS:
        return _row_major(jnp.moveaxis(lax.optimization_barrier(product(weight, x, contract_inputs)), -1, 0))
    if weight.ndim == 3:
        many = jnp.broadcast_to(x, (weight.shape[0], *x.shape))
        return product(many, weight, (((2,), (2,)), ((0,), (0,)))).swapaxes(0, 1)
    flat = weight.reshape(-1, weight.shape[-1])
    return product(x, flat, (((1,), (1,)), ((), ()))).reshape(-1, *weight.shape[:-1])


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
        return turned(x, self.cos, self.sin)

    def packed(self, heads: Float[Array, "t k g2 d"]) -> PackedHeads:
        """Query, key and value heads with the angles that are still to turn them."""
        return PackedHeads(heads, self.cos, self.sin)


class Mlp(eqx.Module):
    """SwiGLU: down · (silu(gate · x) × (up · x)), gate and up in one product."""

    gate_up: Float[Array, "*l 2 f m"]
    down: Float[Array, "*l m f"]

    @property
    def gate(self) -> Any:
        """The gate's weight as checkpoints store it."""
        return self.gate_up[..., 0, :, :]

    @property
    def up(self) -> Any:
        """The other factor's weight as checkpoints store it."""
        return self.gate_up[..., 1, :, :]

    def __call__(self, x: Float[Array, "t m"]) -> Float[Array, "t m"]:
        both = linear(x, self.gate_up)
        return linear(jax.nn.silu(both[:, 0]) * both[:, 1], self.down)
