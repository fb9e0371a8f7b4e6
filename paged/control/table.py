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
    return FixedShape(batch.rows.shape[0], batch.num_tokens, batch.num_pages, batch.max_query_len, batch.max_kv_len)


def build_table(batch: Batch, page_map: PageMap, layout: StorageLayout, shape: FixedShape) -> PageTable:
    """The batch's table at `shape`, which is at least `exact_shape(batch)` in every field.

    Equal to building it at its exact shape and padding it with `PageTable.pad`.
    """
    size, rows, tokens = layout.tokens_per_page, batch.rows.shape[0], batch.num_tokens
    page_ids = np.zeros(shape.listed_pages, np.int32)  # padding names the sentinel, page 0
    page_map.gather_leading(batch.rows, batch.need, batch.page_ends, page_ids[: batch.num_pages])
    page_offsets = _offsets(batch.page_ends, shape.rows)
    kv_lens = _padded(batch.ends, shape.rows)
    last_page_len = _padded(batch.ends - (batch.need - 1) * size, shape.rows)
    write_slots = np.full(shape.tokens, -1, np.int32)
    if batch.max_query_len <= 1:  # every row decodes
        query_offsets = _offsets(np.arange(1, rows + 1), shape.rows)
        page = page_map.pages[batch.rows, batch.first_pages]
        write_slots[:tokens] = page * size + (batch.starts - batch.first_pages * size)
    else:
        query_offsets = _offsets(np.add.accumulate(batch.counts), shape.rows)
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


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    out = np.zeros(length, np.int32)
    out[: values.shape[0]] = values
    return out


def _offsets(ends: np.ndarray, rows: int) -> np.ndarray:
    """Offsets of `rows` rows, of which those after `ends` are empty."""
    out = np.zeros(rows + 1, np.int32)
    used = ends.shape[0] + 1
    out[1:used] = ends
    if used <= rows:
        out[used:] = out[used - 1]
    return out
