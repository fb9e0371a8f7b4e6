"""How many pages fit, and what to say when they do not."""

from __future__ import annotations

import jax

from paged.backends.protocol import AttentionBackend
from paged.backends.sharding import KvSharding
from paged.common.checks import check_int
from paged.common.errors import InvalidInputError, PoolExhaustedError
from paged.common.layout import StorageLayout
from paged.engine.pool import KvPool
from paged.models import DecoderConfig


def layout_for(
    config: DecoderConfig,
    *,
    num_pages: int | None,
    memory_bytes: int | None,
    tokens_per_page: int,
    dtype: str,
    sharding: KvSharding | None,
) -> StorageLayout:
    """Layout of `num_pages` pages a layer, or of as many as `memory_bytes` of each device hold.

    Raises `InvalidInputError` unless exactly one is given, `PoolExhaustedError` if the bytes hold fewer than two pages.
    """
    if (num_pages is None) == (memory_bytes is None):
        raise InvalidInputError(
            f"give exactly one of num_pages and memory_bytes, got num_pages={num_pages}, memory_bytes={memory_bytes}."
        )

    def layout(pages: int) -> StorageLayout:
        return config.storage_layout(num_pages=pages, tokens_per_page=tokens_per_page, dtype=dtype, sharding=sharding)

    if num_pages is not None:
        return layout(num_pages)
    budget = check_int("Runtime", "memory_bytes", memory_bytes, minimum=1, maximum=2**63 - 1)
    page_bytes = layout(2).bytes_per_device // 2
    if budget < 2 * page_bytes:
        raise PoolExhaustedError(
            f"memory_bytes={budget} holds {budget // page_bytes} pages of {page_bytes} bytes ({config.num_layers} "
            f"layers × {tokens_per_page} tokens × {layout(2).heads_per_shard} KV heads × {2 * config.head_dim} "
            f"elements of {dtype}); a pool needs at least 2, the sentinel and one more: {2 * page_bytes} bytes."
        )
    return layout(budget // page_bytes)


def build_pool(layout: StorageLayout, backend: AttentionBackend, sharding: KvSharding | None) -> KvPool:
    """The pool on its devices. Raises `PoolExhaustedError` with the arithmetic if a device has not that much memory."""
    try:
        return KvPool(layout, backend, sharding)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise PoolExhaustedError(
            f"the pool does not fit: {layout.num_pages} pages × {layout.bytes_per_device // layout.num_pages} bytes = "
            f"{layout.bytes_per_device} bytes on each device. Use fewer pages, or memory_bytes= below what is free."
        ) from error
