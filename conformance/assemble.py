"""From results to a certificate's file: the one way, for the command and for the pytest plugin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paged
from conformance import certificate as certificates
from conformance import kits, waivers
from conformance.case import Case, Result
from conformance.catalogue import Catalogue
from conformance.environment import describe_suite, envelope

SECONDS = "seconds"
"""Detail of a result that says how long it took; no part of a certificate, because it differs from run to run."""


def certificate(
    catalogue: Catalogue,
    cases: Sequence[Case],
    results: Sequence[Result],
    *,
    level: str,
    complete: bool,
    introduction: Mapping[str, Any],
    kit: Sequence[Case] = (),
    waiver_file: str | Path | None = None,
    mutants: str | None = None,
) -> dict[str, Any]:
    """The certificate's file as data.

    - `introduction`: claims, backend and environment, from where the cases ran.
    - `kit`: checks of the backend's kit that were run; `results` holds theirs too.
    - `waiver_file`: applied to the results if given.
    - `mutants`: "caught/all" of a run over this catalogue, or None.

    Raises `InvalidInputError` unless every case has exactly one result.
    """
    results = [without_seconds(r) for r in results]
    records: list[dict[str, Any]] = []
    if waiver_file is not None:
        path = Path(waiver_file)
        found = waivers.load(path.read_text("utf-8"), path.name)
        device = str(introduction["environment"].get("device", ""))
        results, records = waivers.apply(
            found, [*cases, *kit], results, device_kind=device, suite_version=paged.__version__
        )
    names = {case.id for case in kit}
    body = certificates.build(
        cases=cases,
        results=[r for r in results if r.id not in names],
        kit=[(case, next((r for r in results if r.id == case.id), None)) for case in kit],
        level=level,
        complete=complete,
        of=_size(catalogue, level, introduction),
        suite={**describe_suite(paged.__version__, catalogue.version, catalogue.digest), "mutants": mutants},
        backend=introduction["backend"],
        claims=introduction["claims"],
        environment=introduction["environment"],
        waivers=records,
    )
    return certificates.seal(body, envelope())


def _size(catalogue: Catalogue, level: str, introduction: Mapping[str, Any]) -> int:
    """How many cases a level has; of a kit's checks where only they are run."""
    if level != "lowering":
        return len(catalogue.select(level))
    executor = introduction["environment"].get("executor", {}).get("name", "")
    return len(kits.select(introduction["backend"].get("entry_point", ""), executor))


def without_seconds(result: Result) -> Result:
    """The result without how long it took."""
    return dataclasses.replace(result, details={k: v for k, v in result.details.items() if k != SECONDS})


def to_text(data: Mapping[str, Any]) -> str:
    """The file's text, indented so that two of them can be compared line by line."""
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"
