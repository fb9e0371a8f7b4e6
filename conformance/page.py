"""A certificate as one self-contained HTML page. Every string is escaped: most of them come from a backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance import certificate, killmatrix, kits, signature
from conformance.case import STATUSES
from conformance.clauses import said

TEMPLATE = Path(__file__).parent / "page.html"
SYMBOLS = {"pass": "✓", "fail": "✗", "error": "!", "waived": "w", "not-claimed": "–"}
TIER_NAMES = {
    0: "structure",
    1: "movement",
    2: "exact vectors",
    3: "certified rounding",
    4: "against itself",
}
MAX_LISTED = 200


def render(
    data: Mapping[str, Any], problems: list[str] | None = None, *, matrix: Mapping[str, Any] | None = None
) -> str:
    """HTML of a certificate's file. `problems` are what `certificate.check` found, shown above everything else;
    `matrix` is the recorded kill matrix of the suite that made it.

    Needs jinja2, which the extra `certify` installs.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["value"] = _value
    body = data["body"]
    cases, every = body["cases"], certificate.entries(body)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        body=body,
        build=_mapping(body["backend"].get("build")),
        selection=body.get("selection"),
        digest=data["digest"],
        envelope=data["envelope"],
        problems=problems or [],
        numerics=numerics_line(body),
        grid=certificate.grid(body),
        tiers=sorted({entry["tier"] for entry in cases}),
        tier_names=TIER_NAMES,
        statuses=STATUSES,
        symbols=SYMBOLS,
        decided=certificate.decided_shares(body),
        bad=[e for e in every if e["status"] in ("fail", "error")][:MAX_LISTED],
        bad_total=sum(e["status"] in ("fail", "error") for e in every),
        unclaimed=_unclaimed(every),
        executor=certificate.executor_of(body),
        kit=body.get("kit", []),
        what={check.id: check.what for kit in kits.KITS.values() for check in kit.checks},
        matrix=[] if matrix is None else killmatrix.rows(matrix),
        kinds=killmatrix.KINDS,
        said=said,
        signed=signature.described(data["envelope"]),
    )


def numerics_line(body: Mapping[str, Any]) -> str:
    """The arithmetic that the backend claims, in a sentence: it decides how much certified rounding demands."""
    model = body["backend"].get("numerics") or {}
    name = body["claims"].get("numerics", "?")
    if model.get("exact"):
        return f"{name}: float64 inside, one rounding at the end; every bit that is decidable is demanded."
    weights = {"float32": "float32", "input": "the input's dtype"}.get(model.get("weights", ""), "?")
    partials = {"float32": "float32", "output": "the output's dtype"}.get(model.get("partials", ""), "?")
    normalised = ", normalised before rounding" if model.get("normalised") else ""
    error = model.get("exp_error_log2", "?")
    decode = body["claims"].get("decode_numerics")
    other = f" Rows of one token: {decode}." if decode not in (None, name) else ""
    return f"{name}: weights in {weights}{normalised}, partial results in {partials}, exp to 2^{error}.{other}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _unclaimed(cases: list[Mapping[str, Any]]) -> dict[str, int]:
    """Reason -> number of cases that were not run because the backend does not claim what they need."""
    out: dict[str, int] = {}
    for entry in cases:
        if entry["status"] == "not-claimed":
            reason = entry.get("diagnosis") or "not claimed"
            out[reason] = out.get(reason, 0) + 1
    return dict(sorted(out.items(), key=lambda item: (-item[1], item[0])))


def _value(value: Any) -> str:
    """A claim or an environment entry as short text."""
    if isinstance(value, list):
        return ", ".join(_runs(value) if all(type(v) is int for v in value) else map(str, value)) or "none"
    if isinstance(value, Mapping) and set(value) == {"low", "high", "powers_of_two"}:
        return f"{value['low']} to {value['high']}" + (", powers of two" if value["powers_of_two"] else "")
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return "none" if value is None or value == "" else str(value)


def _runs(values: list[int]) -> list[str]:
    """Ints with every run of four or more at equal steps written as a range."""
    out, at = [], 0
    while at < len(values):
        end = at + 1
        step = values[end] - values[at] if end < len(values) else 0
        while end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        if end - at >= 4:
            every = "" if step == 1 else f" in steps of {step}"
            out.append(f"{values[at]} to {values[end - 1]}{every}")
            at = end
        else:
            out.append(str(values[at]))
            at += 1
    return out
