"""Reproducers of findings about values: NaN that leaks, weights that are lost, bits that depend on company."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from . import emulator, kernels
from .findings import VENDOR, Evidence, finding
from .problem import Problem, make

LONG = 600
"""A bound on row lengths above 512, from which `unified_attention` splits rows into segments."""


def worst(problem: Problem, out: torch.Tensor, **options: Any) -> float:
    """Largest distance from the exact answer; NaN if there is one."""
    return float(np.abs(out.double().numpy() - problem.exact(**options)).max())


def lowered(problem: Problem, nats: float) -> Problem:
    """The same problem with all logits lower by `nats`: by softmax's definition, its answer is almost the same."""
    query, keys = problem.query.clone(), problem.key_pool.clone()
    query[..., 0], keys[..., 0] = -nats * math.sqrt(query.shape[2]), 1.0
    return dataclasses.replace(problem, query=query, key_pool=keys)


@finding(
    name="dead-slot-nan",
    what="values in the unwritten slots of a row's last page are read and multiplied by a weight of 0, so NaN there "
    "becomes NaN in the output, whenever a tile is a page (all decode) or a segment",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:241",
    known="of other kernels of the same family: vLLM #47305 and #53856, ROCm/aiter #1925",
    consequence="the backend declares poison 'finite': pools are zeroed and scrubbed, never left unwritten",
)
def dead_slot_nan() -> Evidence:
    found = {}
    for name, query_lens, kv_lens, page, options in (
        ("decode, page 16", [1, 1, 1], [5, 16, 33], 16, {}),
        ("decode, page 64", [1, 1, 1], [5, 16, 33], 64, {}),
        ("decode in segments, page 16", [1], [33], 16, {"max_kv_len": LONG}),
        ("mixed, page 64", [7, 1, 13], [7, 33, 40], 64, {}),
        ("mixed, page 16", [7, 1, 13], [7, 33, 40], 16, {}),
    ):
        problem = make(query_lens, kv_lens, page=page)
        for pool in ("key_pool", "value_pool"):
            array = getattr(problem, pool).clone()
            array[problem.dead()] = float("nan")
            out = dataclasses.replace(problem, **{pool: array}).run(**options)
            found[f"{name}, {pool}"] = int(torch.isnan(out).sum())
    leaks = [key for key, count in found.items() if count]
    expected = [f"{name}, value_pool" for name in ("decode, page 16", "decode, page 64")]
    expected += ["decode in segments, page 16, value_pool", "mixed, page 64, value_pool"]
    return Evidence(leaks == expected, {"NaN outputs": found})


@finding(
    name="chunked-default-scale",
    what="chunked_prefill_paged_decode without a scale uses 1/sqrt(query heads) where attention means 1/sqrt(head dim)",
    where=f"{VENDOR}/chunked_pa_prefill.py:44",
    consequence="no default is ever taken: every call of the backend passes its scale",
)
def chunked_default_scale() -> Evidence:
    heads, dim, lanes = 8, 64, 4
    problem = make([1, 1], [33, 20], heads=heads, kv_heads=2, dim=dim)
    pages, size, kv_heads, _ = problem.key_pool.shape
    split = problem.key_pool.permute(0, 2, 3, 1).reshape(pages, kv_heads, dim // lanes, lanes, size)
    key_cache = split.permute(0, 1, 2, 4, 3).contiguous()
    value_cache = problem.value_pool.permute(0, 2, 3, 1).contiguous()
    arrays, out = problem.arrays(), torch.zeros_like(problem.query)
    new = torch.zeros(2, kv_heads, dim)
    with kernels.launching():
        kernels.vendor("chunked_pa_prefill").chunked_prefill_paged_decode(
            problem.query, new, new, out, "auto", key_cache, value_cache, arrays["block_table"],
            arrays["query_offsets"], arrays["kv_lens"], 1, 1.0, 1.0, sm_scale=None,
        )  # fmt: skip
    wrong, meant = (worst(problem, out, scale=n**-0.5) for n in (heads, dim))
    return Evidence(
        wrong < 1e-5 < 0.1 < meant, {"distance from 1/sqrt(heads)": wrong, "distance from 1/sqrt(head dim)": meant}
    )


@finding(
    name="append-rotates",
    what="the fused append with cosine 1 and sine 0 is no move of keys: -0 can become +0, and an infinity or NaN makes "
    "its partner in the rotation NaN; values are moved as they are",
    where=f"{VENDOR}/_triton_kernels/fused_kv_cache.py:375",
    consequence="this executor writes keys a second time, by the kernel's store for values; jax-aiter's append is "
    "another kernel",
)
def append_rotates() -> Evidence:
    token = torch.tensor([1.0, -0.0, math.inf, 2.0] + [1.0] * 12).view(1, 1, 16)
    keys, values = torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 16)
    kernels.store(token, token, keys, values, torch.tensor([17], dtype=torch.int32))
    words = {name: pool[1, 1, 0].view(torch.int32) for name, pool in (("keys", keys), ("values", values))}
    given = token.view(-1).view(torch.int32)
    changed = {name: (found != given).nonzero().view(-1).tolist() for name, found in words.items()}
    return Evidence(changed == {"keys": [1, 3], "values": []}, {"changed elements": changed})


@finding(
    name="window-all-masked-tile",
    what="with a window, a tile in which a query sees nothing resets that query's running maximum to 0; if its real "
    "logits are all below about -100, every weight underflows and the output is NaN",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:339",
    consequence="none: such logits are rare, and the backend cannot see them",
)
def window_all_masked_tile() -> Evidence:
    found = {}
    for nats in (50, 120):
        problem = lowered(make([70], [140], heads=2, kv_heads=1), nats)
        found[nats] = int(torch.isnan(problem.run(window=8)).sum()), int(torch.isnan(problem.run()).sum())
    measured = {f"logits lowered by {n}": {"NaN with window 8": a, "NaN without": b} for n, (a, b) in found.items()}
    return Evidence(found[50] == (0, 0) and found[120][0] > 0 == found[120][1], measured)


@finding(
    name="segment-all-masked",
    what="a prefill in segments (rows up to more than 512 tokens): a segment in which a query sees nothing reports a "
    "maximum of 0; if the query's real logits are all below about -100, the output is 0 without a word",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:651",
    consequence="none: such logits are rare, and the backend cannot see them",
)
def segment_all_masked() -> Evidence:
    problem = lowered(make([40], [60], heads=1, kv_heads=1), 120)
    whole, split = problem.run(), problem.run(max_kv_len=LONG)
    zero = int((split == 0).all(-1).sum())
    measured = {"error whole": worst(problem, whole), "error in segments": worst(problem, split), "zero rows": zero}
    return Evidence(measured["error whole"] < 1e-3 and measured["error in segments"] > 0.5 and zero > 0, measured)


@finding(
    name="soft-cap-overflow",
    what="the soft cap is computed as a quotient of exponentials that overflow: a logit above about 89 times the cap, "
    "of either sign, gives NaN",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:28",
    consequence="the backend refuses soft caps",
)
def soft_cap_overflow() -> Evidence:
    found = {}
    for ratio in (80, 100):
        problem = lowered(make([3], [20], heads=1, kv_heads=1), -2.0 * ratio)
        found[ratio] = int(torch.isnan(problem.run(soft_cap=2.0)).sum())
    return Evidence(found[80] == 0 < found[100], {f"NaN at {n} caps": count for n, count in found.items()})


@finding(
    name="batch-composition",
    what="the bits of a row depend on the rows beside it: a decode row alone and next to a prefill goes through tiles "
    "of another width",
    where=f"{VENDOR}/unified_attention.py:38",
    consequence="batch and chunk invariance are not promised",
)
def batch_composition() -> Evidence:
    both = make([1, 5], [100, 20], heads=2, kv_heads=1)
    alone = dataclasses.replace(both, query=both.query[:1], query_lens=(1,), kv_lens=(100,), pages=both.pages[:1])
    mixed, single = both.run()[:1], alone.run()
    moved = int((mixed != single).sum())
    errors = worst(alone, mixed), worst(alone, single)
    return Evidence(moved > 0 and max(errors) < 1e-5, {"moved": moved, "of": single.numel(), "errors": list(errors)})


@finding(
    name="segments-follow-heads",
    what="the number of segments of a long row follows from the heads on the device and its compute units, so the bits "
    "of a head depend on how many heads are beside it: sharding heads moves them",
    where=f"{VENDOR}/unified_attention.py:63",
    consequence="shard invariance is not promised",
)
def segments_follow_heads() -> Evidence:
    heads, query_lens, kv_lens = 2, [1] * 5, [300, 1, 1, 1, 1]
    problem = make(query_lens, kv_lens, heads=heads, kv_heads=heads)
    before = emulator.compute_units()
    emulator.set_compute_units(38)  # one of an MI300X's eight partitions
    try:
        whole = problem.run(max_kv_len=LONG)
        shards = []
        for head in range(heads):
            parts = {"query": problem.query[:, [head]]}
            parts |= {n: getattr(problem, n)[:, :, [head]].contiguous() for n in ("key_pool", "value_pool")}
            shards.append(dataclasses.replace(problem, **parts).run(max_kv_len=LONG))
    finally:
        emulator.set_compute_units(before)
    moved = int((torch.cat(shards, 1) != whole).sum())
    return Evidence(
        moved > 0 and worst(problem, whole) < 1e-5,
        {"moved": moved, "of": whole.numel(), "error": worst(problem, whole)},
    )


@finding(
    name="outputs-written-twice",
    what="where the query heads of a KV head do not divide 16, programs of neighbouring blocks store the same outputs; "
    "with a window their bits can differ, so what is kept depends on which comes last",
    where=f"{VENDOR}/_triton_kernels/unified_attention.py:374",
    consequence="none here, where programs come in one order; on a device such groups with a window may not repeat",
)
def outputs_written_twice() -> Evidence:
    found = {}
    for name, heads, window in (("3 heads, window 8", 3, 8), ("3 heads, no window", 3, 0), ("4 heads, window 8", 4, 8)):
        problem = lowered(make([40], [140], heads=heads, kv_heads=1), 5)
        out = torch.zeros_like(problem.query)
        with recorded_stores(out) as stores:
            kernels.attend(
                problem.query, problem.key_pool, problem.value_pool, out, **problem.arrays(), scale=0.125, window=window
            )
        twice = [words for words in stores.values() if len(words) > 1]
        found[name] = {"stored twice": len(twice), "with other bits": sum(len(set(words)) > 1 for words in twice)}
    raced, equal, single = found.values()
    seen = raced["with other bits"] > 0 == equal["with other bits"] and equal["stored twice"] > 0
    return Evidence(seen and single["stored twice"] == 0, found)


@contextlib.contextmanager
def recorded_stores(out: torch.Tensor) -> Iterator[dict[int, list[int]]]:
    """Address -> words stored there, of every store of a kernel into float32 `out`, in order."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    stock, stores, start = builder.create_masked_store, {}, out.data_ptr()
    end = start + out.numel() * out.element_size()

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        at, words, kept = np.broadcast_arrays(pointers.data, value.data, mask.data.astype(bool))
        for address, word in zip(at[kept].tolist(), words[kept].view(np.uint32).tolist()):
            if start <= address < end:
                stores.setdefault(address, []).append(word)
        return stock(self, pointers, value, mask, cache_policy)

    builder.create_masked_store = create_masked_store
    try:
        yield stores
    finally:
        builder.create_masked_store = stock
