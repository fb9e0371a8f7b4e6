"""A plain float32 kernel with tiles and splits, honest or with one flaw: where faults of softmax and merging live.

One pass over the positions of a row, `TILE` at a time, with a running maximum; `SPLITS` parts of a row are merged by
their states. Small and slow: it gathers whole rows. Honest, it is certified under the numeric model `N0+xla`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from paged.backends.moves import from_storage

TILE = 16
SPLITS = 3

FLAWS = (
    "nan_times_zero",
    "mask_zero",
    "mask_before_cap",
    "online_max_stale",
    "accumulator_not_rescaled",
    "unweighted_merge",
    "bf16_accumulator",
    "p_4_bits",
    "batch_splits",
    "rung_splits",
    "chunk_splits",
    "shard_splits",
    "empty_split_nan",
    "sink_not_rescaled",
    "nondeterministic",
)
"""Names of the flaws, which are mutants of `conformance.mutants`."""

_calls = itertools.count()


def host(flaw: str | None = None) -> Callable[[Any], tuple[Any, Any]]:
    """Attention of a `conformance.faults.Call`, with one flaw or none."""
    if flaw is not None and flaw not in FLAWS:
        raise ValueError(f"flaw must be one of {', '.join(FLAWS)}; got {flaw!r}.")
    return lambda call: attend(call, flaw)


def attend(call: Any, flaw: str | None) -> tuple[Any, Any]:
    """Output in the query's dtype and natural-log LSE in float32."""
    if flaw == "nondeterministic":
        turn = io_callback(  # a different order of summation every other call
            lambda: np.int32(next(_calls) % 2), jax.ShapeDtypeStruct((), jnp.int32)
        )
        results = [_attend(call, None, splits) for splits in (1, SPLITS)]
        out, lse = (jnp.where(turn == 0, a, b) for a, b in zip(*results))
    else:
        out, lse = _attend(call, flaw, _splits(call, flaw))
    return out.astype(call.query.dtype), lse


def _splits(call: Any, flaw: str | None) -> int:
    rung, kv_heads = call.rung, call.pool.keys.shape[2]
    varying = {
        "batch_splits": 1 + rung.rows % 4,
        "rung_splits": 1 + rung.max_kv_len // 100 % 4,
        "chunk_splits": 1 + rung.max_query_len % 4,
        "shard_splits": kv_heads,
    }
    return varying.get(flaw or "", SPLITS)


def _attend(call: Any, flaw: str | None, splits: int) -> tuple[Any, Any]:
    rung, rows, spec, extras = call.rung, call.rows, call.spec, call.extras
    tokens, heads, width = call.query.shape
    kv_heads, size = call.pool.keys.shape[2], rung.tokens_per_page
    group = heads // kv_heads
    tiles = -(-max(rung.max_kv_len, 1) // TILE)
    splits = min(splits, tiles)
    length = tiles * TILE

    at = jnp.arange(length, dtype=jnp.int32)[None]
    position, kv_len = rows.position[:, None], rows.kv_len[:, None]
    seen = (at < kv_len) & (kv_len > 0)
    if spec.causal:
        seen &= at <= position
    if spec.window is not None:
        seen &= at > position - spec.window
    held = at < -(-kv_len // size) * size  # whole pages: what a kernel that loads pages has in hand
    page = rows.page_ids[jnp.where(held, rows.first_page[:, None] + at // size, rows.page_ids.shape[0] - 1)]
    page = page + call.page_base

    def read(stored: Any, mask: Any) -> Any:  # (tokens, KV heads, positions, width)
        found = from_storage(stored[page, at % size], call.pool.dtype).astype(jnp.float32)
        return jnp.swapaxes(jnp.where(mask[..., None, None], found, jnp.float32(0)), 1, 2)

    keys = read(call.pool.keys, seen)
    values = read(call.pool.values, held if flaw == "nan_times_zero" else seen)
    if extras.value_scale is not None:
        values = values * extras.value_scale
    query = call.query.astype(jnp.float32).reshape(tokens, kv_heads, group, width)
    logits = jnp.einsum("tkgd,tknd->tkgn", query, keys, precision=lax.Precision.HIGHEST)
    if extras.key_scale is not None:
        logits = logits * extras.key_scale
    logits = logits * jnp.float32(spec.scale)
    mask = seen[:, None, None]
    if flaw == "mask_before_cap":
        logits = jnp.where(mask, logits, jnp.float32(-1e30))
    if spec.soft_cap is not None:
        cap = jnp.float32(spec.soft_cap)
        logits = cap * jnp.tanh(logits / cap)
    if flaw == "mask_zero":
        logits = jnp.where(mask | ~held[:, None, None], logits, jnp.float32(0))
        logits = jnp.where(held[:, None, None], logits, -jnp.inf)
    elif not (flaw == "mask_before_cap" and spec.soft_cap is not None):
        logits = jnp.where(mask, logits, -jnp.inf)

    cuts = np.linspace(0, tiles, splits + 1).round().astype(int)
    parts = [_one_split(logits, values, range(a, b), flaw) for a, b in itertools.pairwise(cuts.tolist())]
    return _merge(parts, extras.sinks, rows.kv_len > 0, flaw, (tokens, kv_heads, group))


def _one_split(logits: Any, values: Any, tiles: range, flaw: str | None) -> tuple[Any, Any, Any]:
    """Running maximum, row sum and accumulator over some tiles."""
    top = jnp.full(logits.shape[:3], -jnp.inf, jnp.float32)
    total = jnp.zeros(logits.shape[:3], jnp.float32)
    acc = jnp.zeros((*logits.shape[:3], values.shape[-1]), jnp.float32)
    for index, tile in enumerate(tiles):
        s = logits[..., tile * TILE : (tile + 1) * TILE]
        v = values[:, :, tile * TILE : (tile + 1) * TILE]
        new_top = jnp.maximum(top, s.max(-1))
        if flaw == "online_max_stale" and index:
            new_top = jnp.where(jnp.isfinite(top), top, new_top)
        base = jnp.where(jnp.isfinite(new_top), new_top, jnp.float32(0))
        weight = jnp.exp(s - base[..., None])
        keep = jnp.where(jnp.isfinite(top), jnp.exp(top - base), jnp.float32(0))
        if flaw == "p_4_bits":
            weight = lax.reduce_precision(weight, 8, 3)
        add = jnp.einsum("tkgn,tkne->tkge", weight, v, precision=lax.Precision.HIGHEST)
        acc = (acc if flaw == "accumulator_not_rescaled" else acc * keep[..., None]) + add
        if flaw == "bf16_accumulator":
            acc = lax.reduce_precision(acc, 8, 7)
        total = total * keep + weight.sum(-1)
        top = new_top
    return top, total, acc


def _merge(parts: Any, sinks: Any, live: Any, flaw: str | None, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """One state from the states of the splits, the sinks joining once."""
    top = jnp.stack([p[0] for p in parts]).max(0)
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.reshape(1, *shape[1:]), shape)
        top = jnp.maximum(top, sinks)
    base = jnp.where(jnp.isfinite(top), top, jnp.float32(0))
    share = [jnp.exp(p[0] - base) for p in parts]
    total = sum(w * p[1] for w, p in zip(share, parts))
    out = sum(w[..., None] * p[2] for w, p in zip(share, parts))
    if flaw == "sink_not_rescaled":  # the accumulator stays relative to the largest logit, the sum follows the sink
        own = jnp.stack([p[0] for p in parts]).max(0)
        out = out * jnp.exp(base - jnp.where(jnp.isfinite(own), own, base))[..., None]
    if sinks is not None:
        total = total + jnp.exp(sinks - base)
    some = live[:, None, None] & (total != 0)
    out = out / jnp.where(some, total, 1.0)[..., None]
    if flaw == "unweighted_merge":
        used = [(p[1] > 0)[..., None] for p in parts]
        means = [jnp.where(u, p[2] / jnp.where(u, p[1][..., None], 1.0), 0.0) for u, p in zip(used, parts)]
        out = sum(means) / jnp.maximum(sum(u.astype(jnp.float32) for u in used), 1.0)
    out = jnp.where(some[..., None], out, jnp.float32(0))
    if flaw == "empty_split_nan":  # 0 / 0 of a split whose tiles lie past the row, its weight being 0
        empty = jnp.stack([p[1] == 0 for p in parts]).any(0) & some
        out = jnp.where(empty[..., None], jnp.float32(np.nan), out)
    lse = jnp.where(some, base + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    return out.reshape(shape[0], -1, out.shape[-1]), lse.reshape(shape[0], -1)
