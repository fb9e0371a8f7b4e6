"""The vendor's entry points, on torch tensors of the CPU. One call at a time: the interpreter keeps global state.

Which kernel is run for which operation is said here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from . import emulator

LOCK = threading.RLock()
"""Held around every launch: XLA calls handlers from one thread for each device."""
WIDEST_TILE = 64
"""Tokens of the widest tile of `unified_attention`: its loads of the block table reach that far past a row's pages."""


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Hold the lock, with subnormal numbers as numbers: XLA's threads flush them, and a moved word may be one.

    numpy is told not to warn: masked lanes divide by zero in the vendor's kernels, as they do on a device.
    """
    with LOCK, np.errstate(all="ignore"):
        flushed = bool(np.float32(1e-40) * np.float32(1.0) == 0)
        torch.set_flush_denormal(False)
        try:
            yield
        finally:
            if flushed:
                torch.set_flush_denormal(True)


@functools.cache
def vendor(module: str) -> Any:
    """A module of the vendor's `aiter.ops.triton`, imported on first use."""
    import importlib

    emulator.start()
    return importlib.import_module(f"aiter.ops.triton.{module}")


def store(key: Any, value: Any, key_pool: Any, value_pool: Any, slots: Any) -> None:
    """One launch of AITER's fused append: keys through RoPE with cosine 1 and sine 0, values as they are.

    `key`, `value` (t, k, d); pools (n, p, k, d), written in place; `slots` (t,), negative ones skipped. `fused_qk_rope_
    reshape_and_cache` also rotates queries; it gets zeros, and what it writes of them is dropped.
    """
    tokens, heads, dim = key.shape
    if not tokens:
        return
    cosine = torch.ones(tokens, dim // 2, dtype=key.dtype)
    one = torch.ones(1, dtype=torch.float32)
    with launching():
        vendor("fused_kv_cache").fused_qk_rope_reshape_and_cache(
            torch.zeros(tokens, heads, dim, dtype=key.dtype), key, value, key_pool, value_pool, slots,
            torch.arange(tokens), cosine, torch.zeros_like(cosine), one, one,
            is_neox=False, flash_layout=True, apply_scale=False, output_zeros=False,
        )  # fmt: skip


def append(key: Any, value: Any, key_pool: Any, value_pool: Any, slots: Any) -> None:
    """Write tokens to their slots, bit for bit.

    Two launches: the kernel's store of keys is behind a rotation, which turns -0 into +0 and spreads what is not finite
    (finding `append-rotates`), so the keys are written a second time, by the store that the kernel has for values.
    """
    store(key, value, key_pool, value_pool, slots)
    store(key, key, nowhere(key_pool), key_pool, slots)


def nowhere(pool: Any) -> Any:
    """A pool of the same shape in which every slot is the same few elements."""
    return torch.zeros(pool.shape[-1], dtype=pool.dtype).expand(pool.shape)


def attend(
    query: Any,
    key_pool: Any,
    value_pool: Any,
    out: Any,
    *,
    query_offsets: Any,
    kv_lens: Any,
    block_table: Any,
    max_query_len: int,
    max_kv_len: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """AITER's `unified_attention`, into `out`: causal, bottom-right aligned.

    `window` counts the token itself, 0 for none. `block_table` (rows, width) int32; see `table_of`.
    """
    with launching():
        vendor("unified_attention").unified_attention(
            query, key_pool, value_pool, out, query_offsets, max_query_len, kv_lens, max_kv_len, scale, True,
            (window - 1, 0 if window else -1), block_table, soft_cap, None, None, None,
        )  # fmt: skip


def table_of(page_offsets: Any, page_ids: Any, tokens_per_page: int) -> Any:
    """A block table from a contiguous page list, each row followed by entries of page 0 that the kernel may load."""
    offsets = page_offsets.tolist()
    counts = [after - before for before, after in itertools.pairwise(offsets)]
    spare = -(-WIDEST_TILE // tokens_per_page)
    table = torch.zeros(len(counts), max(counts, default=0) + spare, dtype=torch.int32)
    for row, (start, count) in enumerate(zip(offsets, counts)):
        table[row, :count] = page_ids[start : start + count]
    return table
