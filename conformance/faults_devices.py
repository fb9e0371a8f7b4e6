"""Faults that show on a mesh only; see `conformance.faults`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from conformance.faults import FAULTS, Call, Fault, _scatter
from paged.backends.moves import from_storage
from paged.backends.protocol import KvArrays, Rung

HEAD_AXIS, OTHER_AXIS = "tensor", "fsdp"
"""Names of mesh axes that the catalogue's meshes have."""


def _index(axis: str) -> Any:
    """This device's place on an axis; 0 where there is no such axis."""
    try:
        return lax.axis_index(axis)
    except NameError:
        return jnp.int32(0)


def _shard_heads_turned(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    """Every shard but the first hands its heads back in reverse, as if their numbers were those of another shard."""
    turned = _index(HEAD_AXIS) > 0
    return jnp.where(turned, out[:, ::-1], out), jnp.where(turned, lse[:, ::-1], lse)


def _replica_drifts(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    """Devices of an axis that does not shard heads write different keys."""
    other = _index(OTHER_AXIS) > 0
    return _scatter(pool, jnp.where(other, key[::-1], key), value, slots, drop=slots < 0)


def _gathers_heads(call: Call) -> None:
    """Something of the appended pool is added up over the head axis before the attention."""
    mark = from_storage(call.pool.keys[0, 0, 0, 0], call.pool.dtype).astype(jnp.float32)
    try:
        mark = lax.psum(mark, HEAD_AXIS)
    except NameError:
        return
    call.query = jnp.where(mark > jnp.inf, jnp.zeros_like(call.query), call.query)


def _gathers_pool(call: Call) -> None:
    """Every device gets all heads and reads those that are its own: right, and as much traffic as the pool is large."""
    try:
        size, rank = lax.axis_size(HEAD_AXIS), lax.axis_index(HEAD_AXIS)
    except NameError:
        return

    def own(stored: Any) -> Any:
        heads = stored.shape[2]
        whole = lax.all_gather(stored, HEAD_AXIS, axis=2, tiled=True)
        assert whole.shape[2] == size * heads
        return lax.dynamic_slice_in_dim(whole, rank * heads, heads, axis=2)

    call.pool = dataclasses.replace(call.pool, keys=own(call.pool.keys), values=own(call.pool.values))


def _reduces_over_heads(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    """The attention ends with a reduction over all shards of the head axis, of which nothing is seen in its values."""
    try:
        top = lax.pmax(jnp.max(lse), HEAD_AXIS)
    except NameError:
        return out, lse
    return jnp.where(jnp.isnan(top), jnp.zeros_like(out), out), lse


def _append_new_pool(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
    """As a kernel does that has an output of its own instead of an alias: what it does not write is not there."""
    zeros = dataclasses.replace(pool, keys=jnp.zeros_like(pool.keys), values=jnp.zeros_like(pool.values))
    return _scatter(zeros, key, value, slots, drop=slots < 0)


FAULTS["shard_heads_turned"] = Fault(after=_shard_heads_turned)
FAULTS["replica_drifts"] = Fault(append=_replica_drifts)
FAULTS["gathers_heads"] = Fault(before=_gathers_heads)
FAULTS["gathers_pool"] = Fault(before=_gathers_pool)
FAULTS["reduces_over_heads"] = Fault(after=_reduces_over_heads)
FAULTS["append_new_pool"] = Fault(append=_append_new_pool)
