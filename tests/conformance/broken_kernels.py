"""Kernels with faults that vendors have shipped or could, none of them a mutant of the suite: what a diagnosis is for.

A plain kernel in numpy, one row and query head at a time: gather whole pages, mask, weigh, merge splits. A fault is a
change of one of its parts, a function of `Row`; `above` lets it strike rows of more than so many tokens only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from conformance.case import AttendProblem
from conformance.formats import decode, encode, round_to

TILE, SPLITS, LOG2E = 64, 3, 1.4426950408889634
Part = Callable[[SimpleNamespace], None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """`clause` that it breaks, `said`: texts of which a diagnosis must hold one; `parts` change the row at a stage.

    Stages: `table` (pages, n), `tokens` (q, k, v), `mask`, `logits`, `weights`, `end` (out, lse).
    """

    clause: str
    said: tuple[str, ...]
    parts: dict[str, Part]
    cases: tuple[str, ...]


def run(p: AttendProblem, fault: Fault | None, above: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Output words (t, h, e) and float32 LSE (t, h)."""
    tokens, heads, _ = p.query.shape
    out, lse = np.zeros((tokens, heads, p.values.shape[-1])), np.full((tokens, heads), -np.inf)
    for row in range(p.table.num_rows):
        n, first = int(p.table.kv_lens[row]), int(p.table.query_offsets[row])
        end = int(p.table.query_offsets[row + 1])
        if not n or end == first:
            continue
        for head in range(heads):
            parts = fault.parts if fault is not None and n > above else {}
            out[first:end, head], lse[first:end, head] = _head(p, row, head, first, end, n, parts)
    with np.errstate(all="ignore"):
        words = encode(out, p.dtype)
    words = np.where(words == (1 << (8 * words.itemsize - 1)), 0, words).astype(words.dtype)
    return words, lse.astype(np.float32)


def _head(p, row, head, first, end, n, parts):
    heads, kv_heads, size, spec = p.query.shape[1], p.keys.shape[2], p.table.tokens_per_page, p.spec
    group = heads // kv_heads
    r = SimpleNamespace(p=p, row=row, head=head, first=first, n=n, size=size, spec=spec, parts=parts, kv=head // group)
    r.value_kv, r.pages, r.tokens = r.kv, p.table.pages_of(row).astype(int), np.arange(first, end)
    r.scale, r.cap, r.window = float(np.float32(spec.scale)), spec.soft_cap, spec.window
    r.key_scale, r.value_scale = p.key_scale or 1.0, p.value_scale or 1.0
    r.sink = None if p.sinks is None else float(p.sinks[head])
    change(r, "table")
    at = p.layer * p.table.num_pages + r.pages
    r.q = decode(p.query[r.tokens, head], p.dtype)
    r.k = decode(p.keys[at, :, r.kv].reshape(len(at) * size, -1), p.kv_dtype)
    r.v = decode(p.values[at, :, r.value_kv].reshape(len(at) * size, -1), p.kv_dtype)
    r.j, r.position = np.arange(len(r.k))[None], r.n - len(r.q) + np.arange(len(r.q))[:, None]
    change(r, "tokens")
    r.mask = np.broadcast_to((r.j <= r.position) if spec.causal else (r.j < r.n), (len(r.q), len(r.k)))
    if r.window is not None:
        r.mask = r.mask & (r.j > r.position - r.window)
    change(r, "mask")
    with np.errstate(all="ignore"):
        r.used = r.mask.any(0)
        r.raw = r.q @ np.where(r.used[:, None], r.k, 0).T
        r.logits = r.raw * (r.scale * r.key_scale)
        if r.cap is not None:
            r.logits = r.cap * np.tanh(r.logits / r.cap)
        change(r, "logits")
        r.logits = np.where(r.mask, r.logits, -np.inf)
        r.top = r.logits.max(1, keepdims=True)
        if r.sink is not None:
            r.top = np.maximum(r.top, r.sink)
        r.top = np.where(np.isneginf(r.top), 0, r.top)
        r.w, r.sum_of = np.exp(r.logits - r.top), 1.0
        change(r, "weights")
        r.total = r.w.sum(1, keepdims=True) * r.sum_of
        r.zsink = 0.0 if r.sink is None else np.exp(r.sink - r.top)
        r.total = r.total + r.zsink
        r.out = (r.w @ np.where(r.used[:, None], r.v, 0)) / np.where(r.total == 0, 1, r.total) * r.value_scale
        r.lse = (r.top + np.log(r.total))[:, 0]
        change(r, "end")
    return r.out, r.lse


def change(r: SimpleNamespace, stage: str) -> None:
    """Apply the fault's part of a stage."""
    if stage in r.parts:
        r.parts[stage](r)


def setting(**values) -> Part:
    """A part that sets fields, each a function of the row."""

    def part(r):
        for name, value in values.items():
            setattr(r, name, value(r))

    return part


def hide(which: Callable[[SimpleNamespace], np.ndarray]) -> dict[str, Part]:
    """Leave the chosen positions out, unless that left nothing."""

    def part(r):
        mask = r.mask & ~which(r)
        r.mask = np.where(mask.any(1, keepdims=True), mask, r.mask)

    return {"mask": part}


def unsplit(r, rule):
    """Weigh the states of the splits by another rule: `rule`(states, top) -> a factor for each split."""
    pages = math.ceil(r.n / r.size)
    step = math.ceil(pages / SPLITS) * r.size
    logits = r.logits
    for a in range(0, r.w.shape[1], step):
        b = a + step
        own = logits[:, a:b].max(1, keepdims=True, initial=-np.inf)
        r.w[:, a:b] *= np.where(np.isneginf(own), 0, rule(own, r.top))


def poly_exp(r):
    x = (r.logits - r.top) * LOG2E
    whole = np.floor(x)
    f = x - whole
    r.w = np.where(
        np.isneginf(r.logits), 0, np.exp2(np.where(np.isneginf(x), 0, whole)) * (1 + f * (0.6565 + f * 0.3435))
    )


def stale_row_sum(r):
    """The row sum is not rescaled when the maximum rises from tile to tile; the accumulator is."""
    total, running = np.zeros_like(r.top), np.full_like(r.top, -np.inf)
    for a in range(0, r.w.shape[1], TILE):
        tile = r.logits[:, a : a + TILE]
        running = np.maximum(running, tile.max(1, keepdims=True))
        total = total + np.exp(tile - np.where(np.isneginf(running), 0, running)).sum(1, keepdims=True)
    r.sum_of = total / r.w.sum(1, keepdims=True)


def masked_tile_nan(r):
    """−∞ − (−∞) where a whole tile is masked before anything was seen."""
    for a in range(0, r.logits.shape[1], 16):
        if a < r.n:
            none = np.isneginf(r.logits[:, : a + 16]).all(1)
            r.out[none], r.lse[none] = np.nan, np.nan


def rational(x):
    return x * (27 + x * x) / (27 + 9 * x * x)


def swap_dims(r):
    half = r.out.shape[1] // 2
    r.out = np.concatenate([r.out[:, half:], r.out[:, :half]], 1)


def neighbour_pages(r):
    table = r.p.table
    other = table.pages_of((r.row + 1) % table.num_rows).astype(int)
    r.pages = np.resize(other, len(r.pages)) if len(other) else r.pages


def skip_last(r):
    rows = np.flatnonzero((r.p.table.query_lens > 0) & (r.p.table.kv_lens > 0))
    if len(rows) % 4 and r.row == rows[-1]:
        r.out, r.lse = np.zeros_like(r.out), np.zeros_like(r.lse)


def lse_of(logits):
    def part(r):
        found = logits(r)
        top = found.max(1, keepdims=True)
        total = np.exp(found - top).sum(1, keepdims=True) + (0 if r.sink is None else np.exp(r.sink - top))
        r.lse = (top + np.log(total))[:, 0]

    return {"end": part}


def no_window(r):
    seen = (r.j <= r.position) if r.spec.causal else (r.j < r.n)
    k = np.where(seen.any(0)[:, None], r.k, 0)
    logits = r.q @ k.T * (r.scale * r.key_scale)
    logits = logits if r.cap is None else r.cap * np.tanh(logits / r.cap)
    return np.where(seen, logits, -np.inf)


B = "attend/{}/bf16/{}".format
MIXED = (B("census", "mixed"), B("address", "mixed"), B("generic", "mixed"), B("ladder", "decode"))
TAIL = (*MIXED, B("census", "tile-edges/phase-0"), "attend/ladder/fp16/decode", B("ladder", "d128/decode"))
MORE = (
    *TAIL,
    "attend/generic/f32/mixed",
    "attend/census/f32/mixed",
    B("dyadic", "one-sign"),
    B("generic", "long-statistic"),
)
WINDOW = (B("census", "window-19"), B("address", "window-19"), B("generic", "window-19"))
CAP = (B("ladder", "soft-cap-1"), B("generic", "soft-cap-1"), "attend/generic/f32/soft-cap-30")
SINKS = (B("census", "sinks"), B("generic", "sinks"))
FP8 = tuple(f"attend/{g}/bf16-e4m3fn/mixed" for g in ("generic", "address"))
KV3 = (B("census", "d80-page4-kv3-group1"),)

FAULTS = {
    "last page left out": Fault(
        "pages.3", ("left out", "last page"), hide(lambda r: r.j >= (r.n - 1) // r.size * r.size), TAIL
    ),
    "partial tile left out": Fault(
        "pages.3", ("left out", "wanted page"), hide(lambda r: r.j >= r.n // TILE * TILE), TAIL
    ),
    "first page left out": Fault("pages.3", ("left out", "first page"), hide(lambda r: r.j < r.size), TAIL),
    "first token left out": Fault("pages.3", ("left out", "first token"), hide(lambda r: r.j < 1), TAIL),
    "every 8th token left out": Fault("pages.3", ("left out", "every 8th"), hide(lambda r: r.j % 8 == 7), TAIL),
    "every 4th page left out": Fault(
        "pages.3", ("left out", "every 4th page"), hide(lambda r: r.j // r.size % 4 == 3), TAIL
    ),
    "last token of a partial tile left out": Fault(
        "pages.3", ("left out", "last token"), hide(lambda r: (r.j == r.n - 1) & (r.n % TILE > 0)), TAIL
    ),
    "one slot past a partial tile": Fault(
        "attend.7",
        ("NaN", "past", "must not read"),
        {"mask": setting(mask=lambda r: r.mask | ((r.j == r.n) & (r.position == r.n - 1) & (r.n % TILE > 0)))},
        MIXED,
    ),
    "splits merged by the inverse weight": Fault(
        "attend.1",
        ("merge", "splits", "rescal"),
        {"weights": lambda r: unsplit(r, lambda own, top: np.exp(np.minimum(2 * (top - own), 60)))},
        MORE,
    ),
    "splits not rescaled": Fault(
        "attend.1",
        ("merge", "splits", "rescal"),
        {"weights": lambda r: unsplit(r, lambda own, top: np.exp(np.minimum(top - own, 60)))},
        MORE,
    ),
    "row sum not rescaled": Fault("attend.1", ("row sum", "rescal", "maximum"), {"weights": stale_row_sum}, MORE),
    "sink not rescaled in the numerator": Fault(
        "attend.1",
        ("sink",),
        {
            "end": setting(
                out=lambda r: r.out if r.sink is None else r.out * np.exp(r.top - r.logits.max(1, keepdims=True))
            )
        },
        SINKS,
    ),
    "sinks of the head's neighbour": Fault(
        "attend.1", ("sink",), {"table": setting(sink=lambda r: float(r.p.sinks[r.head ^ 1]))}, SINKS
    ),
    "sinks by KV head": Fault("attend.1", ("sink",), {"table": setting(sink=lambda r: float(r.p.sinks[r.kv]))}, SINKS),
    "sinks capped or scaled by log2 e": Fault(
        "attend.1", ("sink",), {"table": setting(sink=lambda r: r.sink * LOG2E)}, SINKS
    ),
    "sink missing from the LSE": Fault(
        "attend.11", ("sink",), {"end": setting(lse=lambda r: (r.top + np.log(r.total - r.zsink))[:, 0])}, SINKS
    ),
    "sink in the numerator": Fault(
        "attend.1", ("sink",), {"end": setting(out=lambda r: r.out + r.zsink / r.total * r.v[:1])}, SINKS
    ),
    "cap in base 2": Fault(
        "attend.5",
        ("soft cap", "cap"),
        {"logits": setting(logits=lambda r: r.cap * np.tanh(r.raw * r.scale * LOG2E / r.cap) / LOG2E)},
        CAP,
    ),
    "tanh by a rational": Fault(
        "attend.5",
        ("soft cap", "cap", "tanh"),
        {"logits": setting(logits=lambda r: r.cap * rational(np.clip(r.raw * r.scale / r.cap, -3, 3)))},
        CAP,
    ),
    "LSE in base 2": Fault(
        "attend.11", ("base 2",), {"end": setting(lse=lambda r: r.lse * LOG2E)}, (*MIXED[1:], *SINKS)
    ),
    "LSE without the scale": Fault(
        "attend.11",
        ("scale",),
        lse_of(lambda r: np.where(r.mask, r.raw * r.key_scale, -np.inf)),
        (MIXED[2], "attend/generic/f32/mixed"),
    ),
    "LSE of the maximum alone": Fault(
        "attend.11", ("maximum",), {"end": setting(lse=lambda r: r.logits.max(1))}, MIXED
    ),
    "LSE without the window": Fault("attend.11", ("window",), lse_of(no_window), WINDOW),
    "LSE of the sum alone": Fault(
        "attend.11", ("maximum",), {"end": setting(lse=lambda r: np.log(r.total)[:, 0])}, (MIXED[2],)
    ),
    "window from the row's start": Fault(
        "attend.4",
        ("window",),
        {"mask": setting(mask=lambda r: (r.j <= r.position) & ((r.j < r.window) | (r.position < r.window)))},
        WINDOW,
    ),
    "window of the chunk's first token": Fault(
        "attend.4",
        ("window",),
        {"mask": setting(mask=lambda r: (r.j <= r.position) & (r.j > r.position[:1] - r.window))},
        WINDOW,
    ),
    "window rounded to pages": Fault(
        "attend.4",
        ("window",),
        {
            "mask": setting(
                mask=lambda r: (
                    (r.j <= r.position) & (r.j >= np.maximum(r.position - r.window + 1, 0) // r.size * r.size)
                )
            )
        },
        WINDOW,
    ),
    "KV head modulo": Fault(
        "attend.6", ("mod",), {"table": setting(value_kv=lambda r: r.head % r.p.keys.shape[2])}, MIXED
    ),
    "KV head by a padded group": Fault(
        "attend.6", ("KV head",), {"table": setting(kv=lambda r: r.head // 4, value_kv=lambda r: r.head // 4)}, MIXED
    ),
    "table stride beyond 4 pages": Fault(
        "pages.3",
        ("Entries from 4 on",),
        {"table": setting(pages=lambda r: np.concatenate([r.pages[:4], np.roll(r.pages[4:], 1)]))},
        TAIL[1:],
    ),
    "pages wrap after 8": Fault(
        "pages.3", ("page",), {"table": setting(pages=lambda r: r.pages[np.arange(len(r.pages)) % 8])}, TAIL
    ),
    "pages of the next row": Fault("attend.12", ("row",), {"table": neighbour_pages}, MIXED),
    "scale of K used for V": Fault("attend.14", ("scale",), {"table": setting(value_scale=lambda r: r.key_scale)}, FP8),
    "scales exchanged": Fault(
        "attend.14",
        ("scale",),
        {"table": setting(value_scale=lambda r: r.key_scale, key_scale=lambda r: r.value_scale)},
        FP8,
    ),
    "weights in 8 bits": Fault(
        "attend.1", ("bits",), {"weights": setting(w=lambda r: round_to(r.w, "float8_e4m3fn"))}, MORE[:4] + MORE[7:]
    ),
    "logits in bfloat16": Fault(
        "attend.1", ("bits",), {"logits": setting(logits=lambda r: round_to(r.logits, "bfloat16"))}, (MORE[7], MORE[10])
    ),
    "exponential by a parabola": Fault("attend.1", ("bits", "exponential"), {"weights": poly_exp}, MORE[7:]),
    "query of the neighbour row": Fault(
        "attend.12",
        ("query", "row"),
        {"table": setting(tokens=lambda r: (r.tokens + 1) % len(r.p.query))},
        (MIXED[2], MIXED[1], "attend/generic/f32/mixed"),
    ),
    "query of the neighbour head": Fault(
        "attend.6",
        ("query head", "head"),
        {"tokens": setting(q=lambda r: decode(r.p.query[r.tokens, r.head ^ 1], r.p.dtype))},
        (MIXED[2], "attend/generic/f32/mixed"),
    ),
    "last row skipped": Fault("attend.1", ("zero", "row"), {"end": skip_last}, MIXED),
    "NaN of a masked tile": Fault("attend.1", ("arithmetic", "NaN"), {"end": masked_tile_nan}, WINDOW),
    "values of a page in reverse": Fault(
        "pages.3",
        ("slot", "page"),
        {"tokens": setting(v=lambda r: r.v.reshape(-1, r.size, r.v.shape[1])[:, ::-1].reshape(r.v.shape))},
        MIXED,
    ),
    "halves of a head exchanged": Fault("attend.1", ("dim", "exchanged"), {"end": swap_dims}, MIXED),
    "causal mask by tiles": Fault(
        "attend.3",
        ("causal", "later", "count"),
        {"mask": setting(mask=lambda r: (r.j // 16 <= r.position // 16) & (r.j < r.n))},
        MIXED,
    ),
    "tokens at a split's border twice": Fault(
        "attend.1",
        ("twice", "2 times"),
        {"weights": setting(w=lambda r: np.where(r.j % TILE == 0, 2 * r.w, r.w))},
        MIXED,
    ),
}
"""Name -> fault."""
