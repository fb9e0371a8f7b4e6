"""Faults that need more than one call, or more than one row on a page, to show; see `conformance.faults`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from conformance.faults import FAULTS, Call, Fault

_kept: dict[Any, Any] = {}
"""What the faults below keep from call to call, by fault and shape."""


def _recall(fault: str, *arrays: jax.Array) -> Any:
    """The arrays of the call before, those of this one the first time; these are kept for the next."""
    name = (fault, tuple((a.shape, str(a.dtype)) for a in arrays))

    def swap(*now: Any) -> Any:
        before = _kept.get(name, now)
        _kept[name] = tuple(np.array(x) for x in now)
        return tuple(np.asarray(x) for x in before)

    shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    return io_callback(swap, shapes, *arrays, ordered=False)


def _kept_page_list(call: Call) -> None:
    (ids,) = _recall("kept_page_list", call.table.page_ids)
    call.list_pages(ids)


def _kept_lengths(call: Call) -> None:
    (kv_lens,) = _recall("kept_lengths", call.table.kv_lens)
    row = jnp.minimum(call.row_of_token, call.rung.rows - 1)
    kv_len = jnp.where(call.row_of_token < call.rung.rows, kv_lens[row], 0)
    token = jnp.arange(call.rung.tokens, dtype=jnp.int32)
    position = kv_len - call.table.query_offsets[row + 1] + token
    call.rows = dataclasses.replace(call.rows, kv_len=kv_len, position=position)


def _kept_pages(call: Call) -> None:
    """The pool that the attention of the call before saw."""
    keys, values = _recall("kept_pages", call.pool.keys, call.pool.values)
    call.pool = dataclasses.replace(call.pool, keys=keys, values=values)


def _shared_page_once(call: Call) -> None:
    """A page that several rows list is read by the first of them; the others find the sentinel there."""
    ids = call.table.page_ids
    entry = jnp.arange(ids.shape[0])
    before = (ids[None] == ids[:, None]) & (entry[None] < entry[:, None]) & (ids != 0)[:, None]
    call.list_pages(jnp.where(before.any(1), jnp.int32(0), ids))


FAULTS["kept_page_list"] = Fault(before=_kept_page_list)
FAULTS["kept_lengths"] = Fault(before=_kept_lengths)
FAULTS["kept_pages"] = Fault(before=_kept_pages)
FAULTS["shared_page_once"] = Fault(before=_shared_page_once)
