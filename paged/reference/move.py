"""Appending, scrubbing and copying: movement of bits, which computes nothing."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from paged.backends.protocol import KvArrays


def append(
    pool: KvArrays, key: Shaped[Array, "t k d"], value: Shaped[Array, "t k e"], slots: Int32[Array, " t"]
) -> KvArrays:
    """Token i's key and value at slot `slots[i]` = row × tokens per page + offset; a negative slot writes nothing.

    `key` and `value` are elements of the pool's dtype; where the pool is stored as words, their bits are stored.
    """
    rows, size = pool.keys.shape[:2]
    row, offset = jnp.where(slots >= 0, slots // size, rows), slots % size

    def write(stored: Array, new: Array) -> Array:
        bits = new if new.dtype == stored.dtype else lax.bitcast_convert_type(new, stored.dtype)
        return stored.at[row, offset].set(bits, mode="drop")

    return dataclasses.replace(pool, keys=write(pool.keys, key), values=write(pool.values, value))


def scrub(pool: KvArrays, pages: Int32[Array, " n"]) -> KvArrays:
    """+0 in every element of the named rows of the pool; a negative entry names none."""

    def clear(stored: Array) -> Array:
        return stored.at[jnp.where(pages >= 0, pages, stored.shape[0])].set(jnp.zeros((), stored.dtype), mode="drop")

    return dataclasses.replace(pool, keys=clear(pool.keys), values=clear(pool.values))


def copy_pages(pool: KvArrays, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> KvArrays:
    """Rows `target` as rows `source` were before the call; a negative target names none."""

    def move(stored: Array) -> Array:
        found = stored[jnp.where(target >= 0, source, 0)]
        return stored.at[jnp.where(target >= 0, target, stored.shape[0])].set(found, mode="drop")

    return dataclasses.replace(pool, keys=move(pool.keys), values=move(pool.values))
