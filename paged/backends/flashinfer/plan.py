"""Plans of our own for FlashInfer's kernels, built on the device inside the jitted step.

FlashInfer's planners are not used: what they choose depends on the batch, the number of heads and the number of SMs,
so the bits would too; their result is an XLA attribute, so a new one would be a recompilation; and one of them drops
blocks when a row is empty. Here the chunk of a split and the tile of queries are pinned, the attribute (`plan_info`)
is one constant per rung, and what depends on lengths lies in an int32 workspace that the kernels read on the device.

A row with one query token goes through the decode kernel and a longer one through a prefill kernel, in whatever batch
it comes, so the neighbours of a row do not enter its bits.

The workspaces' layouts are those that FlashInfer 0.7's kernels read (`scheduler.cuh`, the `PlanInfo` structs).
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paged.backends.protocol import Rung, TableArrays
from paged.common import pages_for

DECODE_TILE = 16
"""Query rows of a tile in tensor-core decode: one token of up to 16 query heads per KV head."""

_NO_CHUNK = 1 << 30

LONG_ROW = 8192
"""Rows of more tokens are cut into pieces twice as long by this project's kernel: fewer partial results, and enough
pieces all the same. It follows from the row's own length, so its neighbours do not enter its bits."""


@dataclasses.dataclass(frozen=True)
class StaticPlan:
    """What is constant per rung; the same for every number of shards.

    - `decode`: `"paged"` (this project's kernel), `"cuda_cores"` or `"tensor_cores"` (FlashInfer's).
    - `prefill`: `"fa2"`, `"fa3"`, or None in a rung of single tokens.
    - `chunk`: tokens of one piece of a row split in decode (see `LONG_ROW`); None for no split.
    - `decode_blocks`: bound on the pieces of all rows. `prefill_blocks`: bound on the tiles of queries.
    - `tile`: query rows of a prefill tile: tokens for fa3, tokens × group for fa2.
    - `ctas`: thread blocks per head that fa3 is launched with: the number of SMs.
    - `window`: tokens visible, where decode's pieces outside of it are left out; else None.
    - `fa2_tile`: of FA2, where a step that asks for sinks takes it instead of FA3.

    Where no row of the rung is longer than a chunk, nothing is split: one piece has the bits of the whole row, and the
    kernel that merges pieces is not run.
    """

    rung: Rung
    decode: str
    prefill: str | None
    chunk: int | None
    decode_blocks: int
    tile: int
    prefill_blocks: int
    ctas: int
    window: int | None = None
    fa2_tile: int = 64

    def as_fa2(self) -> StaticPlan:
        """The same plan with FA2 prefill."""
        if self.prefill == "fa2":
            return self
        blocks = _prefill_blocks(self.rung, self.fa2_tile, self.rung.group_size or 1)
        return dataclasses.replace(self, prefill="fa2", tile=self.fa2_tile, prefill_blocks=blocks, ctas=0)

    @property
    def by_token(self) -> bool:
        """Whether decode reads queries and writes outputs where the tokens are, rather than row by row."""
        return self.decode != "cuda_cores" and self.prefill is None


class PlanArrays(eqx.Module):
    """What depends on lengths.

    - `decode_words`, `prefill_words`: the kernels' int32 workspaces; `sink_words`: FA2's, for steps that ask for sinks.
      What a step does not read is not computed.
    - `first_token` (r,): each row's first token; `token_row` (t,): each token's row; both clipped into range.
    - `single`, `live` (t,): tokens of one-token rows; tokens whose output is attention (the others get +0).
    """

    decode_words: Int32[Array, " a"]
    prefill_words: Int32[Array, " b"] | None
    sink_words: Int32[Array, " c"] | None
    first_token: Int32[Array, " r"]
    token_row: Int32[Array, " t"]
    single: Bool[Array, " t"]
    live: Bool[Array, " t"]
    query_offsets: Int32[Array, " r1"]
    page_offsets: Int32[Array, " r1"]
    page_ids: Int32[Array, " l"]
    last_page_len: Int32[Array, " r"]


def static_plan(
    rung: Rung,
    *,
    decode: str,
    prefill: str,
    chunk: int | None,
    tile: int,
    ctas: int,
    window: int | None = None,
    fa2_tile: int = 64,
) -> StaticPlan:
    """Bounds for one rung. Blocks past the real number return at once, so the bounds cost little."""
    items = rung.tokens if decode == "paged" and rung.max_query_len <= 1 else rung.rows
    blocks = items
    chunk = None if chunk is not None and rung.max_kv_len <= chunk else chunk
    if chunk is not None:
        most = items + rung.listed_pages * rung.tokens_per_page // chunk
        blocks = min(items * max(1, pages_for(rung.max_kv_len, chunk)), most)
    long_rows = min(rung.rows, rung.tokens // 2)
    return StaticPlan(
        rung=rung,
        decode=decode,
        prefill=prefill if rung.max_query_len > 1 and long_rows else None,
        chunk=chunk,
        decode_blocks=max(1, blocks),
        tile=tile,
        prefill_blocks=_prefill_blocks(rung, tile, (rung.group_size or 1) if prefill == "fa2" else 1),
        ctas=ctas,
        window=window,
        fa2_tile=fa2_tile,
    )


def _prefill_blocks(rung: Rung, tile: int, rows_per_token: int) -> int:
    """Bound on the tiles of queries of all rows of at least two tokens."""
    return rung.tokens * rows_per_token // tile + min(rung.rows, rung.tokens // 2)


def plan_arrays(static: StaticPlan, table: TableArrays) -> PlanArrays:
    """Workspaces and masks of one step. Traceable."""
    rung, offsets, kv_lens = static.rung, table.query_offsets, table.kv_lens
    query_lens = offsets[1:] - offsets[:-1]
    token = jnp.arange(rung.tokens, dtype=jnp.int32)
    row = jnp.minimum(_find(offsets, token), max(rung.rows - 1, 0))
    single_row = (query_lens == 1) & (kv_lens > 0)
    live = (token < offsets[-1]) & (kv_lens[row] > 0)
    longer = jnp.where(single_row | (kv_lens == 0), 0, query_lens)
    prefill_words, sink_words = None, None
    if static.prefill == "fa3":
        prefill_words = _fa3_words(static, table, longer)
        sink_words = _fa2_words(static.as_fa2(), longer, kv_lens, offsets)
    elif static.prefill == "fa2":
        prefill_words = _fa2_words(static, longer, kv_lens, offsets)
    first_token = jnp.clip(offsets[:-1], 0, max(rung.tokens - 1, 0))
    single = single_row[row] & live
    if static.decode == "paged":
        decode_words = _paged_words(static, kv_lens, single_row, first_token, row, single, table.page_offsets)
    else:
        decode_words = _decode_words(static, jnp.where(single_row, kv_lens, 0), offsets, row)
    return PlanArrays(
        decode_words=decode_words,
        prefill_words=prefill_words,
        sink_words=sink_words,
        first_token=first_token,
        token_row=row,
        single=single,
        live=live,
        query_offsets=offsets,
        page_offsets=table.page_offsets,
        page_ids=table.page_ids,
        last_page_len=table.last_page_len,
    )


def decode_info(static: StaticPlan, *, query_heads: int, head_dim: int) -> tuple[tuple[int, ...], int]:
    """`plan_info` of the decode kernel and bytes of its float workspace, for the query heads of one shard.

    This project's kernel has no `plan_info`.
    """
    rows, blocks, split = static.rung.rows, static.decode_blocks, static.chunk is not None
    sums = _align(query_heads * blocks * head_dim * 4) if split else 0
    floats = sums + query_heads * blocks * 4 if split else 16
    if static.decode == "paged":
        return (), query_heads * blocks * (head_dim + 2) * 4 if split else 16
    if static.decode == "tensor_cores":
        query_rows = static.rung.tokens if static.by_token else rows
        at, _ = _fa2_layout(blocks, rows, query_rows, split)
        head = (
            blocks,
            query_rows,
            at["total"],
            DECODE_TILE,
            at["row"],
            at["tile"],
            at["piece"],
            at["merge"],
            at["out"],
        )
        return (*head, at["chunk"], 0, sums, at["mask"], 1, int(split)), floats
    at, _ = _decode_layout(blocks, split)
    order = (at["row"], at["piece"], at["out"], at["mask"], at["chunk"])
    return (blocks, 0, sums, *order, int(split), int(split)), floats


def prefill_info(static: StaticPlan) -> tuple[tuple[int, ...], int]:
    """`plan_info` of the prefill kernel and bytes of its float workspace. Prefill rows are never split."""
    rung, blocks = static.rung, static.prefill_blocks
    if static.prefill == "fa3":
        at, _ = _fa3_layout(blocks, static.ctas)
        order = ("tile", "query", "page", "query_len", "kv_len", "head", "work", "row")
        return (*(at[name] for name in order), 1), 16
    at, _ = _fa2_layout(blocks, rung.rows, rung.tokens, False)
    head = (blocks, rung.tokens, at["total"], static.tile, at["row"], at["tile"], at["piece"], at["merge"], at["out"])
    return (*head, at["chunk"], 0, 0, at["mask"], 1, 0), 16


# ------------------------------------------------------------------- workspaces: where each array is, and its words


def _decode_layout(blocks: int, split: bool) -> tuple[dict[str, int], int]:
    parts = [("row", blocks), ("piece", blocks), ("out", blocks + 1), ("chunk", 1), ("mask", pages_for(blocks, 4))]
    return _layout(parts if split else parts[:-1])


def _fa2_layout(blocks: int, rows: int, query_rows: int, split: bool) -> tuple[dict[str, int], int]:
    parts = [("row", blocks), ("tile", blocks), ("piece", blocks), ("out", rows + 1), ("chunk", 1), ("total", 1)]
    parts += [("merge", query_rows + 1)] if split else []
    return _layout([*parts, ("mask", pages_for(blocks, 4))])


def _fa3_layout(blocks: int, ctas: int) -> tuple[dict[str, int], int]:
    names = ("tile", "query", "page", "query_len", "kv_len", "head")
    return _layout([*((name, blocks) for name in names), ("work", ctas + 1), ("row", blocks)])


def _layout(parts: list[tuple[str, int]]) -> tuple[dict[str, int], int]:
    """Byte offset of each array, 16-byte aligned, and the total in bytes. Absent arrays are at 0."""
    at, end = {"merge": 0, "mask": 0}, 0
    for name, words in parts:
        at[name] = end
        end = _align(end + 4 * words)
    return at, end


def _align(size: int) -> int:
    return -(-size // 16) * 16


def _pack(at: dict[str, int], size: int, arrays: dict[str, Array]) -> Int32[Array, " n"]:
    """One int32 vector with each array at its offset, zeros between."""
    out, end = [], 0
    for name, array in sorted(arrays.items(), key=lambda item: at[item[0]]):
        start = at[name] // 4
        out += [jnp.zeros(start - end, jnp.int32), array.astype(jnp.int32)]
        end = start + array.shape[0]
    return jnp.concatenate([*out, jnp.zeros(size // 4 - end, jnp.int32)])


def _find(offsets: Int32[Array, " n1"], value: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The i with offsets[i] ≤ value < offsets[i + 1]; 7 µs on an H200, where the default method takes over 120."""
    return jnp.searchsorted(offsets[1:], value, side="right", method="compare_all").astype(jnp.int32)


def _offsets(counts: Int32[Array, " n"]) -> Int32[Array, " n1"]:
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def _mask_words(valid: Bool[Array, " n"]) -> Int32[Array, " m"]:
    """Booleans as bytes, four to a word, little-endian."""
    quads = jnp.pad(valid.astype(jnp.int32), (0, -valid.shape[0] % 4)).reshape(-1, 4)
    return jnp.sum(quads << jnp.arange(0, 32, 8, dtype=jnp.int32)[None], axis=1, dtype=jnp.int32)


def _pieces(static: StaticPlan, lens: Int32[Array, " r"]) -> Int32[Array, " r"]:
    """Pieces of each row in decode. Split, a row of length 0 has none and costs nothing; its output is masked later."""
    if static.chunk is None:
        return jnp.ones_like(lens)
    return (lens + static.chunk - 1) // static.chunk


def _paged_words(
    static: StaticPlan,
    kv_lens: Int32[Array, " r"],
    single_row: Bool[Array, " r"],
    first_token: Int32[Array, " r"],
    token_row: Int32[Array, " t"],
    single: Bool[Array, " t"],
    page_offsets: Int32[Array, " r1"],
) -> Int32[Array, " n"]:
    """What each thread block needs to start, 8 words each: item or −1, whether it has attention, its
    query's token, its length, where its page ids begin, the piece's first token and the one past its last, and whether
    it is its item's only one. Then live of each item, and, if split, offsets. Blocks without a piece come last.

    An item is a token in a rung of single tokens, a row elsewhere.
    """
    if static.by_token:
        row, token = jnp.where(single, token_row, -1), jnp.arange(single.shape[0], dtype=jnp.int32)
    else:
        row, token = jnp.where(single_row, jnp.arange(kv_lens.shape[0], dtype=jnp.int32), -1), first_token
    lens = jnp.where(row >= 0, kv_lens[jnp.maximum(row, 0)], 0)
    block, live = jnp.arange(static.decode_blocks, dtype=jnp.int32), (row >= 0).astype(jnp.int32)
    if static.chunk is None:
        item, taken, offsets, whole = block, block, [], jnp.ones_like(block)
        begin, end = jnp.zeros_like(block), jnp.full_like(block, _NO_CHUNK)
    else:
        chunk = jnp.where(lens > LONG_ROW, 2 * static.chunk, static.chunk)
        skipped = jnp.zeros_like(lens) if static.window is None else jnp.maximum(lens - static.window, 0) // chunk
        ends = _offsets((lens + chunk - 1) // chunk - skipped)
        item = jnp.minimum(_find(ends, block), row.shape[0] - 1)
        taken, offsets = jnp.where(block < ends[-1], item, -1), [ends]
        whole = (ends[item + 1] - ends[item] == 1).astype(jnp.int32)
        begin = (block - ends[item] + skipped[item]) * chunk[item]
        end = begin + chunk[item]
    pages = page_offsets[jnp.maximum(row, 0)]
    columns = [taken, live[item], token[item], lens[item], pages[item], begin, end, whole]
    return jnp.concatenate([jnp.stack(columns, axis=1).reshape(-1), live, *offsets])


def _decode_words(
    static: StaticPlan, lens: Int32[Array, " r"], query_offsets: Int32[Array, " r1"], token_row: Int32[Array, " t"]
) -> Int32[Array, " n"]:
    blocks, rows, split = static.decode_blocks, lens.shape[0], static.chunk is not None
    out = _offsets(_pieces(static, lens))
    block = jnp.arange(blocks, dtype=jnp.int32)
    valid = block < out[-1]
    row = jnp.where(valid, jnp.minimum(_find(out, block), max(rows - 1, 0)), 0)
    piece = jnp.where(valid, block - out[row], 0)
    chunk = jnp.full(1, static.chunk or _NO_CHUNK, jnp.int32)
    arrays = {"row": row, "piece": piece, "chunk": chunk}
    if static.decode == "cuda_cores":
        arrays |= {"out": out} | ({"mask": _mask_words(valid)} if split else {})
        return _pack(*_decode_layout(blocks, split), arrays)
    query_rows = static.rung.tokens if static.by_token else rows
    arrays |= {"tile": jnp.zeros_like(row), "out": out, "mask": _mask_words(valid)}
    arrays["total"] = query_offsets[-1:] if static.by_token else jnp.full(1, rows, jnp.int32)
    if split:
        # Pieces of token i are merge[i] .. merge[i + 1]. Its row's others are empty, and have none.
        arrays["merge"] = jnp.concatenate([out[token_row], out[-1:]]) if static.by_token else out
    return _pack(*_fa2_layout(blocks, rows, query_rows, split), arrays)


def _fa2_words(
    static: StaticPlan, query_lens: Int32[Array, " r"], kv_lens: Int32[Array, " r"], query_offsets: Int32[Array, " r1"]
) -> Int32[Array, " n"]:
    blocks, rows, group = static.prefill_blocks, query_lens.shape[0], static.rung.group_size or 1
    ends = _offsets((query_lens * group + static.tile - 1) // static.tile)
    block = jnp.arange(blocks, dtype=jnp.int32)
    valid = block < ends[-1]
    row = jnp.where(valid, jnp.minimum(_find(ends, block), rows - 1), 0)
    arrays = {
        "row": row,
        "tile": jnp.where(valid, block - ends[row], 0),
        "piece": jnp.zeros_like(row),
        "out": query_offsets,
        "chunk": jnp.full(1, _NO_CHUNK, jnp.int32),
        "total": query_offsets[-1:],
        "mask": _mask_words(valid),
    }
    return _pack(*_fa2_layout(blocks, rows, static.rung.tokens, False), arrays)


def _fa3_words(static: StaticPlan, table: TableArrays, query_lens: Int32[Array, " r"]) -> Int32[Array, " n"]:
    """Tiles in order of falling cost, dealt round robin to the thread blocks of each head."""
    blocks, tile, ctas, rows = static.prefill_blocks, static.tile, static.ctas, query_lens.shape[0]
    ends = _offsets((query_lens + tile - 1) // tile)
    block = jnp.arange(blocks, dtype=jnp.int32)
    row = jnp.minimum(_find(ends, block), rows - 1)
    index = block - ends[row]
    past = table.kv_lens[row] - query_lens[row]
    cost = jnp.where(block < ends[-1], jnp.minimum(past + (index + 1) * tile, table.kv_lens[row]), -1)
    by_cost = jnp.argsort(-cost, stable=True)
    work = _offsets(jnp.maximum((ends[-1] - jnp.arange(ctas, dtype=jnp.int32) + ctas - 1) // ctas, 0))
    cta = jnp.minimum(_find(work, block), ctas - 1)
    dealt = by_cost[jnp.minimum(cta + (block - work[cta]) * ctas, blocks - 1)]
    row, index = row[dealt], index[dealt]
    arrays = {
        "tile": index,
        "query": table.query_offsets[row],
        "page": table.page_offsets[row],
        "query_len": query_lens[row],
        "kv_len": table.kv_lens[row],
        "head": jnp.zeros_like(row),
        "work": work,
        "row": row,
    }
    return _pack(*_fa3_layout(blocks, ctas), arrays)
