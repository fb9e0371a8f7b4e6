"""The kill matrix: which kind of case catches which mutant, as a recorded run found it.

`paged certify reference --mutants -o conformance/catalogue/v1/record/mutants.json` makes the record, and
`python -m conformance.killmatrix` the page docs/kill-matrix.md from it. The record names digests of the cases that list
mutants and of the sources that decide what is caught; CI compares them, so that a matrix cannot grow old unseen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.canonical import digest, digest_files
from conformance.case import Case, Result
from conformance.catalogue import DIRECTORY, Catalogue, questions
from conformance.mutants import MUTANTS

RECORD = DIRECTORY / "record" / "mutants.json"
PAGE = Path(__file__).parents[1] / "docs" / "kill-matrix.md"

KINDS = ("movement", "address", "census", "ladder", "bounds", "itself", "sharded", "serving")
"""Columns, by what a case looks at; `bounds` are the families of certified rounding."""

DECIDING = (
    *("mutants.py", "faults.py", "faults_devices.py", "faults_gated.py", "faults_geometry.py", "faults_steps.py"),
    "broken_kernel.py",
    *("runner.py", "relations.py", "serving.py", "structure.py", "judge.py", "bounds.py", "oracle.py"),
    *("diagnose.py", "diagnose_moves.py", "hypotheses.py", "suspects.py", "averages.py", "lse_causes.py", "fitting.py"),
)
"""Sources that decide whether a mutant is caught and what it is called."""


def sources() -> str:
    """Digest of the deciding sources."""
    folder = Path(__file__).parent
    return digest_files((name, folder / name) for name in DECIDING)


def kind(case: Case) -> str:
    """Column of a case."""
    if case.level in ("sharded", "serving"):
        return case.level
    if case.params.get("relation") is not None:
        return "itself"
    names = {"address": "address", "census": "census", "ladder": "ladder"}
    bounds = ("dyadic", "generic", "steep")
    return "bounds" if case.generator in bounds else names.get(case.generator, "movement")


def listed(catalogue: Catalogue) -> str:
    """Digest of the cases that list mutants, with what they ask: all of the catalogue that a matrix depends on."""
    cases = [case for case in catalogue.cases if case.kills]
    return digest([questions(cases), [[case.id, sorted(case.kills)] for case in cases]])


def record(
    catalogue: Catalogue, runs: Iterable[tuple[str, Case, Result]], faults: Mapping[str, list[str]]
) -> dict[str, Any]:
    """The record of a run. `faults` says of each mutant what is wrong with how it was seen, nothing for a catch."""
    matrix: dict[str, Any] = {name: {"clause": MUTANTS[name].clause, "by": {}} for name in faults}
    for name, case, result in runs:
        if result.status == "fail" and result.clause == MUTANTS[name].clause:
            matrix[name]["by"][case.id] = kind(case)
    caught = sum(not found for found in faults.values())
    made = {"listed": listed(catalogue), "sources": sources()}
    return {**made, "caught": caught, "mutants": len(faults), "matrix": matrix}


def read(path: Path = RECORD) -> dict[str, Any] | None:
    """The record as it lies there, of whatever age; None without one."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def recorded(catalogue: Catalogue, path: Path = RECORD) -> dict[str, Any] | None:
    """The record over these cases and sources, or None: an old one says nothing."""
    if (found := read(path)) is None:
        return None
    now = {"listed": listed(catalogue), "sources": sources()}
    return found if {name: found.get(name) for name in now} == now else None


def rows(found: Mapping[str, Any]) -> list[tuple[str, str, str, dict[str, int]]]:
    """(mutant, clause, what it does, column -> number of cases that caught it) in the order of the mutants."""
    out = []
    for name, entry in found["matrix"].items():
        counts = dict.fromkeys(KINDS, 0)
        for column in entry["by"].values():
            counts[column] += 1
        out.append((name, entry["clause"], MUTANTS[name].breaks if name in MUTANTS else "", counts))
    return out


def text(found: Mapping[str, Any]) -> str:
    """The matrix for a terminal."""
    width = max(len(name) for name in found["matrix"])
    lines = [f"{'':{width}}  {'clause':12} " + " ".join(f"{k:>8}" for k in KINDS)]
    for name, clause, _, counts in rows(found):
        lines.append(f"{name:{width}}  {clause:12} " + " ".join(f"{counts[k] or '.':>8}" for k in KINDS))
    return "\n".join(lines)


def markdown(found: Mapping[str, Any]) -> str:
    """docs/kill-matrix.md."""
    head = " | ".join(KINDS)
    lines = [
        "# Kill matrix",
        "",
        "Deliberately wrong backends, and how many cases of each kind catch them and name the clause that they break.",
        "A dot: no case of that kind lists the mutant. Each runs on the cases that list it; all of them must catch it.",
        f"`paged certify reference --mutants` made this: caught {found['caught']}/{found['mutants']}.",
        "",
        f"| mutant | breaks | what it does | {head} |",
        f"| --- | --- | --- | {' | '.join(['---'] * len(KINDS))} |",
    ]
    for name, clause, breaks, counts in rows(found):
        cells = " | ".join(str(counts[k] or ".") for k in KINDS)
        lines.append(f"| {name} | {clause} | {breaks} | {cells} |")
    by_kind: dict[str, list[str]] = {k: [] for k in KINDS}
    for name, _, _, counts in rows(found):
        used = [k for k in KINDS if counts[k]]
        if len(used) == 1:
            by_kind[used[0]].append(name)
    lines += ["", "Listed by one kind of case only:", ""]
    lines += [f"- {k}: {', '.join(names)}" for k, names in by_kind.items() if names]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(markdown(json.loads(RECORD.read_text("utf-8"))), "utf-8")
    sys.exit(0)
