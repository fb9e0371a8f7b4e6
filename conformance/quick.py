"""The part of a level that `--quick` runs: small, and something of everything that the backend claims.

What a case stands for is its *strata*: every claimed option in a step of single tokens and in any other step, per
dtype; every promise, pool type, regime, clause, tier, level and generator. Cases are taken greedily until every stratum
that has a case is in, so a backend that claims more is asked more. It still is a part, and certifies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from conformance.case import Case
from conformance.needs import required, unmet
from paged.common import Capabilities
from paged.common.capabilities import FEATURES

OPTIONS = FEATURES - {"prefill", "decode", "mixed"}
TILE, LONG_PAGES = 64, 32
VALUED = ("promise", "kv_dtype", "regime", "pool_storage", "pool_layout", "poison")
"""Needs of which every value that has a case is asked for."""


def select(cases: Sequence[Case], declared: Capabilities) -> tuple[Case, ...]:
    """Cases in their order that together have every stratum of those the backend claims.

    Where it claims none of them, the cases marked `quick`, which will say what is missing.
    """
    left = {case.id: (case, frozenset(strata(case))) for case in cases if not unmet(required(case), declared)}
    if not left:
        return tuple(case for case in cases if case.quick)
    wanted = frozenset().union(*(have for _, have in left.values()))
    picked: set[str] = set()
    while wanted:
        best, have = max(left.values(), key=lambda one: (len(one[1] & wanted), one[0].quick, -_work(one[0]), one[0].id))
        picked.add(best.id)
        wanted -= have
    return tuple(case for case in cases if case.id in picked)


def strata(case: Case) -> Iterable[tuple[Any, ...]]:
    """What a case stands for."""
    p = case.params
    yield "level", case.level
    yield "tier", case.tier
    yield "generator", case.generator
    yield from (("clause", clause) for clause in case.clause)
    yield from (("need", need) for need in case.needs if need.partition(":")[0] in VALUED)
    if "query_lens" not in p or p.get("check") is not None:
        return
    rung = "decode" if single_tokens(case) else "other"
    options = [need for need in case.needs if need in OPTIONS] or ["plain"]
    yield from ((option, rung, p["dtype"]) for option in options)
    yield "head_dim", p["head_dim"] if p["head_dim"] in (64, 128) else "other"
    if case.generator == "generic" and max(p["kv_lens"], default=0) >= LONG_PAGES * p["page"]:
        yield "long rows", rung
    if case.generator == "census" and len(_edges(p["kv_lens"])) == 3:
        yield "census", "tile edges"


def single_tokens(case: Case) -> bool:
    """Whether the case's step was compiled for rows of one query token."""
    lens, rung = case.params.get("query_lens"), case.params.get("rung") or {}
    return lens is not None and rung.get("max_query_len", max(lens, default=0)) == 1


def _edges(kv_lens: Iterable[int]) -> set[int]:
    """Which sides of a multiple of a tile of 64 some rows end at: −1, 0, 1."""
    return {n % TILE if n % TILE < 2 else -1 for n in kv_lens if n >= TILE - 1 and n % TILE in (0, 1, TILE - 1)}


def _work(case: Case) -> int:
    """Roughly how much a case computes, to prefer small ones."""
    p = case.params
    return sum(p.get("kv_lens") or (0,)) * p.get("q_heads", 1) * p.get("head_dim", 1)
