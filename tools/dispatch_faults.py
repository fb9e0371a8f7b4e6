"""Which faults would live in a kernel that is chosen for some steps only: `python tools/dispatch_faults.py`.

A backend picks kernels by rung, types, geometry and options, and any fault may be in one of them alone. So every fault
of `conformance.faults` that attention can have is run on the cases of each compiled program to which it can matter,
until one catches it and names its clause. Then, for each value of each thing that kernels are chosen by (64 elements
a head, pages of 128, a window, …), the faults are told that no case with this value catches: they would live there.

`--cases` is a pattern of ids (default: rungs of single tokens), `--faults` some of faults; `-o` keeps what was found.
All of them take an hour of processor time or two: every pair is a program to compile. CI runs a choice of them.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.case import Case
from conformance.catalogue import by_program, load
from conformance.faults import FAULTS, broken
from conformance.mutants import GATED, MUTANTS
from conformance.runner import Session
from paged.backends.registry import get_backend

NEEDS = {
    "window": ("window", "causal_strict"),
    "soft_cap": ("cap",),
    "sinks": ("sink",),
    "key_scale": ("key_scale",),
    "value_scale": ("value_scale",),
    "share": ("shared_page",),
}
"""A parameter -> parts of the names of the faults that do nothing without it."""
ELSEWHERE = (
    *("kept_", "shard_", "replica_", "gathers_", "nondeterministic", "batch_splits", "rung_splits", "chunk_splits"),
    *("no_causal_offset", "not_causal", "prefix_ignored"),
)
"""Faults that one call on one device cannot show, or that a single token a row cannot."""


def matters(fault: str, case: Case) -> bool:
    """Whether the fault does anything to the case, as far as the names tell."""
    p = case.params
    for name, parts in NEEDS.items():
        if p.get(name) is None and any(part in fault for part in parts):
            return False
    size, d = p["page"], p["head_dim"]
    lens = [n for n, q in zip(p["kv_lens"], p["query_lens"]) if q]
    group, kv_heads = p["q_heads"] // p["kv_heads"], p["kv_heads"]
    return {
        "fnuz_as_fn": "fnuz" in str(p.get("kv_dtype")),
        "head_dim_cut": d > 64 and d % 64 != 0,
        "page_over_128": size > 128 and max(lens) > 128,
        "page_id_16_bits": p["num_pages"] > 1 << 16,
        "page_id_7_bits": p["num_pages"] > 128,
        "full_last_page_empty": any(n > size and n % size == 0 for n in lens),
        "power_of_two_short": any(n >= 64 and n & (n - 1) == 0 for n in lens),
        "short_row_zero": any(0 < n < size for n in lens[1:]),
        "gqa_modulo": kv_heads > 1 and group > 1,
        "v_head0": kv_heads > 1,
        "window_last_of_group": (p.get("window") or 1) > 1,
        "window_minus_1": (p.get("window") or 1) > 1,
        "row0_table": len(lens) > 1,
        "page_base_missing": p.get("layer", 0) > 0,
        "empty_row_nan": 0 in lens,
        "empty_row_lse": 0 in lens,
        "padding_not_zeroed": p["rung"] is not None and p["rung"]["tokens"] > sum(p["query_lens"]),
        "rows_without_tokens_shift": 0 in p["query_lens"],
        "mask_before_cap": p.get("soft_cap") is not None,
        "mask_zero": any(n % size for n in lens),
        "nan_times_zero": any(n % size for n in lens),
        "reads_padding": any(n % size for n in lens),
        "last_page_len_plus_1": any(n % size for n in lens),
        "sorted_pages": any(n > size for n in lens),
        "stale_table": any(n > size for n in lens),
    }.get(fault, True)


def chosen_by(case: Case) -> dict[str, Any]:
    """What a backend may choose a kernel by."""
    p, rung = case.params, case.params["rung"]
    options = [name for name in ("window", "soft_cap", "sinks") if p.get(name) is not None]
    options += ["non_causal"] if p.get("causal") is False else []
    longest = rung["max_kv_len"]
    return {
        "head_dim": p["head_dim"],
        "page": p["page"],
        "group": p["q_heads"] // p["kv_heads"],
        "types": "/".join(str(p[n]) for n in ("dtype", "kv_dtype") if p.get(n)),
        "options": "+".join(options) or "none",
        "rows": 1 << (rung["rows"] - 1).bit_length(),
        "longest": "short" if longest <= 128 else "long" if longest > 512 else "middle",
    }


def programs(cases: list[Case]) -> Iterator[list[Case]]:
    """The cases in groups that share a compiled program; relations are left out."""
    plain = [c for c in cases if c.generator in _ORDER and not any(map(c.params.get, ("relation", "check", "mesh")))]
    static = ("page", "num_pages", "kv_heads", "q_heads", "head_dim", "value_head_dim", "layers", "rung", "dtype")
    static = (*static, "kv_dtype", "scale", "causal", "window", "soft_cap")

    def key(case: Case) -> str:
        kept = {name: case.params.get(name) for name in static}
        given = {name: case.params.get(name) is not None for name in ("sinks", "key_scale", "value_scale")}
        return json.dumps({**kept, **given}, sort_keys=True)

    for _, group in itertools.groupby(sorted(by_program(plain), key=key), key):
        yield sorted(group, key=lambda c: _ORDER.index(c.generator))


_ORDER = ("generic", "census", "address", "ladder", "dyadic", "steep")


def main() -> int:
    """0 if no fault lives where kernels are chosen by one thing, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="attend/*decode*")
    parser.add_argument("--faults", nargs="*", default=["*"])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    reference = get_backend("reference")
    choice = {f"{name}_{gate}" for gate, names in GATED.items() for name in names}
    names = [
        name
        for name in MUTANTS
        if name not in choice
        and not name.startswith(ELSEWHERE)
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in options.faults)
        if any((FAULTS[name].before, FAULTS[name].after, FAULTS[name].attend))
    ]
    cases = [
        c
        for c in load().select("core")
        if fnmatch.fnmatchcase(c.id, options.cases) and (c.params.get("rung") or {}).get("max_query_len") == 1
    ]
    found = []
    for name in names:
        session = Session(broken(name, reference))
        for group in programs(cases):
            told = {}
            for case in group:
                if not matters(name, case):
                    continue
                result = session.run(case)
                told[case.id] = result.clause if result.status == "fail" else result.status
                if told[case.id] == MUTANTS[name].clause:
                    break
            if told:
                caught = MUTANTS[name].clause in told.values()
                by = chosen_by(group[0])
                found.append({"fault": name, "caught": caught, "by": by, "told": told})
                if not caught:
                    print(f"{name} ({MUTANTS[name].clause}): {told}", flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1) + "\n")
    alive = 0
    for thing in found[0]["by"] if found else ():
        for value in sorted({str(f["by"][thing]) for f in found}):
            there = [f for f in found if str(f["by"][thing]) == value]
            seen = {f["fault"] for f in there}
            free = sorted(seen - {f["fault"] for f in there if f["caught"]})
            alive += len(free)
            print(f"{thing} {value}: {len(seen)} faults matter, not caught: {', '.join(free) or 'none'}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
