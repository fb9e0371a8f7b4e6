"""Attention of a decoder layer, on pages and without a cache.

`paged_attention` is the only caller of `attention_step` in this package; the adapter for other models uses it too.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from paged.backends.protocol import AttentionBackend, AttentionExtras, KvArrays
from paged.backends.sharding import KvSharding
from paged.backends.step import StepPlan, attention_step
from paged.common import AttentionSpec
from paged.models.config import DecoderConfig
from paged.models.layers import Rotary, linear


class Attention(eqx.Module):
    """Projections of one layer, or of stacked layers; what happens between them is the caller's."""

    query: Float[Array, "*l hd m"]
    key: Float[Array, "*l kd m"]
    value: Float[Array, "*l kd m"]
    output: Float[Array, "*l m hd"]

    def project(
        self, x: Float[Array, "t m"], rotary: Rotary, config: DecoderConfig
    ) -> tuple[Float[Array, "t h d"], Float[Array, "t k d"], Float[Array, "t k d"]]:
        """Query, key and value heads; query and key turned to their positions."""
        tokens, dim = x.shape[0], config.head_dim
        query = linear(x, self.query).reshape(tokens, config.num_query_heads, dim)
        key = linear(x, self.key).reshape(tokens, config.num_kv_heads, dim)
        value = linear(x, self.value).reshape(tokens, config.num_kv_heads, dim)
        return rotary(query), rotary(key), value

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
    query: Float[Array, "t h d"], key: Float[Array, "t k d"], value: Float[Array, "t k e"], spec: AttentionSpec
) -> Float[Array, "t h e"]:
    """Attention of one whole sequence over itself, with no cache; the reference of parity, not a fast path.

    float32 inside, rounded once to the dtype of `query`. Shares no code with the backends, options included.
    """
    tokens, heads, dim = query.shape
    kv_heads = key.shape[1]
    wide = query.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, dim)
    exact = lax.Precision.HIGHEST
    logits = jnp.einsum("tkgd,skd->kgts", wide, key.astype(jnp.float32), precision=exact) * jnp.float32(spec.scale)
    if spec.soft_cap is not None:
        cap = jnp.float32(spec.soft_cap)
        logits = cap * jnp.tanh(logits / cap)
    ahead = jnp.arange(tokens)[None, :] - jnp.arange(tokens)[:, None]
    visible = ahead <= 0 if spec.causal else jnp.ones_like(ahead, bool)
    if spec.window is not None:
        visible &= ahead > -spec.window
    weights = jax.nn.softmax(jnp.where(visible[None, None], logits, -jnp.inf), axis=-1)
    out = jnp.einsum("kgts,ske->tkge", weights, value.astype(jnp.float32), precision=exact)
    return out.reshape(tokens, heads, -1).astype(query.dtype)
