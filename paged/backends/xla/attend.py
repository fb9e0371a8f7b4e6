"""Attention of one work item at a time: online softmax in float32 over blocks of pages.

Cost follows the rows' real lengths. The arithmetic of an item sees its own queries and pages only, at shapes that
depend on nothing else, so neighbours, padding and page numbering cannot reach its bits. Two habits of XLA's CPU backend
would let the number of heads or of queries reach them, and are kept out:

- a sum over the last axis, and a matrix product with one row or with an odd number of columns, are ordered by their
  shape. Row sums are products with ones, there are at least two rows, and columns are padded (`_columns`);
- the bits of an exponential or a logarithm depend on where in a vector an element sits. Each runs over a last axis of a
  multiple of `LANES` elements; a row's running state is `LANES` equal copies.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends.moves import from_storage
from paged.backends.protocol import AttentionExtras, KvArrays
from paged.backends.xla.plan import LANES, Items, PlanArrays, StaticPlan
from paged.common import AttentionSpec

_UNROLLED_PAGES = 16


class Softmax(NamedTuple):
    """Running state of m queries a head: the largest logit, Σ exp(logit − top), and Σ exp(logit − top) · value."""

    top: Float[Array, "k m lanes"]
    total: Float[Array, "k m lanes"]
    weighted: Float[Array, "k m columns"]


class Range(NamedTuple):
    """Positions that the tokens of an item see, low .. high − 1 each, and begin .. end − 1 together."""

    low: Int32[Array, " tile"]
    high: Int32[Array, " tile"]
    begin: Int32[Array, ""]
    end: Int32[Array, ""]


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
    lses = jnp.full((tokens + static.tile, heads, LANES), -jnp.inf, jnp.float32)

    def loop(items: Items, tile: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def one(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            first, length, row = items.first[i], items.length[i], items.row[i]
            q = lax.dynamic_slice_in_dim(padded, first, tile).reshape(tile, kv_heads, group, -1)
            q = q.transpose(1, 2, 0, 3).reshape(kv_heads, group * tile, -1).astype(jnp.float32)
            results = _item(
                q, row, _visible(arrays, row, first, length, tile, spec), pool, page_base, static, arrays, spec, extras
            )
            live = (jnp.arange(tile) < length)[:, None, None]

            def store(kept: Array, new: Array) -> Array:
                new = new.reshape(kv_heads, group, tile, -1).transpose(2, 0, 1, 3).reshape(tile, heads, -1)
                old = lax.dynamic_slice_in_dim(kept, first, tile)
                return lax.dynamic_update_slice_in_dim(kept, jnp.where(live, new, old), first, 0)

            return store(carry[0], results[0]), store(carry[1], results[1])

        return lax.fori_loop(0, items.count, one, carry)

    carry = (outputs, lses)
    if static.prefill_items:
        carry = loop(arrays.prefill, static.tile, carry)
    if static.decode_items:
        carry = loop(arrays.decode, 1 if group > 1 else 2, carry)  # two rows at least
    out = carry[0][:tokens].astype(query.dtype)
    return jnp.where(out == 0, jnp.zeros((), query.dtype), out), carry[1][:tokens, :, 0]


def _visible(
    arrays: PlanArrays,
    row: Int32[Array, ""],
    first: Int32[Array, ""],
    length: Int32[Array, ""],
    tile: int,
    spec: AttentionSpec,
) -> Range:
    kv_len, token = arrays.kv_lens[row], jnp.arange(tile, dtype=jnp.int32)
    position = kv_len - arrays.query_offsets[row + 1] + first + token
    high = jnp.minimum(position + 1, kv_len) if spec.causal else jnp.full_like(position, kv_len)
    low = jnp.zeros_like(position) if spec.window is None else jnp.maximum(position - (spec.window - 1), 0)
    high = jnp.where(token < length, high, 0)
    low = jnp.where(token < length, low, jnp.iinfo(jnp.int32).max)
    return Range(low, high, low.min(), high.max())


def _item(
    query: Float[Array, "k m d"],
    row: Int32[Array, ""],
    visible: Range,
    pool: KvArrays,
    page_base: Int32[Array, ""] | int,
    static: StaticPlan,
    arrays: PlanArrays,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> tuple[Float[Array, "k m e"], Float[Array, "k m lanes"]]:
    kv_heads, queries, _ = query.shape
    tile, block, width = visible.low.shape[0], static.block_tokens, pool.values.shape[3]
    scale = jnp.float32(spec.scale)
    if extras.key_scale is not None:
        scale = scale * extras.key_scale

    def step(j: Array, state: Softmax) -> Softmax:
        at = j * block + jnp.arange(block, dtype=jnp.int32)
        live = ((at >= visible.begin) & (at < visible.end))[None, :, None]
        pages = _listed(arrays, row, j, static) + page_base

        def load(stored: Array) -> Float[Array, "k block columns"]:
            found = from_storage(_gather(stored, pages), pool.dtype)
            return jnp.where(live, found, jnp.zeros((), found.dtype)).astype(jnp.float32)

        keys, values = load(pool.keys), load(pool.values)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, _columns(width) - width)))
        logits = _product("kmd,kbd->kmb", query, keys) * scale
        if spec.soft_cap is not None:
            cap = jnp.float32(spec.soft_cap)
            logits = cap * jnp.tanh(logits / cap)
        seen = (at[None] >= visible.low[:, None]) & (at[None] < visible.high[:, None])
        logits = jnp.where(jnp.tile(seen, (queries // tile, 1))[None], logits, -jnp.inf)
        top = jnp.maximum(state.top, logits.max(-1, keepdims=True))
        base = jnp.where(jnp.isneginf(top), 0.0, top)
        weights = jnp.exp(logits - base[..., :1])
        decay = jnp.exp(state.top - base)
        ones = jnp.ones((kv_heads, block, LANES), jnp.float32)
        return Softmax(
            top=top,
            total=state.total * decay + _product("kmb,kbl->kml", weights, ones),
            weighted=state.weighted * decay[..., :1] + _product("kmb,kbe->kme", weights, values),
        )

    nothing = jnp.zeros((kv_heads, queries, LANES), jnp.float32)
    state = Softmax(nothing - jnp.inf, nothing, jnp.zeros((kv_heads, queries, _columns(width)), jnp.float32))
    state = lax.fori_loop(visible.begin // block, (visible.end + block - 1) // block, step, state)
    if extras.sinks is not None:
        sinks = jnp.repeat(extras.sinks.reshape(kv_heads, -1), tile, axis=1)
        state = _add_sink(state, sinks)
    out = state.weighted[..., :width] / jnp.where(state.total == 0, 1.0, state.total)[..., :1]
    if extras.value_scale is not None:
        out = out * extras.value_scale
    return out, state.top + jnp.log(state.total)


def _add_sink(state: Softmax, sinks: Float[Array, "k m"]) -> Softmax:
    """The state with one more logit of no value; a query that saw nothing stays as it is."""
    empty = jnp.isneginf(state.top)
    top = jnp.where(empty, state.top, jnp.maximum(state.top, sinks[..., None]))
    base = jnp.where(empty, 0.0, top)
    decay = jnp.exp(state.top - base)
    extra = jnp.where(empty, 0.0, jnp.exp(sinks[..., None] - base))
    return Softmax(top, state.total * decay + extra, state.weighted * decay[..., :1])


def _listed(arrays: PlanArrays, row: Int32[Array, ""], j: Array, static: StaticPlan) -> Int32[Array, " b"]:
    """Pages of the row's j-th block; past its last page the sentinel, whose contents are masked."""
    entry = arrays.page_offsets[row] + j * static.block_pages + jnp.arange(static.block_pages, dtype=jnp.int32)
    listed = entry < arrays.page_offsets[row + 1]
    return jnp.where(listed, arrays.page_ids[jnp.where(listed, entry, 0)], 0)


def _gather(stored: Shaped[Array, "p s k w"], pages: Int32[Array, " b"]) -> Shaped[Array, "k block w"]:
    """Heads first, tokens of the pages in order.

    Few pages are sliced one by one: XLA's CPU backend computes a gather's address for every element.
    """
    count, (_, size, heads, width) = pages.shape[0], stored.shape
    if count > _UNROLLED_PAGES:
        return stored[pages].reshape(count * size, heads, width).swapaxes(0, 1)
    slices = [lax.dynamic_slice_in_dim(stored, pages[i], 1)[0].swapaxes(0, 1) for i in range(count)]
    return jnp.concatenate(slices, axis=1)


def _product(axes: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(axes, left, right, precision=lax.Precision.HIGHEST)


def _columns(width: int) -> int:
    """`width` padded so that a product's order of summation does not depend on its number of rows."""
    return LANES if width <= LANES else -(-width // 64) * 64
