"""Attention of one work item at a time: online softmax in float32 over blocks of pages.

Cost follows the rows' real lengths. The arithmetic of an item sees its own queries and pages only, at shapes that
depend on nothing else, so neighbours, padding and page numbering cannot reach its bits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from paged.backends.moves import from_storage
from paged.backends.protocol import AttentionExtras, KvArrays
from paged.backends.xla.plan import Items, PlanArrays, StaticPlan
from paged.common import AttentionSpec


class Softmax(NamedTuple):
    """Running state: the largest logit, Σ exp(logit − top), and Σ exp(logit − top) · value, for m queries a head."""

    top: Float[Array, "k m"]
    total: Float[Array, "k m"]
    weighted: Float[Array, "k m e"]


def attend(
    query: Float[Array, "t h d"],
    pool: KvArrays,
    page_base: Int32[Array, ""] | int,
    static: StaticPlan,
    arrays: PlanArrays,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> tuple[Float[Array, "t h e"], Float[Array, "t h"]]:
    """Output in the query's dtype and LSE; what no item covers (padding, empty rows) stays +0 and −∞."""
    tokens, heads, _ = query.shape
    kv_heads, width = pool.values.shape[2:]
    group = heads // kv_heads
    padded = jnp.pad(query, ((0, static.tile), (0, 0), (0, 0)))
    outputs = jnp.zeros((tokens + static.tile, heads, width), jnp.float32)
    lses = jnp.full((tokens + static.tile, heads), -jnp.inf, jnp.float32)

    def loop(items: Items, tile: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def one(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            outputs, lses = carry
            first, length, row = items.first[i], items.length[i], items.row[i]
            q = lax.dynamic_slice_in_dim(padded, first, tile)
            q = q.reshape(tile, kv_heads, group, -1).swapaxes(0, 1).swapaxes(1, 2)
            q = q.reshape(kv_heads, group * tile, -1).astype(jnp.float32)
            out, lse = _item(q, tile, length, row, first, pool, page_base, static, arrays, spec, extras)
            out = out.reshape(kv_heads, group, tile, width).transpose(2, 0, 1, 3).reshape(tile, heads, width)
            lse = lse.reshape(kv_heads, group, tile).transpose(2, 0, 1).reshape(tile, heads)
            live = jnp.arange(tile) < length
            old_out = lax.dynamic_slice_in_dim(outputs, first, tile)
            old_lse = lax.dynamic_slice_in_dim(lses, first, tile)
            outputs = lax.dynamic_update_slice_in_dim(outputs, jnp.where(live[:, None, None], out, old_out), first, 0)
            lses = lax.dynamic_update_slice_in_dim(lses, jnp.where(live[:, None], lse, old_lse), first, 0)
            return outputs, lses

        return lax.fori_loop(0, items.count, one, carry)

    carry = (outputs, lses)
    if static.prefill_items:
        carry = loop(arrays.prefill, static.tile, carry)
    if static.decode_items:
        carry = loop(arrays.decode, 1, carry)
    out = carry[0][:tokens].astype(query.dtype)
    return jnp.where(out == 0, jnp.zeros((), query.dtype), out), carry[1][:tokens]


def _item(
    q: Float[Array, "k m d"],
    tile: int,
    length: Int32[Array, ""],
    row: Int32[Array, ""],
    first: Int32[Array, ""],
    pool: KvArrays,
    page_base: Int32[Array, ""] | int,
    static: StaticPlan,
    arrays: PlanArrays,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> tuple[Float[Array, "k m e"], Float[Array, "k m"]]:
    kv_heads, queries, _ = q.shape
    size, block = static.rung.tokens_per_page, static.block_tokens
    kv_len = arrays.kv_lens[row]
    # Visible positions low .. high − 1 of every token of the tile; tokens past `length` see nothing.
    position = kv_len - arrays.query_offsets[row + 1] + first + jnp.arange(tile, dtype=jnp.int32)
    alive = jnp.arange(tile, dtype=jnp.int32) < length
    high = jnp.where(alive, jnp.minimum(position + 1, kv_len) if spec.causal else kv_len, 0)
    low = jnp.maximum(position - (spec.window - 1), 0) if spec.window is not None else jnp.zeros_like(position)
    low = jnp.where(alive, low, jnp.iinfo(jnp.int32).max)
    begin, end = low.min(), high.max()
    scale = jnp.float32(spec.scale)
    if extras.key_scale is not None:
        scale = scale * extras.key_scale

    def step(j: Array, state: Softmax) -> Softmax:
        entry = j * static.block_pages + jnp.arange(static.block_pages, dtype=jnp.int32)
        listed = entry * size < kv_len
        index = jnp.where(listed, arrays.page_ids[jnp.where(listed, arrays.page_offsets[row] + entry, 0)], 0)
        at = j * block + jnp.arange(block, dtype=jnp.int32)
        live = (at >= begin) & (at < end)

        def gather(stored: Array) -> Array:
            found = from_storage(stored[index + page_base], pool.dtype)
            found = found.reshape(block, kv_heads, -1)
            found = jnp.where(live[:, None, None], found, jnp.zeros((), found.dtype))
            return found.astype(jnp.float32)

        seen = (at[None] >= low[:, None]) & (at[None] < high[:, None])
        seen = jnp.tile(seen, (queries // tile, 1))[None]
        logits = jnp.einsum("kmd,skd->kms", q, gather(pool.keys), precision="highest") * scale
        if spec.soft_cap is not None:
            cap = jnp.float32(spec.soft_cap)
            logits = cap * jnp.tanh(logits / cap)
        logits = jnp.where(seen, logits, -jnp.inf)
        top = jnp.maximum(state.top, logits.max(-1))
        base = jnp.where(jnp.isneginf(top), 0.0, top)
        weights = jnp.exp(logits - base[..., None])
        decay = jnp.exp(state.top - base)
        added = jnp.einsum("kms,ske->kme", weights, gather(pool.values), precision="highest")
        return Softmax(top, state.total * decay + weights.sum(-1), state.weighted * decay[..., None] + added)

    zeros = jnp.zeros((kv_heads, queries), jnp.float32)
    empty = Softmax(zeros - jnp.inf, zeros, jnp.zeros((kv_heads, queries, pool.values.shape[3]), jnp.float32))
    top, total, weighted = lax.fori_loop(begin // block, (end + block - 1) // block, step, empty)
    if extras.sinks is not None:
        sink = jnp.repeat(extras.sinks.reshape(kv_heads, -1), tile, axis=1)
        nothing = jnp.isneginf(top)
        high_top = jnp.where(nothing, top, jnp.maximum(top, sink))
        decay = jnp.where(nothing, 1.0, jnp.exp(top - high_top))
        total = total * decay + jnp.where(nothing, 0.0, jnp.exp(sink - high_top))
        weighted, top = weighted * decay[..., None], high_top
    out = weighted / jnp.where(total == 0, 1.0, total)[..., None]
    if extras.value_scale is not None:
        out = out * extras.value_scale
    return out, top + jnp.log(total)
