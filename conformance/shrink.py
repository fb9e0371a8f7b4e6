"""Makes a failing case smaller: cases are parameters, so parameters shrink.

The id stays, because it is the seed of the inputs; what was frozen about the inputs goes. A smaller case is kept if it
fails with the same clause and its diagnosis is of the same kind: what a tile's edge broke may else be made so small
that it looks like a wrong scale. The result is a case like any other, for `paged certify BACKEND --case repro.json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from conformance.case import Case, Result

MAX_RUNS = 25
_OPTIONS = ("rung", "window", "soft_cap", "sinks", "statistic", "page_order", "padding", "fill", "phase")


_KINDS = (
    {"left-out", "tokens-missed", "length-minus-one", "prefix-ignored"},
    {
        "scale",
        "fitted-scale",
        "scale-twice",
        "no-scale",
        "log2e-twice",
        "log2e-missing",
        "padded-scale",
        "rounded-scale",
    },
    {
        "window",
        "no-window",
        "window-plus-one",
        "window-minus-one",
        "window-rounded",
        "window-of-chunk",
        "window-factor",
    },
    {"page-order", "page-list", "page-entry", "slot", "slot-order", "position"},
    {"soft-cap", "no-soft-cap", "cap-before-scale", "cap-base2", "fitted-soft_cap", "soft-cap-tanh"},
)
"""Hints of diagnoses that are one kind of fault."""


def kind(hint: str | None) -> str | None:
    """The kind of fault that a diagnosis' hint belongs to."""
    return next((min(group) for group in _KINDS if hint in group), hint)


def shrink(case: Case, clause: str | None, run: Callable[[Case], Result], *, most: int = MAX_RUNS) -> Case:
    """The smallest case found that still fails with `clause`, after at most `most` runs.

    `run` must give an `error` for parameters that do not fit together, as the runner does.
    """
    best = dataclasses.replace(case, inputs=None, expected=None, kills=(), quick=False)
    first = run(best)
    wanted = kind(first.details.get("hint")) if first.status == "fail" and first.clause == clause else None
    left = most - 1
    progress = True
    while progress:
        progress = False
        for params in candidates(best.params):
            if left == 0:
                return best
            left -= 1
            smaller = dataclasses.replace(best, params=params)
            result = run(smaller)
            same = result.status == "fail" and result.clause == clause
            if same and wanted in (None, kind(result.details.get("hint"))):
                best, progress = smaller, True
                break
    return best


def candidates(params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Smaller parameters, the boldest first."""
    queries, lengths = params.get("query_lens"), params.get("kv_lens")
    if queries is not None and lengths is not None:
        yield from _fewer_rows(params, list(queries), list(lengths))
    script = params.get("script")
    if isinstance(script, (list, tuple)) and len(script) > 1:  # a trace fails at its last step, or at an earlier one
        yield from ({**params, "script": list(script[:n])} for n in (len(script) // 2, len(script) - 1))
        yield {**params, "script": list(script[1:])}
    if params.get("tokens", 1) > 1:
        yield {**params, "tokens": params["tokens"] // 2}
    if params.get("pages", 1) > 1:
        yield {**params, "pages": params["pages"] // 2}
    for name in _OPTIONS:
        if params.get(name) is not None:
            yield {k: v for k, v in params.items() if k != name}
    if params.get("layers", 1) > 1:
        yield {k: v for k, v in params.items() if k not in ("layers", "layer")}
    kv_heads, heads = params.get("kv_heads", 1), params.get("q_heads")
    if kv_heads > 1:
        fewer = {**params, "kv_heads": 1}
        yield fewer if heads is None else {**fewer, "q_heads": max(1, heads // kv_heads)}
    if heads is not None and heads > kv_heads:
        yield {**params, "q_heads": kv_heads}
    if queries is not None and lengths is not None:
        yield from _shorter_rows(params, list(queries), list(lengths))
        need = sum(-(-n // params["page"]) for n in lengths) + 2
        if need < params["num_pages"]:
            yield {**params, "num_pages": need}
    if params.get("dtype") != "float32" and not params.get("kv_dtype"):
        yield {**params, "dtype": "float32"}


def _fewer_rows(params: Mapping[str, Any], queries: list[int], lengths: list[int]) -> Iterator[dict[str, Any]]:
    count = len(queries)
    if count > 2:
        half = count // 2
        for part in (slice(None, half), slice(half, None)):
            yield {**params, "query_lens": queries[part], "kv_lens": lengths[part]}
    if count > 1:
        for row in range(count):
            rest = [i for i in range(count) if i != row]
            yield {**params, "query_lens": [queries[i] for i in rest], "kv_lens": [lengths[i] for i in rest]}


def _shorter_rows(params: Mapping[str, Any], queries: list[int], lengths: list[int]) -> Iterator[dict[str, Any]]:
    """One query token a row, then each row cut to half of its pages, then to the border of its last page."""
    if any(q > 1 for q in queries):
        yield {**params, "query_lens": [min(q, 1) for q in queries]}
    page = params["page"]
    for row, (q, n) in enumerate(zip(queries, lengths)):
        for shorter in (n // page // 2 * page, n // page * page, n // 2):
            if 0 < max(shorter, q) < n:
                yield {**params, "kv_lens": [*lengths[:row], max(shorter, q), *lengths[row + 1 :]]}
