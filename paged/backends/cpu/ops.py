"""The FFI calls of the compiled library. Nothing here decides anything."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends.cpu.library import ffi_target
from paged.backends.protocol import (
    AttentionExtras,
    KvArrays,
    LayerAt,
    LayerSizes,
    LayerWeights,
    StepPlan,
    TableArrays,
)
from paged.common import AttentionSpec

KINDS = (
    *("float32", "bfloat16", "float16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8"),
)
"""Element types of pools, in the order of `Kind` in csrc/elements.h."""

_PANEL = 32


def append(
    pool: KvArrays, key: Shaped[Array, "t k d"], value: Shaped[Array, "t k e"], slots: Int32[Array, " t"]
) -> KvArrays:
    """Bits moved to absolute slots, in place; negative slots are skipped."""
    call = jax.ffi.ffi_call(
        ffi_target("paged_cpu_append"), _like(pool.keys, pool.values), input_output_aliases=_same(2)
    )
    keys, values = call(pool.keys, pool.values, key, value, slots)
    return KvArrays(keys, values, words_of=pool.words_of)


def attend(
    query: Float[Array, "t h d"],
    pool: KvArrays,
    page_base: Int32[Array, ""] | int,
    table: TableArrays,
    spec: AttentionSpec,
    extras: AttentionExtras,
) -> tuple[Float[Array, "t h e"], Float[Array, "t h"]]:
    """Output in the query's dtype, and LSE."""
    tokens, heads, _ = query.shape
    out = (
        jax.ShapeDtypeStruct((tokens, heads, pool.values.shape[3]), query.dtype),
        jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
    )
    one = jnp.ones((), jnp.float32)
    call = jax.ffi.ffi_call(ffi_target("paged_cpu_attend"), out)
    out, lse = call(
        *(query, pool.keys, pool.values),
        *(table.kv_lens, table.query_offsets, table.page_offsets, table.page_ids),
        jnp.asarray(page_base, jnp.int32),
        jnp.zeros((0,), jnp.float32) if extras.sinks is None else extras.sinks,
        *(one if scale is None else scale for scale in (extras.key_scale, extras.value_scale)),
        kind=np.int64(KINDS.index(pool.dtype.name)),
        **_options(spec),
    )
    return out, lse


def layers(
    x: Float[Array, "t m"],
    pool: KvArrays,
    weights: LayerWeights,
    counter: Int32[Array, ""],
    at: LayerAt,
    cos: Float[Array, "t half"],
    sin: Float[Array, "t half"],
    plan: StepPlan,
    sizes: LayerSizes,
    eps: float,
) -> tuple[Float[Array, "t m"], KvArrays]:
    """Layers of float32 weights over a float32 pool; residual stream and pool in place."""
    table: TableArrays = plan.arrays
    work = jax.ShapeDtypeStruct((_workspace(x.shape[0], sizes),), jnp.float32)
    call = jax.ffi.ffi_call(
        ffi_target("paged_cpu_layers"), (*_like(x, pool.keys, pool.values), work), input_output_aliases=_same(3)
    )
    x, keys, values, _ = call(
        *(x, pool.keys, pool.values),
        *(weights.attention_norm, weights.qkv, weights.output, weights.mlp_norm, weights.gate_up, weights.down),
        *(counter, cos, sin, plan.write_slots),
        *(table.kv_lens, table.query_offsets, table.page_offsets, table.page_ids),
        times=np.int64(at.times),
        plus=np.int64(at.plus),
        pool_times=np.int64(at.times * at.block),
        pool_plus=np.int64(at.plus * at.block + at.position),
        count=np.int64(at.count),
        num_pages=np.int64(plan.rung.num_pages),
        eps=np.float32(eps),
        **_options(plan.spec),
    )
    return x, KvArrays(keys, values, words_of=pool.words_of)


def logits(
    x: Float[Array, "n m"], norm: Float[Array, " m"], head: Float[Array, "v m"], eps: float
) -> Float[Array, "n v"]:
    """head · (norm of x), float32."""
    tokens, hidden = x.shape
    work = jax.ShapeDtypeStruct((2 * _panelled(tokens) * hidden,), jnp.float32)
    out = jax.ShapeDtypeStruct((tokens, head.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(ffi_target("paged_cpu_logits"), (out, work))(x, norm, head, eps=np.float32(eps))[0]


def _options(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "scale": np.float32(spec.scale),
        "cap": np.float32(spec.soft_cap or 0.0),
        "window": np.int64(spec.window or 0),
        "causal": np.int64(spec.causal),
    }


def _workspace(tokens: int, sizes: LayerSizes) -> int:
    """Floats of `Workspace` in csrc/layers.h."""
    attended = sizes.num_query_heads * sizes.head_dim
    packed = attended + 2 * sizes.num_kv_heads * sizes.head_dim
    features = sizes.hidden_size + max(sizes.hidden_size, attended) + packed + sizes.intermediate_size
    return _panelled(tokens) * (features + 2 * attended + sizes.head_dim)


def _panelled(tokens: int) -> int:
    return -(-tokens // _PANEL) * _PANEL


def _like(*arrays: Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)


def _same(count: int) -> dict[int, int]:
    return {i: i for i in range(count)}
