"""One step's bookkeeping on the device, from a `PageTable` or from a vLLM-shaped object (requirement B4).

Whoever produced the metadata is never imported: objects are told apart by their attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from paged.backends.moves import rows_of
from paged.backends.protocol import Rung, TableArrays
from paged.common import SENTINEL_PAGE, PageTable, pages_for
from paged.common.checks import check_int32_vector, refuse_rows
from paged.common.errors import InvalidInputError

VLLM_FIELDS = ("block_tables", "seq_lens", "query_start_loc")


def table_arrays(table: PageTable) -> TableArrays:
    """The table's arrays on the default device, in one transfer."""
    vector, rung = pack_table(table)
    return unpack_table(jnp.asarray(vector), rung)


def pack_table(table: PageTable) -> tuple[np.ndarray, Rung]:
    """All arrays of the table in one int32 vector, and the rung that says how to cut it.

    One array is what a host should send: ten small ones to 8 devices cost about 400 µs, one costs 50.
    """
    rung = Rung.of(table)
    return np.concatenate([getattr(table, field) for field in _lengths(rung)]), rung


def unpack_table(vector: Int32[Array, " n"], rung: Rung) -> TableArrays:
    """What `pack_table` packed, cut apart; meant to run inside jit. Raises `InvalidInputError` for another length."""
    lengths = _lengths(rung)
    if vector.shape[0] != sum(lengths.values()):
        raise InvalidInputError(
            f"unpack_table: {rung} packs into {sum(lengths.values())} words, got {vector.shape[0]}."
        )
    arrays, at = {}, 0
    for field, length in lengths.items():
        arrays[field] = vector[at : at + length]
        at += length
    return TableArrays(**arrays)


def _lengths(rung: Rung) -> dict[str, int]:
    rows = {"query_offsets": rung.rows + 1, "page_offsets": rung.rows + 1, "page_ids": rung.listed_pages}
    return rows | {"last_page_len": rung.rows, "kv_lens": rung.rows, "write_slots": rung.tokens}


def step_metadata(metadata: Any, **geometry: int) -> tuple[TableArrays, Rung]:
    """Device arrays and rung of either kind of metadata, told apart by their attributes.

    - An object with the fields of `PageTable` is complete in itself; `geometry` must be empty.
    - An object with `block_tables`, `seq_lens` and `query_start_loc` needs `geometry`, the keywords of `from_vllm`.

    Raises `InvalidInputError` naming the attributes that are missing.
    """
    fields = [field.name for field in dataclasses.fields(PageTable)]
    if all(hasattr(metadata, field) for field in fields):
        if geometry:
            raise InvalidInputError(f"a page table carries its own geometry; drop {sorted(geometry)}.")
        if not isinstance(metadata, PageTable):
            metadata = PageTable(**{field: getattr(metadata, field) for field in fields})
        return table_arrays(metadata), Rung.of(metadata)
    if all(hasattr(metadata, field) for field in VLLM_FIELDS):
        return from_vllm(metadata, **geometry)
    missing = [[field for field in kind if not hasattr(metadata, field)] for kind in (fields, VLLM_FIELDS)]
    raise InvalidInputError(
        f"step metadata of type {type(metadata).__name__} is neither kind: as a page table it lacks {missing[0]}, as "
        f"vLLM-shaped metadata it lacks {missing[1]}."
    )


def from_vllm(
    metadata: Any, *, num_tokens: int, tokens_per_page: int, num_pages: int, max_query_len: int, max_kv_len: int
) -> tuple[TableArrays, Rung]:
    """Table arrays of vLLM-shaped metadata. Shapes follow from the arguments alone, so it can run under jit.

    - `metadata.block_tables` (rows, width), or flat (rows × width,): page ids. Entries past a row's used pages may hold
      anything.
    - `metadata.seq_lens` (rows,): tokens after this step; 0 is an empty row.
    - `metadata.query_start_loc` (rows + 1,): tokens from its largest entry on are padding and are never written. A
      tail that steps back (some producers fill unused rows with 1) means empty rows.
    - `num_tokens`: length of the step's token arrays; `max_query_len`, `max_kv_len`: static bounds of every row.

    Host arrays are validated: `InvalidInputError` names the field, the row and the value. Traced values cannot be, so
    what is out of bounds there is made harmless instead: a row longer than its table or than `max_kv_len`, or shorter
    than its queries, is treated as empty, and a used page id outside 1 .. num_pages − 1 is replaced by the sentinel
    and not written to.
    """
    tables, kv_lens, starts = (_int32(field, getattr(metadata, field)) for field in VLLM_FIELDS)
    rows = kv_lens.shape[0]
    if kv_lens.ndim != 1 or starts.shape != (rows + 1,) or math.prod(tables.shape) % max(rows, 1):
        raise InvalidInputError(
            f"vLLM-shaped metadata needs seq_lens (rows,), query_start_loc (rows + 1,), block_tables (rows, width); "
            f"got {kv_lens.shape}, {starts.shape}, {tables.shape}."
        )
    tables = tables.reshape(rows, -1) if rows else jnp.zeros((0, 0), jnp.int32)
    rung = Rung(
        rows=rows,
        tokens=num_tokens,
        listed_pages=math.prod(tables.shape),
        max_query_len=max_query_len,
        max_kv_len=max_kv_len,
        tokens_per_page=tokens_per_page,
        num_pages=num_pages,
    )
    _refuse(tables, kv_lens, starts, rung)
    return _convert(tables, kv_lens, starts, rung), rung


def _refuse(tables: Array, kv_lens: Array, starts: Array, rung: Rung) -> None:
    """Raise on the first value out of bounds, if the values are known; under jit nothing can be raised."""
    try:
        blocks, lens, offsets = (np.asarray(array) for array in (tables, kv_lens, starts))
    except jax.errors.TracerArrayConversionError:
        return
    owner = "vLLM-shaped metadata"
    queries = np.diff(np.maximum.accumulate(np.minimum(offsets, rung.tokens)))
    longest = _longest(blocks.shape[1], rung)
    refuse_rows(owner, "seq_lens", lens, (lens < 0) | (lens > longest), f"must be in 0..{longest}")
    refuse_rows(owner, "seq_lens", lens, (lens > 0) & (lens < queries), "must be 0 or at least the row's query length")
    most = f"must be at most max_query_len={rung.max_query_len}"
    refuse_rows(owner, "query lengths", queries, queries > rung.max_query_len, most)
    used = np.arange(blocks.shape[1]) < pages_for(lens, rung.tokens_per_page)[:, None]
    ids = blocks[used]
    bad = (ids <= SENTINEL_PAGE) | (ids >= rung.num_pages)
    refuse_rows(owner, "block_tables", ids, bad, f"must be in 1..{rung.num_pages - 1}", "used entry")


def _longest(width: int, rung: Rung) -> int:
    return min(width * rung.tokens_per_page, rung.max_kv_len)


@functools.partial(jax.jit, static_argnames="rung")
def _convert(
    tables: Int32[Array, "r w"], kv_lens: Int32[Array, " r"], starts: Int32[Array, " r+1"], rung: Rung
) -> TableArrays:
    rows, size = rung.rows, rung.tokens_per_page
    offsets = jax.lax.cummax(jnp.minimum(starts, rung.tokens))
    query_lens = offsets[1:] - offsets[:-1]
    sound = (kv_lens >= query_lens) & (kv_lens <= _longest(tables.shape[1], rung)) & (query_lens <= rung.max_query_len)
    kv_lens = jnp.where(sound, kv_lens, 0)
    used = pages_for(kv_lens, size)
    page_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(used, dtype=jnp.int32)])
    entry = jnp.arange(rung.listed_pages, dtype=jnp.int32)
    live = entry < page_offsets[-1]
    row = jnp.minimum(rows_of(page_offsets, rung.listed_pages), rows - 1)
    page_ids = tables[row, jnp.where(live, entry - page_offsets[row], 0)]
    in_range = (page_ids > SENTINEL_PAGE) & (page_ids < rung.num_pages)
    page_ids = jnp.where(live & in_range, page_ids, SENTINEL_PAGE)
    return TableArrays(
        query_offsets=offsets,
        page_offsets=page_offsets,
        page_ids=page_ids,
        last_page_len=jnp.where(kv_lens > 0, kv_lens - size * (jnp.maximum(used, 1) - 1), 0),
        kv_lens=kv_lens,
        write_slots=_write_slots(kv_lens, offsets, page_offsets, page_ids, rung),
    )


def _write_slots(
    kv_lens: Int32[Array, " r"],
    offsets: Int32[Array, " r+1"],
    page_offsets: Int32[Array, " r+1"],
    page_ids: Int32[Array, " l"],
    rung: Rung,
) -> Int32[Array, " t"]:
    if not rung.rows or not rung.listed_pages:
        return jnp.full(rung.tokens, -1, jnp.int32)
    rows = rows_of(offsets, rung.tokens)
    row = jnp.minimum(rows, rung.rows - 1)
    position = kv_lens[row] - offsets[row + 1] + jnp.arange(rung.tokens, dtype=jnp.int32)
    live = (rows < rung.rows) & (kv_lens[row] > 0)
    page = page_ids[jnp.where(live, page_offsets[row] + position // rung.tokens_per_page, 0)]
    slot = page * rung.tokens_per_page + position % rung.tokens_per_page
    return jnp.where(live & (page != SENTINEL_PAGE), slot, -1)


def _int32(field: str, value: Any) -> Int32[Array, "..."]:
    """`value` as int32. Host integers are cast only if they fit, table entries that do not fit are out of range."""
    if isinstance(value, jax.Array):
        if value.dtype != jnp.int32:
            raise InvalidInputError(f"{field} must be int32 on the device, got {value.dtype}.")
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{field} must hold integers, got dtype {array.dtype}.")
    if field == "block_tables":
        return jnp.asarray(np.clip(array, -1, np.iinfo(np.int32).max).astype(np.int32))
    return jnp.asarray(check_int32_vector("vLLM-shaped metadata", field, array))
