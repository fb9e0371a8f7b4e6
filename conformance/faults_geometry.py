"""Faults of certain lengths, page sizes, head dims and encodings; see `conformance.faults`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from conformance.faults import FAULTS, Call, Fault
from paged.backends.moves import from_storage

TILE = 64
"""Elements that a kernel of these faults handles at a time."""


def _shorten(call: Call, which: Any) -> None:
    """Leave out the last token of the rows in which it lies and `which` holds."""
    rows = call.rows
    short = which & (rows.kv_len > 1)
    call.rows = dataclasses.replace(rows, kv_len=jnp.where(short, rows.kv_len - 1, rows.kv_len))


def _full_last_page_empty(call: Call) -> None:
    """The last page of a row is left out if it is full: its occupancy is taken to be n mod the page's size."""
    rows, size = call.rows, call.rung.tokens_per_page
    full = (rows.kv_len > size) & (rows.kv_len % size == 0)
    call.rows = dataclasses.replace(rows, kv_len=jnp.where(full, rows.kv_len - size, rows.kv_len))


def _power_of_two_short(call: Call) -> None:
    n = call.rows.kv_len
    _shorten(call, (n >= TILE) & ((n & (n - 1)) == 0))


def _prefix_ignored(call: Call) -> None:
    """A prompt's chunk sees its own tokens only, not what was cached before it."""
    row = jnp.minimum(call.row_of_token, call.rung.rows - 1)
    fed = call.table.query_offsets[row + 1] - call.table.query_offsets[row]
    size = call.rung.tokens_per_page
    # Whole pages only, so that the rows of the reference can say it.
    skip = jnp.where((fed > 1) & (call.rows.kv_len > 0), (call.rows.kv_len - fed) // size, 0)
    rows = call.rows
    call.rows = dataclasses.replace(
        rows,
        first_page=rows.first_page + skip,
        kv_len=rows.kv_len - skip * size,
        position=rows.position - skip * size,
    )


def _rows_without_tokens_shift(call: Call) -> None:
    """The k-th row that has tokens takes the lengths and pages of row k, counted without a gap."""
    table = call.table
    used = jnp.diff(table.query_offsets) > 0
    place = jnp.cumsum(used) - 1
    row = place[jnp.minimum(call.row_of_token, call.rung.rows - 1)]
    live = call.row_of_token < call.rung.rows
    last = table.query_offsets[jnp.minimum(call.row_of_token, call.rung.rows - 1) + 1]
    kv_len = jnp.where(live, table.kv_lens[row], 0)
    token = jnp.arange(call.rung.tokens, dtype=jnp.int32)
    call.rows = dataclasses.replace(
        call.rows, kv_len=kv_len, position=kv_len - last + token, first_page=table.page_offsets[row]
    )


def _short_row_zero(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    """A row shorter than a page, not the first, comes back as zeros."""
    short = (call.rows.kv_len < call.rung.tokens_per_page) & (call.row_of_token > 0)
    return jnp.where(short[:, None, None], jnp.zeros_like(out), out), lse


def _page_over_128(call: Call) -> None:
    """Slots of a page count modulo 128."""
    size = call.rung.tokens_per_page
    slot = np.arange(size) % 128
    keys, values = (x[:, slot] for x in (call.pool.keys, call.pool.values))
    call.pool = dataclasses.replace(call.pool, keys=keys, values=values)


def _head_dim_cut(call: Call) -> None:
    """q·k runs over the elements that fill whole tiles: of 80 or 96, the first 64."""
    d = call.head_dim
    whole = d // TILE * TILE
    if whole:
        call.query = call.query.at[..., whole:].set(jnp.zeros((), call.query.dtype))


def _last_of_group_window(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    """The last query head of every group has a window of one token less."""
    if call.spec.window is None or call.spec.window == 1:
        return out, lse
    from paged.reference.attend import attend

    spec = dataclasses.replace(call.spec, window=call.spec.window - 1)
    other, other_lse = attend(call.query, call.pool, call.page_base, call.rows, spec, call.extras)
    heads, kv_heads = call.query.shape[1], call.pool.keys.shape[2]
    last = np.arange(heads) % (heads // kv_heads) == heads // kv_heads - 1
    return jnp.where(last[:, None], other, out), jnp.where(last, other_lse, lse)


def _lse_base2_under_cap(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    return out, lse if call.spec.soft_cap is None else lse * np.float32(np.log2(np.e))


def _lse_negated(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
    return out, -lse


def _scale_twice(name: str) -> Callable[[Call], None]:
    def twice(call: Call) -> None:
        scale = getattr(call.extras, name)
        if scale is not None:
            call.extras = dataclasses.replace(call.extras, **{name: scale * scale})

    return twice


def _fnuz_as_fn(call: Call) -> None:
    """The bytes of an fnuz pool are taken for those of the type without nuz: half the exponent bias apart."""
    name = call.pool.dtype.name
    if name not in ("float8_e4m3fnuz", "float8_e5m2fnuz"):
        return
    plain = {"float8_e4m3fnuz": "float8_e4m3fn", "float8_e5m2fnuz": "float8_e5m2"}[name]
    keys, values = (
        from_storage(x.view(jnp.uint8), plain).astype(jnp.bfloat16) for x in (call.pool.keys, call.pool.values)
    )
    call.pool = dataclasses.replace(call.pool, keys=keys, values=values, words_of=None)


FAULTS["full_last_page_empty"] = Fault(before=_full_last_page_empty)
FAULTS["power_of_two_short"] = Fault(before=_power_of_two_short)
FAULTS["prefix_ignored"] = Fault(before=_prefix_ignored)
FAULTS["rows_without_tokens_shift"] = Fault(before=_rows_without_tokens_shift)
FAULTS["short_row_zero"] = Fault(after=_short_row_zero)
FAULTS["page_over_128"] = Fault(before=_page_over_128)
FAULTS["head_dim_cut"] = Fault(before=_head_dim_cut)
FAULTS["window_last_of_group"] = Fault(after=_last_of_group_window)
FAULTS["lse_base2_under_cap"] = Fault(after=_lse_base2_under_cap)
FAULTS["lse_negated"] = Fault(after=_lse_negated)
FAULTS["key_scale_twice"] = Fault(before=_scale_twice("key_scale"))
FAULTS["value_scale_twice"] = Fault(before=_scale_twice("value_scale"))
FAULTS["fnuz_as_fn"] = Fault(before=_fnuz_as_fn)
