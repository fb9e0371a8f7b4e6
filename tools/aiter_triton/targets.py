"""The FFI targets of the backend `aiter`, served on CPU by the vendor's Triton kernels.

XLA calls a handler with buffers and attributes; here they become torch tensors over the same memory and a call of
`kernels`. A call that is not by the contract, down to the width of an attribute, is refused first.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import ffi, kernels
from .ffi import Buffer

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
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "ui8": torch.uint8,
}


class RefusedError(ValueError):
    """A call that the vendor's handler refuses, or would compute wrongly without a word."""


def view(buffer: Buffer) -> torch.Tensor:
    """XLA's buffer as a tensor over the same memory, valid during the call."""
    dtype = _DTYPES[buffer.dtype]
    size = math.prod(buffer.shape) * dtype.itemsize
    if not size:
        return torch.empty(buffer.shape, dtype=dtype)
    memory = (ctypes.c_char * size).from_address(buffer.address)
    return torch.frombuffer(memory, dtype=dtype).view(buffer.shape)


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
    """KvAliasProbeJA: rows added in place, those out of range skipped."""
    _aliased(arguments[:1], results)
    pool, rows, values = view(results[0]), view(arguments[1]).long(), view(arguments[2])
    inside = (rows >= 0) & (rows < pool.shape[0])
    pool.index_add_(0, rows[inside], values[inside])


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
        if operand.address != result.address:
            raise RefusedError("the pool is not aliased to its result: donate it, or it would be copied.")


def _uncapped(attributes: Mapping[str, Any]) -> None:
    if attributes["logits_soft_cap"]:
        raise RefusedError(
            f"logits_soft_cap is {attributes['logits_soft_cap']}; jax-aiter's kernels are built without."
        )


def register() -> None:
    """Register every target for CPU and say so to the backend. Again is a no-op."""
    from paged.backends.aiter.contract import TARGETS
    from paged.backends.aiter.targets import provide, provided

    for name, target in TARGETS.items():
        new = name not in provided("cpu")
        provide(name, platform="cpu", provider=PROVIDER, capsule=ffi.capsule(_serve(target)) if new else None)


def _serve(target: Any) -> Callable[[ffi.Call], None]:
    """The handler of a target: checks a call against the contract and runs what `HANDLERS` has now."""

    def handle(call: ffi.Call) -> None:
        if fault := mismatch(target, call):
            raise RefusedError(f"{target.name}: {fault}.")
        values = {name: attribute.value for name, attribute in call.attributes.items()}
        HANDLERS[target.name](values, list(call.operands), list(call.results))

    return handle


def mismatch(target: Any, call: ffi.Call) -> str | None:
    """How a call differs from its contract in what XLA decodes: numbers of arrays, element types, attribute types."""
    for what, wanted, found in (("operand", target.operands, call.operands), ("result", target.results, call.results)):
        if len(wanted) != len(found):
            return f"{len(found)} {what}s, the contract has {len(wanted)}"
        for operand, buffer in zip(wanted, found):
            if buffer.dtype not in operand.types or len(buffer.shape) != len(operand.shape):
                return f"{what} {operand.name} is {buffer.dtype}{list(buffer.shape)}"
    wanted = dict(target.attributes)
    if wanted.keys() != call.attributes.keys():
        return f"attributes {sorted(call.attributes)}, the contract has {sorted(wanted)}"
    for name, attribute in call.attributes.items():
        if attribute.type != wanted[name]:
            return f"attribute {name} is {attribute.type}, the contract has {wanted[name]}"
    return None
