"""The FFI targets of the backend `aiter`, served on CPU by the vendor's Triton kernels.

XLA calls a handler with buffers and attributes; here they become torch tensors over the same memory and a call of
`kernels`. Handlers are Python functions, to which an attribute is a number or a string: the width that it was sent
with is not checked here. (The C++ handlers of tests/aiter_handlers check that; they decode with XLA's own headers.)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import kernels

PROVIDER = "triton-interpreter"
PARTITION_TOKENS = 256
"""What `max_num_partitions` counts in."""

SERVES: Mapping[str, str] = {
    "AppendKvJA": "fused_kv_cache.fused_qk_rope_reshape_and_cache, twice: keys by its store for keys (RoPE with cosine "
    "1 and sine 0), values by its store for values, then keys again by the store for values, which moves bits. "
    "jax-aiter serves this target by a HIP kernel, reshape_and_cache_flash",
    "PagedAttentionJA": "unified_attention.unified_attention with one query token per row. jax-aiter serves this "
    "target by a HIP kernel, paged_attention_ragged",
    "PagedPrefillJA": "unified_attention.unified_attention. jax-aiter serves this target by a CK kernel, "
    "mha_batch_prefill",
    "KvAliasProbeJA": "no kernel of AITER's: rows are added by torch",
}
"""Target -> what computes it here, and what would on the device. No HIP and no CK kernel runs here."""

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


class RefusedError(ValueError):
    """A call that the vendor's handler refuses, or would compute wrongly without a word."""


def view(buffer: Any) -> torch.Tensor:
    """XLA's buffer as a tensor over the same memory, valid during the call. bfloat16 has no way through DLPack's numpy
    and a kept DLPack tensor outlives its buffer, so it is made from the address."""
    dtype, shape = _DTYPES[str(buffer.dtype)], [int(n) for n in buffer.shape]
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * size).from_address(buffer.data_ptr())
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def append(attributes: Mapping[str, Any], arguments: list[Any], results: list[Any]) -> None:
    """AppendKvJA: tokens to their slots, in place."""
    if attributes["kv_cache_dtype"] != "auto":
        raise RefusedError(f"kv_cache_dtype is {attributes['kv_cache_dtype']!r}; only 'auto' is compiled.")
    _aliased(arguments[5:7], results)
    key, value, slots = map(view, arguments[:3])
    key_pool, value_pool = map(view, results)
    kernels.append(key, value, key_pool, value_pool, slots)


def decode(attributes: Mapping[str, Any], arguments: list[Any], results: list[Any]) -> None:
    """PagedAttentionJA: one query token per row."""
    query, key_pool, value_pool, page_offsets, page_ids, last_lens = map(view, arguments[:6])
    (out,) = map(view, results)
    rows, heads, dim = query.shape
    _uncapped(attributes)
    partitions = int(attributes["max_num_partitions"])
    needed = rows * heads * partitions * (8 + query.element_size() * dim)
    if view(arguments[8]).numel() < needed:
        raise RefusedError(f"the workspace has {view(arguments[8]).numel()} bytes, {needed} are needed.")
    _attend(
        (query, key_pool, value_pool, out),
        torch.arange(rows + 1, dtype=torch.int32),
        (page_offsets, page_ids, last_lens),
        scale=attributes["scale"],
        max_query_len=1,
        max_kv_len=partitions * PARTITION_TOKENS,
    )


def prefill(attributes: Mapping[str, Any], arguments: list[Any], results: list[Any]) -> None:
    """PagedPrefillJA: ragged rows; output past the last row is left as it is."""
    query, key_pool, value_pool, query_offsets, page_offsets, page_ids, last_lens = map(view, arguments)
    (out,) = map(view, results)
    _uncapped(attributes)
    left, right = int(attributes["window_size_left"]), int(attributes["window_size_right"])
    windowed = left >= 0 and right == 0
    if not attributes["causal"] or not (windowed or (left, right) == (-1, -1)):
        raise RefusedError(
            f"unified_attention is causal, with a window to the left or none; got causal {attributes['causal']} and "
            f"the window ({left}, {right})."
        )
    _attend(
        (query, key_pool, value_pool, out),
        query_offsets,
        (page_offsets, page_ids, last_lens),
        scale=attributes["scale"],
        max_query_len=int(attributes["max_seqlen_q"]),
        max_kv_len=int(attributes["max_seqlen_k"]),
        window=left + 1,
    )


def probe(attributes: Mapping[str, Any], arguments: list[Any], results: list[Any]) -> None:
    """KvAliasProbeJA: rows added in place."""
    _aliased(arguments[:1], results)
    view(results[0]).index_add_(0, view(arguments[1]).long(), view(arguments[2]))


HANDLERS: Mapping[str, Callable[..., None]] = {
    "AppendKvJA": append,
    "PagedAttentionJA": decode,
    "PagedPrefillJA": prefill,
    "KvAliasProbeJA": probe,
}


def row_lengths(page_offsets: torch.Tensor, last_lens: torch.Tensor, tokens_per_page: int) -> torch.Tensor:
    """Tokens of each row, as both of the vendor's kernels derive them: from the number of pages listed."""
    pages = page_offsets[1:] - page_offsets[:-1]
    return torch.where(pages > 0, (pages - 1) * tokens_per_page + last_lens, 0).to(torch.int32)


def _attend(tensors: tuple[torch.Tensor, ...], query_offsets: Any, lists: tuple[Any, Any, Any], **options: Any) -> None:
    query, key_pool, value_pool, out = tensors
    page_offsets, page_ids, last_lens = lists
    size = key_pool.shape[1]
    kernels.attend(
        query,
        key_pool,
        value_pool,
        out,
        query_offsets=query_offsets,
        kv_lens=row_lengths(page_offsets, last_lens, size),
        block_table=kernels.table_of(page_offsets, page_ids, size),
        **{**options, "scale": float(options["scale"])},
    )


def _aliased(operands: list[Any], results: list[Any]) -> None:
    for operand, result in zip(operands, results):
        if operand.data_ptr() != result.data_ptr():
            raise RefusedError("the pool is not aliased to its result: donate it, or it would be copied.")


def _uncapped(attributes: Mapping[str, Any]) -> None:
    if attributes["logits_soft_cap"]:
        raise RefusedError(
            f"logits_soft_cap is {attributes['logits_soft_cap']}; jax-aiter's kernels are built without."
        )


def register() -> None:
    """Register every target for CPU and say so to the backend. Again is a no-op."""
    import jax_tvm_ffi
    import tvm_ffi

    from paged.backends.aiter.contract import TARGETS
    from paged.backends.aiter.targets import provide, provided

    for name, target in TARGETS.items():
        if name not in provided("cpu"):
            names = [attribute for attribute, _ in target.attributes]
            spec = [*(f"attrs.{n}" for n in names), "args", "rets"]
            function = tvm_ffi.convert(_called(name, names, len(target.operands)))
            jax_tvm_ffi.register_ffi_target(name, function, spec, platform="cpu", pass_owned_tensor=True)
        provide(name, platform="cpu", provider=PROVIDER)


def _called(name: str, attributes: list[str], operands: int) -> Callable[..., None]:
    """The handler as XLA's bridge calls it: attributes, operands and results in a row. Looked up at every call."""

    def handle(*given: Any) -> None:
        found, buffers = given[: len(attributes)], given[len(attributes) :]
        HANDLERS[name](dict(zip(attributes, found)), list(buffers[:operands]), list(buffers[operands:]))

    return handle
