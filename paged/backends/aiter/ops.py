"""The FFI calls. Shapes are one shard's; every array is contiguous, "NHD", int32 indices.

Attributes are given the contract's types here, in one place: XLA checks their widths at the first execution only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends.aiter import contract
from paged.backends.aiter.contract import Target
from paged.backends.protocol import KvArrays

_COERCE = {"f32": np.float32, "i64": np.int64, "i1": bool, "string": str}


def call(target: Target, results: tuple[Any, ...], operands: tuple[Any, ...], **attributes: Any) -> Sequence[Array]:
    """One call of a target: results by shape and dtype, attributes coerced to the contract's types.

    Raises `TypeError` for an attribute that is missing or not the contract's: such a call could never be decoded.
    """
    wanted = dict(target.attributes)
    if wanted.keys() != attributes.keys():
        raise TypeError(f"{target.name} has the attributes {sorted(wanted)}, got {sorted(attributes)}.")
    typed = {name: _COERCE[kind](attributes[name]) for name, kind in wanted.items()}
    structs = tuple(jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results)
    return jax.ffi.ffi_call(target.name, structs, input_output_aliases=dict(target.aliases))(*operands, **typed)


def append(
    pool: KvArrays, key: Shaped[Array, "t k d"], value: Shaped[Array, "t k d"], slots: Int32[Array, " t"]
) -> KvArrays:
    """Write token i to absolute slot `slots[i]`, in place; a negative slot is skipped.

    The scales are 1 and never null: the kernel divides by them whatever the cache's dtype is.
    """
    one = jnp.ones(1, jnp.float32)
    pools = (pool.keys, pool.values)
    keys, values = call(contract.APPEND, pools, (key, value, slots, one, one, *pools), kv_cache_dtype="auto")
    return KvArrays(keys, values, words_of=pool.words_of)


def decode(
    query: Float[Array, "r h d"],
    pool: KvArrays,
    lists: tuple[Array, Array, Array],
    *,
    workspace_bytes: int,
    attributes: Mapping[str, Any],
) -> Float[Array, "r h d"]:
    """One token per row. `lists`: page offsets, page ids and last-page lengths; no row may be empty."""
    one = jnp.ones(1, jnp.float32)
    workspace = jnp.zeros(workspace_bytes, jnp.uint8)
    operands = (query, pool.keys, pool.values, *lists, one, one, workspace)
    # The kernel takes a soft cap and ignores it; whoever asks for one was refused before.
    (out,) = call(contract.DECODE, (query,), operands, logits_soft_cap=0.0, **attributes)
    return out


def prefill(
    query: Float[Array, "t h d"],
    pool: KvArrays,
    query_offsets: Int32[Array, " r1"],
    lists: tuple[Array, Array, Array],
    *,
    window: int | None,
    attributes: Mapping[str, Any],
) -> Float[Array, "t h d"]:
    """Ragged rows, causal and bottom-right aligned. Tokens past query_offsets[-1] are left unwritten.

    `window` counts the token itself, the kernel only earlier ones.
    """
    left, right = (-1, -1) if window is None else (window - 1, 0)
    (out,) = call(
        contract.PREFILL,
        (query,),
        (query, pool.keys, pool.values, query_offsets, *lists),
        logits_soft_cap=0.0,
        causal=True,
        window_size_left=left,
        window_size_right=right,
        **attributes,
    )
    return out
