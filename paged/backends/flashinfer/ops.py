"""The FFI calls. Shapes are one shard's; every array is contiguous, "NHD", int32 indices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends.protocol import KvArrays, PackedHeads

_LN2 = math.log(2.0)


def append(
    target: str,
    pool: KvArrays,
    key: Shaped[Array, "t k d"],
    value: Shaped[Array, "t k d"],
    rows: Int32[Array, " t"],
    offsets: Int32[Array, " t"],
) -> KvArrays:
    """Write token i to page `rows[i]`, slot `offsets[i]`, in place: the pool's operands are aliased to the results.

    The kernel takes a batch of page lists; here every token is a request of one page, which is the slot-mapping form.
    It has no value for "skip", so padding must be aimed at a page that nobody reads.
    """
    tokens = key.shape[0]
    each = jnp.arange(tokens + 1, dtype=jnp.int32)
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pool.keys, pool.values))
    call = jax.ffi.ffi_call(target, results, input_output_aliases={4: 0, 5: 1})
    ones = jnp.ones(tokens, jnp.int32)
    keys, values = call(key, value, each[:-1], offsets, pool.keys, pool.values, rows, each, ones, layout=np.int64(0))
    return KvArrays(keys, values, words_of=pool.words_of)


def rotate_append(
    target: str,
    pool: KvArrays,
    heads: PackedHeads,
    slots: Int32[Array, " t"],
    page_ids: Int32[Array, " l"],
    layer: Int32[Array, ""],
    num_pages: int,
) -> tuple[Float[Array, "t h d"], KvArrays, Int32[Array, " l"]]:
    """Turn query and key, write key and value to this layer's slots in place, and offset page ids to the layer."""
    tokens, kv_heads, more, dim = heads.packed.shape
    results = (
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pool.keys, pool.values)),
        jax.ShapeDtypeStruct((tokens, kv_heads * (more - 2), dim), heads.packed.dtype),
        jax.ShapeDtypeStruct(page_ids.shape, jnp.int32),
    )
    call = jax.ffi.ffi_call(target, results, input_output_aliases={6: 0, 7: 1})
    keys, values, query, pages = call(
        heads.packed,
        heads.cos,
        heads.sin,
        slots,
        page_ids,
        layer,
        pool.keys,
        pool.values,
        num_pages=np.int64(num_pages),
    )
    return query, KvArrays(keys, values, words_of=pool.words_of), pages


def paged_decode(
    target: str,
    query: Float[Array, "t h d"],
    pool: KvArrays,
    page_ids: Int32[Array, " l"],
    words: Int32[Array, " w"],
    sinks: Float[Array, " h"] | None,
    *,
    items: int,
    blocks: int,
    float_bytes: int,
    attributes: dict[str, Any],
) -> tuple[Float[Array, "n h d"], Float[Array, "n h"]]:
    """Output of each item in the query's dtype, and its natural-log LSE; +0 and −∞ for an item without attention."""
    shape = (items, *query.shape[1:])
    results = (
        jax.ShapeDtypeStruct(shape, query.dtype),
        jax.ShapeDtypeStruct(shape[:2], jnp.float32),
        jax.ShapeDtypeStruct((max(float_bytes, 16),), jnp.uint8),
    )
    given = jnp.zeros(1, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    out, lse, _ = jax.ffi.ffi_call(target, results)(
        query,
        pool.keys,
        pool.values,
        page_ids,
        words,
        given,
        blocks=np.int64(blocks),
        has_sinks=np.int64(sinks is not None),
        **attributes,
    )
    return out, lse


def attend(
    target: str,
    query: Float[Array, "n h d"],
    pool: KvArrays,
    lists: tuple[Array, ...],
    words: Int32[Array, " w"],
    key_scale: Float[Array, " 1"],
    out_dtype: str,
    plan: tuple[tuple[int, ...], int],
    attributes: dict[str, Any],
) -> tuple[Float[Array, "n h d"], Float[Array, "n h"]]:
    """Output in the module's dtype and natural-log LSE. Rows that the plan does not name are left unwritten.

    `lists`: the index arrays in the kernel's order. `plan`: its `plan_info` and the bytes of its float workspace, which
    is a result that nobody reads: XLA keeps it in temporary memory and reuses it across layers.
    """
    info, float_bytes = plan
    results = (
        jax.ShapeDtypeStruct(query.shape, jnp.dtype(out_dtype)),
        jax.ShapeDtypeStruct(query.shape[:2], jnp.float32),
        jax.ShapeDtypeStruct((max(float_bytes, 16),), jnp.uint8),
    )
    out, lse, _ = jax.ffi.ffi_call(target, results)(
        query, pool.keys, pool.values, *lists, words, key_scale, plan=np.asarray(info, np.int64), **attributes
    )
    return out, lse * jnp.float32(_LN2)
