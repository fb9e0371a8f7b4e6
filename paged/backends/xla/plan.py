"""Work items: what the loops of `attend` go through.

One item is up to `tile` query tokens of one row. Rows with one new token (decode) are items of their own kind, so that
a decode step does not pay for a tile. The number of items is bounded by the rung; the real number is traced, and the
loops run exactly that often.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paged.backends.moves import rows_of
from paged.backends.protocol import Rung, TableArrays

TILE_TOKENS = 32
BLOCK_TOKENS = 128
LANES = 16


@dataclasses.dataclass(frozen=True)
class StaticPlan:
    """Static part: shapes and trip sizes.

    - `tile`: query tokens of a prefill item; `prefill_items`, `decode_items`: how many there can be.
    - `block_pages`: pages that one inner iteration reads; `block_tokens`: their positions, padded to `LANES`.
    """

    rung: Rung
    tile: int
    prefill_items: int
    decode_items: int
    block_pages: int
    block_tokens: int


class Items(eqx.Module):
    """`count` items; entry i covers tokens `first[i]` .. `first[i] + length[i]` of row `row[i]`."""

    row: Int32[Array, " i"]
    first: Int32[Array, " i"]
    length: Int32[Array, " i"]
    count: Int32[Array, ""]


class PlanArrays(eqx.Module):
    """Array part of the plan."""

    prefill: Items
    decode: Items
    kv_lens: Int32[Array, " r"]
    query_offsets: Int32[Array, " r+1"]
    page_offsets: Int32[Array, " r+1"]
    page_ids: Int32[Array, " l"]


def static_plan(rung: Rung) -> StaticPlan:
    """Shapes for one rung."""
    block_pages = max(1, BLOCK_TOKENS // rung.tokens_per_page)
    long_rows = min(rung.rows, rung.tokens // 2) if rung.max_query_len > 1 else 0
    return StaticPlan(
        rung=rung,
        tile=TILE_TOKENS,
        prefill_items=long_rows and min(rung.tokens // 2, rung.tokens // TILE_TOKENS + long_rows),
        decode_items=min(rung.rows, rung.tokens),
        block_pages=block_pages,
        block_tokens=-(-block_pages * rung.tokens_per_page // LANES) * LANES,
    )


def plan_arrays(static: StaticPlan, table: TableArrays) -> PlanArrays:
    """Items of one step, from its lengths. Empty rows have none: nothing writes their output."""
    query_lens = table.query_offsets[1:] - table.query_offsets[:-1]
    live = jnp.where(table.kv_lens > 0, query_lens, 0)
    tiles = jnp.where(live > 1, (live + static.tile - 1) // static.tile, 0)
    return PlanArrays(
        prefill=_items(table, live, tiles, static.tile, static.prefill_items),
        decode=_items(table, live, (live == 1).astype(jnp.int32), 1, static.decode_items),
        query_offsets=table.query_offsets,
        page_offsets=table.page_offsets,
        page_ids=table.page_ids,
        kv_lens=table.kv_lens,
    )


def _items(
    table: TableArrays, query_lens: Int32[Array, " r"], items: Int32[Array, " r"], tile: int, bound: int
) -> Items:
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(items, dtype=jnp.int32)])
    row = jnp.minimum(rows_of(offsets, bound), max(query_lens.shape[0] - 1, 0))
    at = (jnp.arange(bound, dtype=jnp.int32) - offsets[row]) * tile
    length = jnp.minimum(query_lens[row] - at, tile)
    return Items(row=row, first=table.query_offsets[row] + at, length=length, count=offsets[-1])
