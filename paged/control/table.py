"""From a batch whose pages are ready to the `PageTable` of its step, built at its padded size at once."""

from __future__ import annotations

import numpy as np

from paged.common.layout import StorageLayout
from paged.common.page_table import PageTable
from paged.control.batch import Batch
from paged.control.page_map import PageMap
from paged.control.shapes import FixedShape


def exact_shape(batch: Batch) -> FixedShape:
    """The smallest shape that holds a batch."""
    return FixedShape(
        rows=batch.rows.shape[0],
        tokens=int(np.add.reduce(batch.counts)),
        listed_pages=int(np.add.reduce(batch.need)),
        max_query_len=int(np.maximum.reduce(batch.counts, initial=0)),
        max_kv_len=int(np.maximum.reduce(batch.ends, initial=0)),
    )


def build_table(
    batch: Batch, page_map: PageMap, layout: StorageLayout, exact: FixedShape, shape: FixedShape
) -> PageTable:
    """The batch's table at `shape`, which is at least `exact_shape(batch)` in every field.

    Equal to building it at its exact shape and padding it with `PageTable.pad`.
    """
    size, rows, tokens = layout.tokens_per_page, exact.rows, exact.tokens
    query_offsets, page_offsets = _offsets(batch.counts, shape.rows), _offsets(batch.need, shape.rows)
    page_ids = np.zeros(shape.listed_pages, np.int32)  # padding names the sentinel, page 0
    page_map.gather(batch.rows, 0, batch.need, out=page_ids[: exact.listed_pages])
    last_page_len, kv_lens = np.zeros(shape.rows, np.int32), np.zeros(shape.rows, np.int32)
    kv_lens[:rows] = batch.ends
    last_page_len[:rows] = batch.ends - (batch.need - 1) * size
    write_slots = np.full(shape.tokens, -1, np.int32)
    if tokens == rows:  # every row decodes
        page = page_map.pages[batch.rows, batch.first_pages]
        write_slots[:tokens] = page * size + (batch.starts - batch.first_pages * size)
    else:
        row = np.repeat(np.arange(rows), batch.counts)
        position = np.arange(tokens) + (batch.starts - query_offsets[:rows])[row]
        number = position // size
        write_slots[:tokens] = page_ids[page_offsets[row] + number] * size + (position - number * size)
    return PageTable.trusted(
        query_offsets=query_offsets,
        page_offsets=page_offsets,
        page_ids=page_ids,
        last_page_len=last_page_len,
        kv_lens=kv_lens,
        write_slots=write_slots,
        max_query_len=shape.max_query_len,
        max_kv_len=shape.max_kv_len,
        tokens_per_page=size,
        num_pages=layout.num_pages,
    )


def _offsets(counts: np.ndarray, rows: int) -> np.ndarray:
    out = np.zeros(rows + 1, np.int32)
    used = counts.shape[0] + 1
    np.add.accumulate(counts, out=out[1:used], dtype=np.int32)
    out[used:] = out[used - 1]
    return out
