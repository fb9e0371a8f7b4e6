"""Attention of one work item at a time: online softmax in float32 over blocks of pages.

Cost follows the rows' real lengths. The arithmetic of an item sees its own queries and pages only, at shapes that
depend on nothing else, so neighbours, padding and page numbering cannot reach its bits. Some habits of XLA's CPU
backend would let the number of heads or of queries reach them, and are kept out:

- a matrix product of one row, and one of more than some fifty, is summed in another order: products have 2 to
  `MAX_ROWS` rows, and at most 256 positions to sum over. So is a plain sum: row sums are products with ones;
- the bits of an exponential or a logarithm depend on where in a vector an element sits, and on what its loop is
  compiled into. Each runs unconditionally over a last axis of a multiple of `LANES` elements; a query's running state
  is `LANES` equal copies;
- a product whose only use is a sum may or may not be contracted into it. Differences of logits are taken before they
  are scaled, and what ends the softmax reads the scaled top from memory, where the loop left it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from paged.backends.moves import from_storage
from paged.backends.protocol import AttentionExtras, KvArrays
from paged.backends.xla.plan import LANES, Items, PlanArrays, StaticPlan
from paged.common import AttentionSpec

MAX_ROWS = 48
_UNROLLED_PAGES = 16


class Softmax(NamedTuple):
    """Running state of rows of queries: the largest logit, Σ exp(logit − top), and Σ exp(logit − top) · value.

    `top` is in units of `_unit`, `nats` is the same in nats.
    """

    top: Float[Array, "*rows lanes"]
    nats: Float[Array, "*rows lanes"]
    total: Float[Array, "*rows lanes"]
    weighted: Float[Array, "*rows columns"]

    @classmethod
    def empty(cls, *rows: int, width: int) -> Softmax:
        """Of queries that have seen nothing."""
        zero = jnp.zeros((*rows, LANES), jnp.float32)
        return cls(zero - jnp.inf, zero - jnp.inf, zero, jnp.zeros((*rows, width), jnp.float32))


class Visible(NamedTuple):
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
    signed = query.astype(jnp.float32) * (1.0 if spec.scale >= 0 else -1.0)  # exact; `_unit` then is not negative
    if extras.key_scale is not None:
        signed = signed * extras.key_scale
    padded = jnp.pad(signed, ((0, static.tile), (0, 0), (0, 0)))
    outputs = jnp.zeros((tokens + static.tile, heads, width), jnp.float32)
    lses = jnp.full((tokens + static.tile, heads, LANES), -jnp.inf, jnp.float32)

    def loop(items: Items, tile: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        part = next(p for p in (tile, 16, 8, 4, 2, 1) if p <= tile and (p * group <= MAX_ROWS or p == 1))
        sinks = None
        if extras.sinks is not None:
            sinks = jnp.repeat(extras.sinks.reshape(kv_heads, group), part, axis=1)[None, :, :, None]

        def one(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            first, length, row = items.first[i], items.length[i], items.row[i]
            q = lax.dynamic_slice_in_dim(padded, first, tile).reshape(-1, part, kv_heads, group, padded.shape[2])
            q = q.transpose(0, 2, 3, 1, 4).reshape(-1, kv_heads, group * part, padded.shape[2])
            visible = _visible(arrays, row, first, length, tile, spec)
            state = _item(q, row, visible, pool, page_base, static, arrays, spec)
            live = (jnp.arange(tile) < length)[:, None, None]

            def store(kept: Array, new: Array) -> Array:
                new = new.reshape(-1, kv_heads, group, part, new.shape[-1])
                new = new.transpose(0, 3, 1, 2, 4).reshape(tile, heads, -1)
                old = lax.dynamic_slice_in_dim(kept, first, tile)
                return lax.dynamic_update_slice_in_dim(kept, jnp.where(live, new, old), first, 0)

            out, lse = _finish(state, sinks)
            return store(carry[0], out), store(carry[1], lse)

        return lax.fori_loop(0, items.count, one, carry)

    carry = (outputs, lses)
    if static.prefill_items:
        carry = loop(arrays.prefill, static.tile, carry)
    if static.decode_items:
        carry = loop(arrays.decode, 1 if group > 1 else 2, carry)  # two rows at least
    out, lse = carry[0][:tokens], carry[1][:tokens, :, 0]
    if extras.value_scale is not None:
        out = out * extras.value_scale
    out = out.astype(query.dtype)
    return jnp.where(out == 0, jnp.zeros((), query.dtype), out), lse


def _unit(spec: AttentionSpec) -> float:
    """Nats of one unit of `_item`'s logits, before the sign that went into the query."""
    return abs(spec.scale) if spec.soft_cap is None else spec.soft_cap


def _visible(
    arrays: PlanArrays,
    row: Int32[Array, ""],
    first: Int32[Array, ""],
    length: Int32[Array, ""],
    tile: int,
    spec: AttentionSpec,
) -> Visible:
    kv_len, token = arrays.kv_lens[row], jnp.arange(tile, dtype=jnp.int32)
    position = kv_len - arrays.query_offsets[row + 1] + first + token
    high = jnp.minimum(position + 1, kv_len) if spec.causal else jnp.full_like(position, kv_len)
    low = jnp.zeros_like(position) if spec.window is None else jnp.maximum(position - (spec.window - 1), 0)
    high = jnp.where(token < length, high, 0)
    low = jnp.where(token < length, low, jnp.iinfo(jnp.int32).max)
    return Visible(low, high, low.min(), high.max())


def _item(
    query: Float[Array, "n k m d"],
    row: Int32[Array, ""],
    visible: Visible,
    pool: KvArrays,
    page_base: Int32[Array, ""] | int,
    static: StaticPlan,
    arrays: PlanArrays,
    spec: AttentionSpec,
) -> Softmax:
    """The softmax of an item's tokens, in `n` parts of `m` rows a KV head that share what is read of the pool."""
    parts, kv_heads, rows, _ = query.shape
    block, span = static.block_tokens, static.block_pages * static.rung.tokens_per_page
    low, high = visible.low.reshape(parts, -1), visible.high.reshape(parts, -1)

    def step(j: Array, state: Softmax) -> Softmax:
        offset = jnp.arange(block, dtype=jnp.int32)
        at = jnp.where(offset < span, j * span + offset, -1)
        live = ((at >= visible.begin) & (at < visible.end))[None, :, None]
        pages = _listed(arrays, row, j, static) + page_base

        def load(stored: Array) -> Float[Array, "k block columns"]:
            found = from_storage(_read(stored, pages, block), pool.dtype)
            return jnp.where(live, found, jnp.zeros((), found.dtype)).astype(jnp.float32)

        keys, values = load(pool.keys), load(pool.values)

        def part(inputs: tuple[Array, Array, Array, Softmax]) -> Softmax:
            query, low, high, state = inputs
            seen = (at[None] >= low[:, None]) & (at[None] < high[:, None])
            return _update(state, query, keys, values, jnp.tile(seen, (rows // low.shape[0], 1))[None], spec)

        return lax.map(part, (query, low, high, state))

    state = Softmax.empty(parts, kv_heads, rows, width=pool.values.shape[3])
    return lax.fori_loop(visible.begin // span, (visible.end + span - 1) // span, step, state)


def _update(
    state: Softmax,
    query: Float[Array, "k m d"],
    keys: Float[Array, "k b d"],
    values: Float[Array, "k b e"],
    seen: Bool[Array, "1 m b"],
    spec: AttentionSpec,
) -> Softmax:
    """The state after one more block of positions."""
    logits = _product("kmd,kbd->kmb", query, keys)
    if spec.soft_cap is not None:
        logits = jnp.tanh(logits * (abs(spec.scale) / spec.soft_cap))
    top = jnp.maximum(state.top, jnp.where(seen, logits, -jnp.inf).max(-1, keepdims=True))
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(jnp.where(seen, (logits - base[..., :1]) * _unit(spec), -jnp.inf))
    decay = jnp.exp(jnp.where(jnp.isneginf(state.top), -jnp.inf, (state.top - base) * _unit(spec)))
    ones = jnp.ones((*keys.shape[:2], LANES), jnp.float32)
    return Softmax(
        top=top,
        nats=jnp.where(jnp.isneginf(top), -jnp.inf, top * _unit(spec)),
        total=state.total * decay + _product("kmb,kbl->kml", weights, ones),
        weighted=state.weighted * decay[..., :1] + _product("kmb,kbe->kme", weights, values),
    )


def _finish(
    state: Softmax, sinks: Float[Array, "1 k m 1"] | None
) -> tuple[Float[Array, "n k m e"], Float[Array, "n k m lanes"]]:
    """Output and LSE with the sinks added; a query that saw nothing gets +0 and −∞, whatever the sinks."""
    empty = jnp.isneginf(state.nats)
    top, total, weighted = state.nats, state.total, state.weighted
    if sinks is not None:
        top = jnp.where(empty, state.nats, jnp.maximum(state.nats, sinks))
        base = jnp.where(empty, 0.0, top)
        decay = jnp.exp(state.nats - base)
        total = total * decay + jnp.exp(jnp.where(empty, -jnp.inf, sinks - base))
        weighted = weighted * decay[..., :1]
    return weighted / jnp.where(empty, 1.0, total)[..., :1], top + jnp.log(total)


def _listed(arrays: PlanArrays, row: Int32[Array, ""], j: Array, static: StaticPlan) -> Int32[Array, " b"]:
    """Pages of the row's j-th block; past its last page the sentinel, whose contents are masked."""
    entry = arrays.page_offsets[row] + j * static.block_pages + jnp.arange(static.block_pages, dtype=jnp.int32)
    listed = entry < arrays.page_offsets[row + 1]
    return jnp.where(listed, arrays.page_ids[jnp.where(listed, entry, 0)], 0)


def _read(stored: Shaped[Array, "p s k w"], pages: Int32[Array, " b"], block: int) -> Shaped[Array, "k block w"]:
    """Heads first, tokens of the pages in order, padded to the block.

    Few pages are sliced one by one: XLA's CPU backend computes a gather's address for every element.
    """
    count, (_, size, heads, width) = pages.shape[0], stored.shape
    if count > _UNROLLED_PAGES:
        found = stored[pages].reshape(count * size, heads, width).swapaxes(0, 1)
    else:
        slices = [lax.dynamic_slice_in_dim(stored, pages[i], 1)[0].swapaxes(0, 1) for i in range(count)]
        found = jnp.concatenate(slices, axis=1)
    return jnp.pad(found, ((0, 0), (0, block - count * size), (0, 0)))


def _product(axes: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(axes, left, right, precision=lax.Precision.HIGHEST)
