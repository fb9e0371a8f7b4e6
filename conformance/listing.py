"""The cases of a level as a list: ids with what they need, test and belong to. Nothing is run."""

from __future__ import annotations

import json
from collections.abc import Iterable

from conformance.case import Case
from conformance.clauses import CLAUSES

FIELDS = ("id", "level", "tier", "quick", "generator", "needs", "clause")


def as_json(cases: Iterable[Case]) -> str:
    """One object a case: `FIELDS`, and `clauses`, the clauses with their text."""
    entries = []
    for case in cases:
        entry = {name: getattr(case, name) for name in FIELDS}
        entries.append({**entry, "clauses": {c: CLAUSES.get(c, "") for c in case.clause}})
    return json.dumps(entries, indent=1)


def as_text(cases: Iterable[Case]) -> str:
    """A line a case: id, level, clauses, needs; and how many there are."""
    cases = list(cases)
    rows = [(case.id, case.level, " ".join(case.clause), " ".join(case.needs)) for case in cases]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines = ["  ".join([*(f"{cell:{w}}" for cell, w in zip(row, widths)), row[3]]).rstrip() for row in rows]
    return "\n".join([*lines, f"{len(cases)} cases"])
