"""What steps of single tokens are tried with: the design behind `catalogue/v1/decode.json`, as a check of the cases.

A backend chooses other kernels for such steps, and among those by options, head dim, page size, group and types. A
fault of one kernel is seen only if its combination is tried, so combinations of two are asked for; see
docs/design/decode-rungs.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from conformance.case import Case
from conformance.quick import single_tokens

OPTIONS = ("window", "soft_cap", "sinks", "kv_scales", "non_causal")
CHOSEN_BY: Mapping[str, tuple[Any, ...]] = {
    "head_dim": (64, 80, 96, 128, 192, 256),
    "page": (1, 8, 16, 32, 64, "128 and more"),
    "group": (1, 2, 3, 4, 8, "5 to 7"),
    "pool": ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
}
"""What a kernel is chosen by, and the values of it that are asked for."""
MOVERS = ("append_slots", "append_step", "scrub", "copy_pages", "trace")


def asked() -> frozenset[tuple[Any, ...]]:
    """Every two options together, and each of three options, and none, with every value of `CHOSEN_BY`.

    `fnuz` pools without an option are not asked for: but for what a byte means, kernels read them like their siblings.
    """
    pairs: set[tuple[Any, ...]] = set(itertools.combinations(sorted(OPTIONS), 2))
    for option, (name, values) in itertools.product(("window", "soft_cap", "sinks", "none"), CHOSEN_BY.items()):
        pairs |= {(option, name, value) for value in values if option != "none" or "fnuz" not in str(value)}
    return frozenset(pairs)


def missing(cases: Iterable[Case]) -> list[tuple[Any, ...]]:
    """What is asked for and no case has in a step of single tokens, its values being judged."""
    have = {pair for case in cases for pair in _pairs(case)}
    return sorted(asked() - have, key=str)


def _pairs(case: Case) -> Iterator[tuple[Any, ...]]:
    p = case.params
    if case.generator in MOVERS or not single_tokens(case) or p.get("relation") or p.get("check") or p.get("mesh"):
        return
    options = sorted(option for option in OPTIONS if option in case.needs)
    yield from itertools.combinations(options, 2)
    group = p["q_heads"] // p["kv_heads"]
    values = {
        "head_dim": p["head_dim"],
        "page": p["page"] if p["page"] < 128 else "128 and more",
        "group": "5 to 7" if 5 <= group <= 7 else group,
        "pool": p.get("kv_dtype") or p["dtype"],
    }
    for option in [o for o in options if o != "kv_scales"] or ["none"]:
        yield from ((option, name, value) for name, value in values.items())
