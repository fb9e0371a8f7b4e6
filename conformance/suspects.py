"""More known faults as altered problems and rules: windows, masks, heads, queries, sinks, scales, orders of elements.

Continues `conformance.hypotheses`, which asks them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.case import AttendProblem
from conformance.oracle import Rules, _pages, _visible
from paged.common import AttentionSpec

LOG2E = 1.4426950408889634
TILES = (16, 32, 64, 128)
Suspect = tuple[str, str, str, AttendProblem, Rules]
"""hint, clause, text, and the problem and rules that reproduce it."""


def suspects(p: AttendProblem) -> Iterator[Suspect]:
    """All that make a difference to this problem."""
    yield from _masks(p)
    yield from _heads(p)
    yield from _elements(p)
    yield from _numbers(p)
    yield from _lists(p)


def _masks(p: AttendProblem) -> Iterator[Suspect]:
    page = p.table.tokens_per_page
    sizes = dict.fromkeys((*TILES, page))
    if (window := p.spec.window) is not None:
        start = "The window is counted from the row's start and not from the token."
        yield "window-from-start", "attend.4", start, p, Rules(visible=_from_start)
        chunk = "The window of a chunk's first token is used for all of its tokens."
        yield "window-of-chunk", "attend.4", chunk, p, Rules(visible=_of_chunk)
        for size in sizes:
            if size > 1:
                text = f"The window's first position is rounded down to a multiple of {size}: its border is not masked."
                yield "window-rounded", "attend.4", text, p, Rules(visible=_rounded(size, 0))
                text = (
                    f"The window's first position is rounded up to a multiple of {size}: tokens before it are missing."
                )
                yield "window-rounded", "attend.4", text, p, Rules(visible=_rounded(size, size - 1))
        for other in (window * 2, window // 2):
            if other:
                altered = dataclasses.replace(p, spec=dataclasses.replace(p.spec, window=other))
                yield "window-factor", "attend.4", f"The output is that of a window of {other}.", altered, Rules()
    if p.spec.causal:
        for size in sizes:
            if size > 1:
                text = f"The causal mask goes by tiles of {size}: later tokens of the tile are seen."
                yield "causal-tile", "attend.3", text, p, Rules(visible=_causal_tile(size))
        yield "causal-plus-one", "attend.3", "A token sees the one after it.", p, Rules(visible=_one_more)


def _from_start(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    _, end = _visible(position, query_len, kv_len, causal=causal, window=None)
    return 0, end if window is None else min(end, window)


def _of_chunk(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    first, _ = _visible(kv_len - query_len, query_len, kv_len, causal=causal, window=window)
    return first, _visible(position, query_len, kv_len, causal=causal, window=window)[1]


def _rounded(size: int, add: int) -> Callable[..., tuple[int, int]]:
    def visible(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
        first, end = _visible(position, query_len, kv_len, causal=causal, window=window)
        return min((first + add) // size * size, end - 1), end

    return visible


def _causal_tile(size: int) -> Callable[..., tuple[int, int]]:
    def visible(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
        first, end = _visible(position, query_len, kv_len, causal=causal, window=window)
        return first, min(-(-end // size) * size, kv_len)

    return visible


def _one_more(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    first, end = _visible(position, query_len, kv_len, causal=causal, window=window)
    return first, min(end + 1, kv_len)


def _heads(p: AttendProblem) -> Iterator[Suspect]:
    heads, kv_heads = p.query.shape[1], p.keys.shape[2]
    group = heads // kv_heads

    def modulo(h: int, heads: int, kv: int) -> int:
        return h % kv

    if kv_heads > 1:
        for name, rules in (("Values", Rules(value_head=modulo)), ("Keys", Rules(key_head=modulo))):
            yield "gqa-modulo", "attend.6", f"{name} come from KV head h mod KV heads, the others rightly.", p, rules
        for padded in sorted({1 << (group - 1).bit_length(), group + 1, 2 * group, max(1, group - 1)} - {group}):

            def wide(h: int, heads: int, kv: int, padded: int = padded) -> int:
                return min(h // padded, kv - 1)

            text = f"Query head h reads KV head h // {padded}, not h // {group}."
            yield "gqa-group", "attend.6", text, p, Rules(key_head=wide, value_head=wide)
        first = Rules(key_head=lambda h, heads, kv: 0)
        yield "key-head-0", "attend.6", "Keys come from KV head 0.", p, first
    if heads > 1:
        at = np.arange(heads)
        orders = {"the next query head": np.roll(at, -1), "the query head before it": np.roll(at, 1)}
        orders |= {"its neighbour in pairs": at ^ 1} if heads % 2 == 0 else {}
        orders |= {"the query head counted from the end": at[::-1]}
        if 1 < group < heads:
            orders["a query head of the transposed order (groups first)"] = at.reshape(kv_heads, group).T.reshape(-1)
        for name, order in orders.items():
            text = f"The query of a head is that of {name}."
            yield "query-head", "attend.6", text, dataclasses.replace(p, query=p.query[:, order]), Rules()
    for step, name in ((-1, "before"), (1, "after")):
        text = f"The query of a token is that of the token {name} it in the batch: rows' offsets are off by one."
        yield "query-row", "attend.12", text, dataclasses.replace(p, query=np.roll(p.query, -step, axis=0)), Rules()
    firsts = np.minimum(np.repeat(p.table.query_offsets[:-1], p.table.query_lens), len(p.query) - 1)
    if len(firsts) and (p.table.query_lens > 1).any():
        query = p.query.copy()
        query[: len(firsts)] = p.query[firsts]
        yield (
            "query-first",
            "attend.3",
            "Every token of a row has the query of its first.",
            _with(p, query=query),
            Rules(),
        )


def _with(p: AttendProblem, **changes: Any) -> AttendProblem:
    return dataclasses.replace(p, **changes)


def _elements(p: AttendProblem) -> Iterator[Suspect]:
    d, e, page = p.query.shape[-1], p.values.shape[-1], p.table.tokens_per_page
    for name, width, change in (
        ("values", e, lambda order: _with(p, values=p.values[..., order])),
        ("queries against keys", d, lambda order: _with(p, query=p.query[..., order])),
    ):
        if width % 2 == 0 and width > 2:
            at = np.arange(width)
            pairs = at.reshape(2, -1).T.reshape(-1)
            for what, order in (
                ("the halves of a head are exchanged", np.roll(at, width // 2)),
                ("dims are interleaved where halves are due", pairs),
                ("halves stand where interleaved dims are due", np.argsort(pairs)),
                ("neighbouring dims are exchanged", at ^ 1),
                ("dims run backwards", at[::-1]),
            ):
                clause = "attend.1" if name == "values" else "attend.2"
                yield "dims", clause, f"In {name} {what}.", change(order), Rules()
    if page > 1:
        for name in ("values", "keys"):
            for what, words in (
                ("in reverse", getattr(p, name)[:, ::-1]),
                ("one slot on, around", np.roll(getattr(p, name), -1, axis=1)),
            ):
                other = "keys" if name == "values" else "values"
                text = f"The slots of every page are read {what} for {name}, and rightly for {other}."
                yield "slot-order", "pages.3", text, _with(p, **{name: words}), Rules()


def _numbers(p: AttendProblem) -> Iterator[Suspect]:
    spec = p.spec
    if spec.soft_cap is not None:
        text = "The soft cap is applied to logits in base 2: log2 e came before it."
        capped = AttentionSpec(**{**dataclasses.asdict(spec), "soft_cap": spec.soft_cap / LOG2E})
        yield "cap-base2", "attend.5", text, _with(p, spec=capped), Rules()
        capped = AttentionSpec(**{**dataclasses.asdict(spec), "soft_cap": spec.soft_cap * LOG2E})
        yield "cap-base2", "attend.5", "The soft cap itself is multiplied by log2 e.", _with(p, spec=capped), Rules()
    if p.sinks is not None:
        heads, kv_heads = p.query.shape[1], p.keys.shape[2]
        at = np.arange(heads)
        cap = spec.soft_cap
        for what, sinks in (
            ("in the order of the neighbouring head", p.sinks[at ^ 1] if heads % 2 == 0 else np.roll(p.sinks, 1)),
            ("of the next head", np.roll(p.sinks, -1)),
            ("taken by KV head, not by query head", p.sinks[at // (heads // kv_heads)]),
            ("of head 0 for every head", p.sinks[at * 0]),
            ("in the transposed order of groups", p.sinks[at.reshape(kv_heads, -1).T.reshape(-1)]),
            ("multiplied by log2 e, though exp is natural", p.sinks * np.float32(LOG2E)),
            ("not multiplied by log2 e, though exp2 is used", p.sinks / np.float32(LOG2E)),
            ("multiplied by the scale", p.sinks * np.float32(spec.scale)),
            ("divided by the scale", p.sinks / np.float32(spec.scale)),
            ("with the wrong sign", -p.sinks),
            *((f"counted {k} times, as once in each split", p.sinks + np.float32(np.log(k))) for k in (2, 3, 4, 8)),
            *(() if cap is None else (("under the soft cap", (cap * np.tanh(p.sinks / cap)).astype(np.float32)),)),
        ):
            text = f"The output is that of sinks {what}."
            yield "sinks", "attend.1", text, _with(p, sinks=sinks), Rules()
    if None not in (p.key_scale, p.value_scale) and p.key_scale != p.value_scale:
        for text, scales in (
            ("The scale of the keys is used for the values too.", {"value_scale": p.key_scale}),
            ("The scale of the values is used for the keys too.", {"key_scale": p.value_scale}),
            ("The scales of keys and values are exchanged.", {"key_scale": p.value_scale, "value_scale": p.key_scale}),
        ):
            yield "kv-scales", "attend.14", text, _with(p, **scales), Rules()


def _lists(p: AttendProblem) -> Iterator[Suspect]:
    longest = max((len(p.table.pages_of(r)) for r in range(p.table.num_rows)), default=0)
    for width in (2, 4, 8, 16, 32, 64, 128):
        if width < longest:
            for text, order in (
                (f"Beyond {width} pages the list wraps: entry i is read at i mod {width}.", _wraps(width)),
                (f"Entries from {width} on are read one further on.", _after(width, -1)),
                (f"Entries from {width} on are read one too early.", _after(width, 1)),
            ):
                yield "page-list", "pages.3", text, p, Rules(pages=order)
    if p.table.num_rows > 1:
        for step, name in ((1, "next"), (-1, "previous")):
            yield "other-row", "attend.12", f"A row reads the pages of the {name} row.", p, Rules(pages=_of_row(step))
    if longest > 1:
        yield (
            "page-order",
            "pages.3",
            "A row's pages are read in reverse.",
            p,
            Rules(pages=lambda q, r: _pages(q, r)[::-1]),
        )


def _wraps(width: int) -> Callable[[AttendProblem, int], np.ndarray]:
    def pages(p: AttendProblem, row: int) -> np.ndarray:
        own = _pages(p, row)
        return own[np.arange(len(own)) % width]

    return pages


def _after(width: int, step: int) -> Callable[[AttendProblem, int], np.ndarray]:
    def pages(p: AttendProblem, row: int) -> np.ndarray:
        own = _pages(p, row)
        return np.concatenate([own[:width], np.roll(own[width:], step)])

    return pages


def _of_row(step: int) -> Callable[[AttendProblem, int], np.ndarray]:
    def pages(p: AttendProblem, row: int) -> np.ndarray:
        other = _pages(p, (row + step) % p.table.num_rows)
        need = len(p.table.pages_of(row))
        return np.resize(other, need) if len(other) else _pages(p, row)

    return pages
