"""Attention of a decoder layer, on pages and without a cache.

`paged_attention` is the only caller of `attention_step` in this package; the adapter for other models uses it too.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from paged.backends.protocol import AttentionBackend, AttentionExtras, KvArrays, PackedHeads
from paged.backends.sharding import KvSharding
from paged.backends.step import StepPlan, attention_step
from paged.common import AttentionSpec
from paged.models.layers import Rotary, linear


class Attention(eqx.Module):
    """Projections of one layer, or of stacked layers; what happens between them is the caller's.

    - `qkv`: for each KV head the rows of its query heads, of its key and of its value, so that they are one product,
      on one device as on any number of shards.
    """

    qkv: Float[Array, "*l k g2 d m"]
    output: Float[Array, "*l m hd"]

    @property
    def query(self) -> Any:
        """The query projection as checkpoints store it."""
        part = self.qkv[..., :-2, :, :]
        return part.reshape(*part.shape[:-4], -1, part.shape[-1])

    @property
    def key(self) -> Any:
        """The key projection as checkpoints store it."""
        part = self.qkv[..., -2, :, :]
        return part.reshape(*part.shape[:-3], -1, part.shape[-1])

    @property
    def value(self) -> Any:
        """The value projection as checkpoints store it."""
        part = self.qkv[..., -1, :, :]
        return part.reshape(*part.shape[:-3], -1, part.shape[-1])

    def project(self, x: Float[Array, "t m"], rotary: Rotary) -> PackedHeads:
        """Query, key and value heads in one product, not yet turned to their positions."""
        return rotary.packed(linear(x, self.qkv))

    def combine(self, heads: Float[Array, "t h d"]) -> Float[Array, "t m"]:
        """The output projection of attention's heads."""
        return linear(heads.reshape(heads.shape[0], -1), self.output)


def paged_attention(
    query: Float[Array, "t h d"],
    key: Float[Array, "t k d"],
    value: Float[Array, "t k e"],
    pool: KvArrays,
    plan: StepPlan,
    *,
    backend: AttentionBackend,
    layer: Int32[Array, ""] | int,
    sharding: KvSharding | None,
    extras: AttentionExtras | None = None,
) -> tuple[Float[Array, "t h e"], KvArrays]:
    """Append this step's keys and values to `layer` of the pool, attend over pages, and return the updated pool."""
    extras = AttentionExtras() if extras is None else extras
    out, _, pool = attention_step(backend, plan, pool, query, key, value, layer=layer, extras=extras, sharding=sharding)
    return out, pool


def dense_attention(
    query: Float[Array, "*b t h d"], key: Float[Array, "*b t k d"], value: Float[Array, "*b t k e"], spec: AttentionSpec
) -> Float[Array, "*b t h e"]:
    """Attention of whole sequences over themselves, with no cache: the other side of parity, not a fast path.

    Computed in float64 and then rounded to the dtype of `query`, so that what differs is the paged side's rounding.
    Shares no code with the backends, options included.
    """
    *batch, tokens, heads, dim = query.shape
    kv_heads, dtype = key.shape[-2], query.dtype
    with jax.enable_x64(True):
        wide = jnp.float64
        query = query.astype(wide).reshape(*batch, tokens, kv_heads, heads // kv_heads, dim)
        # The scale means its nearest float32 (clause attend.2).
        logits = jnp.einsum("...tkgd,...skd->...kgts", query, key.astype(wide)) * wide(np.float32(spec.scale))
        if spec.soft_cap is not None:
            cap = wide(np.float32(spec.soft_cap))  # the nearest float32 as well (clause attend.5)
            logits = cap * jnp.tanh(logits / cap)
        at = np.arange(tokens)
        ahead = at[None, :] - at[:, None]
        visible = ahead <= 0 if spec.causal else np.ones_like(ahead, bool)
        if spec.window is not None:
            visible &= ahead > -spec.window
        masked = jnp.where(jnp.broadcast_to(visible, logits.shape), logits, wide(-jnp.inf))
        weights = jax.nn.softmax(masked, axis=-1)
        out = jnp.einsum("...kgts,...ske->...tkge", weights, value.astype(wide))
        return out.reshape(*batch, tokens, heads, -1).astype(dtype)
