"""Attention of each token over the pages of its own row: float64 inside, one rounding at the end.

The answer to one token is a function of its query, of the keys and values at the positions it sees, and of nothing
else. Two habits make that true of the bits, before the final rounding already:

- Every sum is a tree over positions, or over head dim, of a shape fixed by their number alone: not by the page size,
  the batch, the shard, or what a library's matrix product would choose.
- Every product that is summed is exact (24 bits times 24, or 24 times a float64 in two parts), so that it does not
  matter whether a compiler fuses a product and a sum into one operation, which none can be kept from.

Visible keys and values are finite; an infinity or NaN among them, or in a query, may make that token's output NaN.
"""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float64, Int32

from paged.backends.protocol import AttentionExtras, KvArrays, TableArrays
from paged.common import AttentionSpec
from paged.reference.rounding import round_once, widen

_TOKENS = 8  # at a time: bounds the memory
_POSITIONS = 64  # at a time: part of the order of the sums, hence of the definition


class TokenRows(eqx.Module):
    """What attention has to know of a page table, for each token: where its row's pages are, and where it sits.

    - `position`: absolute, counted so that the row's last token sits at its length − 1; `kv_len`: of its row, 0 for
      padding tokens and empty rows.
    - `first_page`: index into `page_ids` of its row's first page. `page_ids` ends in one more entry, the sentinel.
    """

    position: Int32[Array, " t"]
    kv_len: Int32[Array, " t"]
    first_page: Int32[Array, " t"]
    page_ids: Int32[Array, " l"]


def token_rows(table: TableArrays) -> TokenRows:
    """The rows of a table, seen from its tokens. Padding tokens belong to an empty row after the last."""
    token = jnp.arange(table.write_slots.shape[0], dtype=jnp.int32)
    ends = table.query_offsets[1:]
    row = jnp.sum(ends[None] <= token[:, None], axis=1, dtype=jnp.int32)
    end, kv_len, first_page = (jnp.append(x, jnp.int32(0))[row] for x in (ends, table.kv_lens, table.page_offsets[:-1]))
    return TokenRows(
        position=kv_len - end + token,
        kv_len=kv_len,
        first_page=first_page,
        page_ids=jnp.append(table.page_ids, jnp.int32(0)),
    )


@functools.partial(jax.jit, static_argnames="spec")
def attend(
    query: Float[Array, "t h d"],
    pool: KvArrays,
    page_base: Int32[Array, ""] | int,
    tokens: TokenRows,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> tuple[Float[Array, "t h e"], Float[Array, "t h"]]:
    """Output in the query's dtype and natural-log LSE in float32, each the exact value rounded once.

    - `page_base` is added to page ids: layer × pages of one layer.
    - Output +0 and LSE −∞ for padding tokens and for the tokens of empty rows, with sinks too; a zero is +0.
    - Positions that a token does not see are never read, whatever bits they hold; neither is the sentinel.
    """
    with jax.enable_x64(True):
        out, lse = exact(query, pool, page_base, tokens, spec, extras)
        return round_once(out, query.dtype.name), round_once(lse, "float32")  # rounded inside: float64 must not leave


def exact(
    query: Float[Array, "t h d"],
    pool: KvArrays,
    page_base: Int32[Array, ""] | int,
    tokens: TokenRows,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> tuple[Float64[Array, "t h e"], Float64[Array, "t h"]]:
    """`attend` before its rounding. Call it inside `jax.enable_x64(True)`."""
    count, heads = query.shape[:2]
    stop = jnp.minimum(tokens.position + 1, tokens.kv_len) if spec.causal else tokens.kv_len
    start = jnp.zeros_like(stop) if spec.window is None else jnp.maximum(tokens.position - (spec.window - 1), 0)
    block = functools.partial(_block, pool=pool, base=page_base, page_ids=tokens.page_ids, spec=spec, extras=extras)
    wide = max(1, min(_TOKENS, count))
    blocks = -(-count // wide)

    def cut(x: Array) -> Array:  # zeros make tokens that see nothing
        whole = jnp.pad(x, [(0, blocks * wide - count)] + [(0, 0)] * (x.ndim - 1))
        return whole.reshape(blocks, wide, *x.shape[1:])

    out, lse = lax.map(lambda cuts: block(*cuts), tuple(cut(x) for x in (query, start, stop, tokens.first_page)))
    return out.reshape(-1, heads, out.shape[-1])[:count], lse.reshape(-1, heads)[:count]


def _block(
    query: Float[Array, "t h d"],
    start: Int32[Array, " t"],
    stop: Int32[Array, " t"],
    first_page: Int32[Array, " t"],
    *,
    pool: KvArrays,
    base: Int32[Array, ""] | int,
    page_ids: Int32[Array, " l"],
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> tuple[Float64[Array, "t k g e"], Float64[Array, "t k g"]]:
    """Tokens that see positions `start` .. `stop` − 1 of the row whose pages are listed from `first_page` on."""
    size, kv_heads = pool.keys.shape[1:3]
    count, heads, width = query.shape
    group = heads // kv_heads  # query head h reads KV head h // group
    q = widen(query, query.dtype.name).reshape(count, kv_heads, group, 1, width)
    base = jnp.asarray(base, jnp.int32)

    def positions(step: Array | int) -> tuple[Array, Array]:
        at = (step * _POSITIONS + jnp.arange(_POSITIONS, dtype=jnp.int32))[None]
        return at, (at >= start[:, None]) & (at < stop[:, None])

    def read(stored: Array, step: Array | int) -> Array:  # (tokens, KV heads, 1, positions, elements)
        at, seen = positions(step)
        page = page_ids[jnp.where(seen, first_page[:, None] + at // size, page_ids.shape[0] - 1)] + base
        found = widen(stored[page, jnp.where(seen, at % size, 0)], pool.dtype.name)
        # Before any arithmetic: a weight of zero does not make a NaN harmless.
        return jnp.swapaxes(jnp.where(seen[..., None, None], found, np.float64(0)), 1, 2)[:, :, None]

    def logits(step: Array | int) -> Array:  # (tokens, KV heads, group, positions)
        s = _sum(q * read(pool.keys, step), axis=4)
        if extras.key_scale is not None:
            s = _times(s, widen(extras.key_scale, "float32"))
        s = _times(s, np.float64(np.float32(spec.scale)))
        if spec.soft_cap is not None:
            cap = np.float64(np.float32(spec.soft_cap))  # the mask below stands between this product and a sum
            s = cap * jnp.tanh(s / cap)
        return jnp.where(positions(step)[1][:, None, None], s, np.float64(-np.inf))

    def raise_top(step: Array | int, top: Array) -> Array:
        return jnp.maximum(top, logits(step).max(-1))

    def add(step: Array | int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        seen = positions(step)[1][:, None, None]
        weight = jnp.where(seen, jnp.exp(logits(step) - top[..., None]), np.float64(0))
        high, low = (part[..., None] for part in _parts(weight))
        v = read(pool.values, step)
        return sums[0] + _sum(weight, axis=3), sums[1] + (_sum(high * v, axis=3) + _sum(low * v, axis=3))

    some = stop > start
    first = jnp.min(jnp.where(some, start, np.int32(2**31 - 1))) // _POSITIONS
    last = -(-jnp.max(jnp.where(some, stop, np.int32(0))) // _POSITIONS)
    shape = (count, kv_heads, group)
    sinks = None
    if extras.sinks is not None:
        sinks = jnp.broadcast_to(widen(extras.sinks, "float32").reshape(1, kv_heads, group), shape)
    top = jnp.full(shape, -np.inf, jnp.float64) if sinks is None else sinks
    # The maximum first: it is exact whatever the order, and no sum is ever rescaled.
    top = lax.fori_loop(first, last, raise_top, top)
    total = jnp.zeros(shape, jnp.float64) if sinks is None else jnp.exp(sinks - top)
    total, out = lax.fori_loop(first, last, add, (total, jnp.zeros((*shape, pool.values.shape[3]), jnp.float64)))
    if extras.value_scale is not None:
        out = out * widen(extras.value_scale, "float32")
    some = some[:, None, None]
    total = jnp.where(some, total, np.float64(1))
    lse = jnp.where(some, top + jnp.log(total), np.float64(-np.inf))
    return jnp.where(some[..., None], out / total[..., None], np.float64(0)), lse


def _sum(x: Array, *, axis: int) -> Array:
    """Sum along `axis` as a tree of halves: its order depends on the length alone, and is the same everywhere."""
    while (length := x.shape[axis]) > 1:
        half = 1 << ((length - 1).bit_length() - 1)
        low, high = (lax.slice_in_dim(x, *span, axis=axis) for span in ((0, half), (half, length)))
        if length < 2 * half:
            missing = [(0, 2 * half - length if i == axis else 0, 0) for i in range(x.ndim)]
            high = lax.pad(high, np.float64(0), missing)
        x = low + high
    return lax.squeeze(x, (axis,))


def _parts(x: Array) -> tuple[Array, Array]:
    """`x` as a sum of two numbers of at most 27 bits: the product of either with a number of 24 bits is exact."""
    high_bits = lax.bitcast_convert_type(x, jnp.uint64) & np.uint64(2**64 - 2**26)
    high = lax.bitcast_convert_type(high_bits, jnp.float64)
    return high, x - high


def _times(x: Array, y: Array | np.float64) -> Array:
    """x · y rounded once, for a `y` of 24 bits. A plain product could be fused with the sum that it goes into."""
    high, low = _parts(x)
    return high * y + low * y
