"""What the catalogue covers: clauses, options, geometry; and which of its cases add nothing.

All of it is computed from the cases as data and from docs/semantics.md, and CI holds it: a clause without a case, a
case without a clause, a geometry that is asked for and missing, a case that kills nothing and covers nothing new.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from conformance.canonical import dumps
from conformance.case import Case
from conformance.catalogue import SELECTIONS
from conformance.quick import single_tokens
from paged.common import Capabilities
from paged.common.capabilities import FEATURES

_CLAUSE = re.compile(r"^- \*\*([a-z]+\.\d+)\*\* ", re.MULTILINE)

ASKED: Mapping[str, frozenset[Any]] = {
    "dtype": frozenset({"bfloat16", "float16", "float32"}),
    "kv_dtype": frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}),
    "head_dim": frozenset({16, 32, 64, 80, 96, 128, 192, 256}),
    "page": frozenset({1, 2, 4, 8, 16, 32, 64, 128, 256}),
    "group": frozenset({1, 2, 3, 4, 5, 6, 8}),
    "batch": frozenset({"prefill", "decode", "mixed"}),
    "option": frozenset(
        {
            *("window", "soft_cap", "sinks", "lse", "non_causal", "kv_scales", "value_head_dim"),
            *("window+sinks", "non_causal+window", "soft_cap+causal", "odd_scale", "one_token_window"),
            *("empty_row", "row_without_tokens", "shared_pages", "padding", "layers", "page_id_17_bits"),
        }
    ),
    "length": frozenset({"below_page", "page", "above_page", "below_tile", "tile", "above_tile", "32k"}),
    "generator": frozenset(
        {
            *("append_slots", "append_step", "scrub", "copy_pages", "census", "address", "ladder", "dyadic"),
            *("generic", "steep", "trace"),
        }
    ),
    "mesh": frozenset({"1 axis", "2 axes", "3 axes", "2 head axes"}),
}
"""What must be there at some level, by kind."""

TILE = 64


def clauses_of(text: str) -> frozenset[str]:
    """Clauses that a text of the form of docs/semantics.md defines."""
    return frozenset(_CLAUSE.findall(text))


def unmatched(clauses: Iterable[str], cases: Iterable[Case]) -> tuple[list[str], list[str]]:
    """Clauses without a case, and `case: clause` for every clause of a case that does not exist."""
    clauses, cases = frozenset(clauses), list(cases)
    named = {clause for case in cases for clause in case.clause}
    unknown = [f"{case.id}: {clause}" for case in cases for clause in case.clause if clause not in clauses]
    return sorted(clauses - named), sorted(unknown)


def present(cases: Iterable[Case]) -> dict[str, frozenset[Any]]:
    """What the cases have, by the kinds of `ASKED`."""
    out: dict[str, set[Any]] = {kind: set() for kind in ASKED}
    for case in cases:
        for kind, value in _traits(case):
            out[kind].add(value)
    return {kind: frozenset(values) for kind, values in out.items()}


def missing(cases: Iterable[Case]) -> dict[str, list[Any]]:
    """What is asked for and no case has; empty if nothing is missing."""
    have = present(cases)
    return {kind: sorted(ASKED[kind] - have[kind], key=str) for kind in ASKED if ASKED[kind] - have[kind]}


def _traits(case: Case) -> Iterable[tuple[str, Any]]:
    p = case.params
    yield "generator", case.generator
    for name in ("dtype", "kv_dtype", "head_dim", "page"):
        if p.get(name) is not None:
            yield name, p[name]
    if "q_heads" in p:
        yield "group", p["q_heads"] // p["kv_heads"]
    yield from (("batch", need) for need in case.needs if need in ASKED["batch"])
    yield from (("option", option) for option in _options(case))
    if p.get("mesh"):
        axes = len(p["mesh"])
        yield "mesh", f"{axes} ax{'i' if axes == 1 else 'e'}s"
        if len(p.get("kv_axes") or ()) > 1:
            yield "mesh", "2 head axes"
    for n in p.get("kv_lens") or ():
        for name, size in (("page", p["page"]), ("tile", TILE)):
            if size > 1 and n and n % size in (0, 1, size - 1):
                yield "length", {0: "", 1: "above_"}.get(n % size, "below_") + name
        if n >= 1 << 15:
            yield "length", "32k"


def _options(case: Case) -> Iterable[str]:
    p = case.params
    yield from (need for need in case.needs if need in ASKED["option"])
    if "attend.11" in case.clause:
        yield "lse"
    together = {"window+sinks": ("window", "sinks"), "non_causal+window": ("non_causal", "window")}
    yield from (name for name, pair in together.items() if set(pair) <= set(case.needs))
    if p.get("soft_cap") and p.get("causal", True):
        yield "soft_cap+causal"
    scale = p.get("scale")
    if scale and float(scale).hex().split("p")[0].rstrip("0") not in ("0x1.", "0x1"):
        yield "odd_scale"
    if p.get("window") == 1:
        yield "one_token_window"
    rows = list(zip(p.get("query_lens") or (), p.get("kv_lens") or ()))
    if any(n == 0 for _, n in rows):
        yield "empty_row"
    if any(q == 0 and n for q, n in rows):
        yield "row_without_tokens"
    if p.get("share") or (case.generator == "trace" and any("=" in step for step in p["script"])):
        yield "shared_pages"
    if p.get("rung"):
        yield "padding"
    if p.get("layers", 1) > 1 and p.get("layer", 0):
        yield "layers"
    if p.get("layers", 1) * p["num_pages"] > 1 << 16 and p.get("page_order") == "high":
        yield "page_id_17_bits"


def untouched(cases: Iterable[Case], declared: Capabilities, level: str) -> dict[str, list[str]]:
    """What is declared, or belongs to the level, and is in none of `cases`, by kind; kinds without any are left out.

    `decode rung` are the options that no case has in a step of single tokens (`max_query_len` 1).
    """
    cases = list(cases)
    needs = {need for case in cases for need in case.needs}
    needs |= {"lse" for case in cases if "attend.11" in case.clause}
    needs |= {"promise:deterministic" for case in cases if "invariant.1" in case.clause}
    single = {need for case in cases if single_tokens(case) for need in (*case.needs, "plain")}
    options = sorted(declared.features & FEATURES - {"prefill", "decode", "mixed", "lse"})
    out = {
        "levels": [part for part in SELECTIONS.get(level, ()) if part not in {case.level for case in cases}],
        "features": sorted(declared.features - needs),
        "decode rung": [option for option in ("plain", *options) if option not in single],
    }
    for kind, name in (("promises", "promise"), ("dtypes", "dtype"), ("kv_dtypes", "kv_dtype"), ("regimes", "regime")):
        out[kind] = sorted(value for value in getattr(declared, kind) if f"{name}:{value}" not in needs)
    return {kind: values for kind, values in out.items() if values}


def idle(cases: Iterable[Case]) -> list[str]:
    """Cases that kill nothing and cover nothing that another case does not: candidates for removal.

    What a case covers is its clauses, on its generator, needs, and every parameter that is not a mere number of its
    geometry; two cases of the same cover differ in nothing that a clause speaks of.
    """
    cases = list(cases)
    seen: dict[str, str] = {}
    out = []
    for case in sorted(cases, key=lambda c: (not c.kills, not c.quick, c.id)):
        key = dumps([case.generator, sorted(case.clause), sorted(case.needs), dict(case.params)])
        if key in seen and not case.kills:
            out.append(f"{case.id} asks what {seen[key]} asks")
        seen.setdefault(key, case.id)
        if not case.kills and not case.clause:
            out.append(f"{case.id} kills nothing and covers no clause")
    return out
