"""What fits, and what to say when it does not: each refusal gives its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from paged.backends.protocol import AttentionBackend
from paged.backends.sharding import KvSharding
from paged.common.checks import INT32_LIMIT, check_int, check_int32_vector, refuse_rows
from paged.common.errors import InvalidInputError, PoolExhaustedError
from paged.common.layout import StorageLayout
from paged.common.page_table import pages_for
from paged.control import ControlPlane, Slice
from paged.engine.pool import KvPool
from paged.models import Decoder, DecoderConfig


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
    most = (INT32_LIMIT - 1) // (config.num_layers * tokens_per_page)  # slots are int32
    return layout(min(budget // page_bytes, most))


def build_pool(layout: StorageLayout, backend: AttentionBackend, sharding: KvSharding | None, device: Any) -> KvPool:
    """The pool on its devices. Raises `PoolExhaustedError` with the arithmetic if a device has not that much memory."""
    try:
        return KvPool(layout, backend, sharding, device=device)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise PoolExhaustedError(
            f"the pool does not fit: {layout.num_pages} pages × {layout.bytes_per_device // layout.num_pages} bytes = "
            f"{layout.bytes_per_device} bytes on each device. Use fewer pages, or memory_bytes= below what is free."
        ) from error


def check_ids(config: DecoderConfig, prompt: Sequence[int] | np.ndarray, *, name: str) -> list[int]:
    """The prompt as ints. Raises `InvalidInputError` if it is empty or names a token outside the vocabulary."""
    ids = check_int32_vector(name, "tokens", prompt)
    if not len(ids):
        raise InvalidInputError(f"{name} is empty: there is nothing to continue from. Give at least one token.")
    vocabulary = config.vocab_size
    refuse_rows(name, "tokens", ids, (ids < 0) | (ids >= vocabulary), f"must be in 0..{vocabulary - 1}", "token")
    return ids.tolist()


def check_prompt(
    config: DecoderConfig, layout: StorageLayout, prompt: Sequence[int] | np.ndarray, *, name: str, more: int
) -> list[int]:
    """The prompt as a list of ints, if it and `more` tokens, up to the model's last position, can ever be cached.

    Raises `InvalidInputError` if it is empty, names a token outside the vocabulary or has more tokens than the model
    has positions; `PoolExhaustedError` if it needs more pages than the pool has.
    """
    ids = check_ids(config, prompt, name=name)
    limit = config.max_positions
    if len(ids) > limit:
        raise InvalidInputError(
            f"{name} has {len(ids)} tokens; the model has positions for {limit} (max_positions). Shorten it by "
            f"{len(ids) - limit}."
        )
    need = pages_for(min(len(ids) + more, limit), layout.tokens_per_page)
    if need > layout.usable_pages:
        total = f"{len(ids)} tokens" + (f" and {more} to generate" if more else "")
        raise PoolExhaustedError(
            f"{name}: {total} need {need} pages of {layout.tokens_per_page} tokens; the pool has "
            f"{layout.usable_pages} ({layout.num_pages} less the sentinel). It would need num_pages={need + 1}, "
            f"{(need + 1) * layout.bytes_per_page} bytes at {layout.bytes_per_page} bytes a page."
        )
    return ids


def shortage(plane: ControlPlane, slices: Sequence[Slice]) -> str:
    """Why a step could not be reserved just now."""
    layout = plane.layout
    return (
        f"the step needs {plane.pages_needed(slices)} more pages of {layout.tokens_per_page} tokens; "
        f"{plane.available_pages} of {layout.usable_pages} are free, {plane.held_pages} are held by "
        f"{plane.num_open} open requests. Release a request, or build a larger pool ({layout.bytes_per_page} bytes a "
        f"page)."
    )


def device_of(model: Decoder, sharding: KvSharding | None) -> Any:
    """The model's device, or one of them. Raises `InvalidInputError` if they are not those of the pool's mesh."""
    devices = model.embedding.devices()
    mesh = devices if sharding is None else set(sharding.mesh.devices.flat)
    if devices != mesh or (sharding is None and len(devices) > 1):
        where = "one device (no sharding was given)" if sharding is None else f"the mesh {dict(sharding.mesh.shape)}"
        raise InvalidInputError(
            f"Runtime: the model's weights are on {len(devices)} devices, the pool would be on {where}. Load the model "
            f"with the same KvSharding that you give here."
        )
    return min(devices, key=lambda device: device.id)


def check_same_structure(old: Decoder, new: Decoder) -> None:
    """Raises `InvalidInputError` unless steps that are compiled for the old model run the new one."""
    here, there = (jax.tree.map(lambda x: (x.shape, x.dtype.name, x.sharding), model) for model in (old, new))
    if jax.tree.structure(old) != jax.tree.structure(new) or here != there:
        raise InvalidInputError(
            "update_weights: the new model has another structure, shape, dtype, placement or config than the old one. "
            "Build a new Runtime for it."
        )
