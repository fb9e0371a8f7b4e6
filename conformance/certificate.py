"""Results -> certificate -> verdict. Pure: nothing here runs a backend, reads a clock or touches a device.

A certificate is `{"body": …, "digest": …, "envelope": …}`. The body has no timestamp and is hashed in canonical form,
so that two runs with the same outcome have the same digest; time, host and an optional signature lie in the envelope.
Digests per section and per case locate an accidental edit. They are no proof of origin: who can edit the body can edit
the digests. Authenticity comes from a signature, or from replaying cases.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance import derived, kits
from conformance.canonical import digest, dumps
from conformance.case import DEVICE, STATUSES, Case, Result
from conformance.catalogue import SELECTIONS, Catalogue
from conformance.coverage import untouched
from conformance.needs import required, unmet
from conformance.waivers import UNWAIVABLE_TIERS
from paged.common import Capabilities, Range
from paged.common.errors import InvalidInputError

SCHEMA = 1
SCOPE = (
    "Attention and append over pages (with scrub and copy_pages), as docs/semantics.md defines them. "
    "Nothing is claimed about whole models."
)
SCOPES = {
    "cpu-handlers": "The vendor's targets were handlers of this project's on a CPU: plans, layouts, masks, aliases and "
    "sharding are certified, and nothing is claimed about the vendor's kernels or device.",
    "triton-interpreter": "The vendor's targets were the vendor's Triton kernels, interpreted on a CPU: nothing is "
    "claimed about compiled kernels or the vendor's device.",
    "lowering-only": "Nothing was executed: programs were lowered for the vendor's platform and read.",
}
"""What else is to be said where the vendor's own libraries did not run on the vendor's device."""
VERDICTS = {"conformant": 0, "no failure": 0, "failed": 1, "error": 2, "not certifiable": 3}
"""Verdict -> exit status of `paged certify`. Only a whole level is ever conformant; a part of one has no failure."""

SECTIONS = ("suite", "backend", "claims", "environment", "cases", "kit", "waivers")
TIERS = {"lowering": (0,)} | {level: (1,) if level == "move" else (1, 2, 3, 4) for level in SELECTIONS}
"""Tiers of which at least one case must pass before a level certifies anything. `lowering` has no cases but a kit's."""


def build(
    *,
    cases: Sequence[Case],
    results: Iterable[Result],
    level: str,
    complete: bool,
    suite: Mapping[str, Any],
    backend: Mapping[str, Any],
    claims: Mapping[str, Any],
    environment: Mapping[str, Any],
    of: int | None = None,
    kit: Sequence[tuple[Case, Result | None]] = (),
    waivers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Body of a certificate.

    - `cases`: what was to be run; `results`: exactly one of each, after waivers were applied.
    - `complete`: the whole level was run; a quick or filtered run certifies nothing. `of`: then, how many cases the
      level has; `selection` says how many were run and what that is declared none of them touches.
    - `kit`: checks of the backend's kit with their results.
    - `suite`: catalogue version and digest, digest of the suite's sources, `tree` clean, dirty or unknown, `mutants`.

    Raises `InvalidInputError` if a case has no result or two, if a result belongs to no case, or if anything names an
    AMD architecture although other than the vendor's libraries ran.
    """
    by_id: dict[str, Result] = {}
    for result in results:
        if result.id in by_id:
            raise InvalidInputError(f"case {result.id!r} has two results; a certificate needs exactly one of each.")
        by_id[result.id] = result
    wanted = {case.id: case for case in cases}
    if missing := sorted(set(wanted) - set(by_id)):
        raise InvalidInputError(f"case {missing[0]!r} has no result ({len(missing)} in all). Run the rest first.")
    if extra := sorted(set(by_id) - set(wanted)):
        raise InvalidInputError(f"result {extra[0]!r} belongs to no case of this run ({len(extra)} in all).")
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "scope": SCOPE,
        "level": level,
        "complete": complete,
        "suite": dict(suite),
        "backend": dict(backend),
        "claims": dict(claims),
        "environment": dict(environment),
        "cases": [_entry(wanted[i], by_id[i]) for i in sorted(wanted)],
        "waivers": [dict(w) for w in waivers],
    }
    if kit:
        if lost := [case.id for case, result in kit if result is None]:
            raise InvalidInputError(f"kit check {lost[0]!r} has no result ({len(lost)} in all). Run the rest first.")
        body["kit"] = [_entry(case, result) for case, result in kit if result is not None]
    executor = executor_of(body)
    body["scope"] = scope_of(body)
    if executor in SCOPES and (named := re.search(r"gfx[0-9]\w*", dumps(body))):
        raise InvalidInputError(
            f"a certificate of the executor {executor!r} would name {named.group(0)!r}, on which nothing ran."
        )
    if not complete:
        body["selection"] = {"of": len(wanted) if of is None else of, **selection(body, cases)}
    body["totals"] = totals(body)
    body["verdict"] = verdict(body)
    body["certifies"] = certifies(body)
    body["digests"] = {name: digest(body[name]) for name in SECTIONS if name in body}
    return json.loads(json.dumps(body, allow_nan=False))


def _entry(case: Case, result: Result) -> dict[str, Any]:
    if result.status not in STATUSES:
        raise InvalidInputError(f"case {case.id!r}: status {result.status!r} is not one of {', '.join(STATUSES)}.")
    entry = {
        "id": case.id,
        "tier": case.tier,
        "level": case.level,
        "clause": list(case.clause),
        "needs": list(case.needs),
        "status": result.status,
        "elements": int(result.elements),
        "decided": int(result.decided),
        "output": result.output,
    }
    if result.status != "pass":
        entry["diagnosis"] = result.diagnosis
        entry["broken"] = result.clause
    details = dict(result.details)
    if (device := details.pop(DEVICE, None)) is not None:
        entry["device"] = device
    if details:
        entry["details"] = details
    entry["digest"] = digest(entry)
    return entry


def seal(body: Mapping[str, Any], envelope: Mapping[str, Any]) -> dict[str, Any]:
    """The file: body, its digest, and what is not part of the statement (time, host, signature)."""
    return {"body": dict(body), "digest": digest(body), "envelope": dict(envelope)}


def executor_of(body: Mapping[str, Any]) -> str | None:
    """Who executed the backend's FFI targets; None for a backend that has no vendor's."""
    executor = body["environment"].get("executor")
    return str(executor.get("name")) if isinstance(executor, Mapping) else None


def identity(body: Mapping[str, Any]) -> str:
    """Backend, versions and device in a line."""
    backend, environment = body["backend"], body["environment"]
    executor = executor_of(body)
    where = f"{environment.get('device')} ({environment.get('driver')}, {environment.get('devices')} devices)"
    parts = [f"{backend.get('entry_point')}, {backend.get('distribution')}", f"on {where}"]
    parts += [] if executor is None else [f"executed by {executor}"]
    build = backend.get("build")
    if isinstance(build, Mapping) and "library" in build:
        parts += [f"library {short(build['library'])} by {build.get('compiler', 'an unnamed compiler')}"]
    parts += [f"jax {environment.get('jax')}, python {environment.get('python')}"]
    parts += [f"suite {body['suite'].get('version')}, level {body['level']}"]
    return "; ".join(parts)


def short(digest: Any) -> str:
    """A digest as a line can hold it."""
    return str(digest)[:19]


def scope_of(body: Mapping[str, Any]) -> str:
    """What is claimed, which depends on who executed the backend's targets."""
    more = SCOPES.get(executor_of(body) or "")
    return SCOPE if more is None else f"{SCOPE} {more}"


def entries(body: Mapping[str, Any]) -> list[Any]:
    """Every entry with a status: the kit's, then the catalogue's."""
    return [*body.get("kit", ()), *body["cases"]]


def totals(body: Mapping[str, Any]) -> dict[str, int]:
    """Number of cases and kit checks by status."""
    counts = collections.Counter(entry["status"] for entry in entries(body))
    return {status: counts[status] for status in STATUSES}


def verdict(body: Mapping[str, Any]) -> str:
    """One of `VERDICTS`, from the cases and the waivers alone.

    A failure outweighs an error, because it is certain. A waiver that is unused, expired or not needed is a failure of
    the run. A level of which some tier has no passing case is not certifiable, however few cases failed. A part of a
    level is never conformant: it has "no failure" at most.
    """
    counts = totals(body)
    if counts["fail"] or any(w.get("problem") for w in body["waivers"]):
        return "failed"
    if counts["error"]:
        return "error"
    judged = body["cases"] if body["complete"] and body["level"] != "lowering" else entries(body)
    passed = {entry["tier"] for entry in judged if entry["status"] == "pass"}
    needed = TIERS[body["level"]] if body["complete"] else ()
    if not passed or not passed.issuperset(needed):
        return "not certifiable"
    return "conformant" if body["complete"] else "no failure"


def selection(body: Mapping[str, Any], cases: Iterable[Case]) -> dict[str, Any]:
    """Of a part of a level: how many cases were `run`, and what is declared and in none of them (`untouched`)."""
    every = entries(body) if body["level"] == "lowering" else body["cases"]
    ran = {entry["id"] for entry in every if entry["status"] != "not-claimed"}
    claimed = declared(body["claims"])
    touched = [case for case in cases if case.id in ran]
    return {"run": len(ran), "untouched": {} if claimed is None else untouched(touched, claimed, body["level"])}


def summary(body: Mapping[str, Any]) -> str:
    """The verdict in a line: of a part of a level, how much of it was run and what was not touched."""
    counts = ", ".join(f"{n} {status}" for status, n in body["totals"].items() if n)
    found = body.get("selection")
    if not isinstance(found, Mapping):
        return f"{body['verdict']} at level {body['level']} ({counts})"
    checks = f" and {len(body['kit'])} checks of the kit" if body.get("kit") else ""
    part = f"{found.get('run')} of {found.get('of')} cases of level {body['level']}{checks}"
    text = f"{body['verdict']} in {part} ({counts})"
    rest = found.get("untouched") or {}
    parts = [f"{kind}: {', '.join(map(str, values))}" for kind, values in rest.items()]
    return f"{text}; not touched: {'; '.join(parts) or 'nothing that is declared'}"


def certifies(body: Mapping[str, Any]) -> bool:
    """Whether the certificate states anything: a whole level, a conformant verdict, and a suite nobody had edited."""
    clean = body["suite"].get("tree") == "clean"
    return bool(body["complete"] and clean and verdict(body) == "conformant")


def exit_status(body: Mapping[str, Any]) -> int:
    """Exit status of a run. One that was not complete is never 3."""
    status = VERDICTS[verdict(body)]
    return 2 if status == 3 and not body["complete"] else status


def read(text: str, where: str = "certificate") -> dict[str, Any]:
    """A certificate's file as data; `InvalidInputError` unless it has the form of one."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidInputError(f"{where} is not JSON: {error}") from None
    if not isinstance(data, dict) or set(data) != {"body", "digest", "envelope"} or not isinstance(data["body"], dict):
        raise InvalidInputError(f"{where} is not a certificate: it needs body, digest and envelope.")
    body = data["body"]
    if body.get("schema") != SCHEMA:
        raise InvalidInputError(f"{where} has schema {body.get('schema')!r}; this release reads {SCHEMA}.")
    shapes = {"suite": dict, "backend": dict, "claims": dict, "environment": dict, "cases": list, "waivers": list}
    shapes |= {"totals": dict, "digests": dict, "verdict": str, "level": str, "complete": bool, "certifies": bool}
    for name, kind in shapes.items():
        if not isinstance(body.get(name), kind):
            raise InvalidInputError(f"{where}: body.{name} must be a {kind.__name__}, got {body.get(name)!r:.60}.")
    if body["level"] not in TIERS:
        raise InvalidInputError(f"{where}: body.level {body['level']!r} is not one of {', '.join(TIERS)}.")
    if not isinstance(body.get("kit", []), list):
        raise InvalidInputError(f"{where}: body.kit must be a list.")
    for index, entry in enumerate(entries(body)):
        fields = {"id": str, "tier": int, "status": str, "elements": int, "decided": int}
        if not isinstance(entry, dict) or any(not isinstance(entry.get(k), v) for k, v in fields.items()):
            raise InvalidInputError(f"{where}: entry {index} of kit and cases lacks one of {', '.join(fields)}.")
        if not isinstance(entry.get("details", {}), dict):
            raise InvalidInputError(f"{where}: entry {index} of kit and cases: details must be an object.")
        if entry["status"] not in STATUSES:
            raise InvalidInputError(f"{where}: entry {index} of kit and cases has the status {entry['status']!r}.")
    if not all(isinstance(w, dict) for w in body["waivers"]):
        raise InvalidInputError(f"{where}: body.waivers must hold objects.")
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def check(data: Mapping[str, Any], catalogue: Catalogue, suite: derived.Suite | None = None) -> list[str]:
    """What is wrong with a certificate, most general first; empty if it is sound.

    Recomputes every digest, the totals and the verdict, and compares the case list with the catalogue: a missing case
    is a failure and so is an extra one, since either would let a certificate claim what was never asked. What else can
    be derived from other fields, the catalogue or the `suite` that checks is derived (`conformance.derived`).
    """
    body, problems = data["body"], []
    sections = [name for name in SECTIONS if name in body and digest(body[name]) != body["digests"].get(name)]
    for entry in entries(body):
        if digest({k: v for k, v in entry.items() if k != "digest"}) != entry.get("digest"):
            problems.append(f"case {entry['id']!r} was edited: its digest does not match its fields")
    problems += [f"section {name!r} was edited: its digest does not match" for name in sections]
    if digest(body) != data["digest"]:
        where = "" if problems else "; no section's digest differs, so the edit is outside them"
        problems.append(f"the body was edited: its digest does not match{where}")
    for name, recomputed in (("totals", totals(body)), ("verdict", verdict(body)), ("certifies", certifies(body))):
        if body[name] != recomputed:
            problems.append(f"{name} is {body[name]!r}, but the cases give {recomputed!r}")
    if body["scope"] != (due := scope_of(body)):
        problems.append(f"scope is {body['scope']!r}, but the executor gives {due!r}")
    problems += _check_cases(body, catalogue) + _check_kit(body) + _check_state(body)
    return problems + derived.check(body, catalogue, declared(body["claims"]), suite)


def _check_kit(body: Mapping[str, Any]) -> list[str]:
    executor, backend = executor_of(body), str(body["backend"].get("entry_point"))
    if executor is None:
        return [f"it does not say who executed the targets of {backend!r}"] if backend in kits.KITS else []
    found = kits.faults(backend, executor, [e["id"] for e in body.get("kit", ())])
    return found if body["complete"] else [f for f in found if not f.endswith("is missing")]


def _check_cases(body: Mapping[str, Any], catalogue: Catalogue) -> list[str]:
    known = catalogue.at(body["suite"].get("catalogue"))
    if known is None:
        return [
            f"it was made with another catalogue ({body['suite'].get('catalogue')!r:.40}); this suite has "
            f"{catalogue.digest:.20}…. Check it with the suite version that made it"
        ]
    problems: list[str] = []
    counts = collections.Counter(entry["id"] for entry in body["cases"])
    problems += [f"case {i!r} occurs {n} times" for i, n in sorted(counts.items()) if n > 1]
    cases = () if body["level"] == "lowering" else known.select(body["level"])
    selected = {case.id: case for case in cases}
    problems += [f"extra case {i!r}: not in the catalogue at this level" for i in sorted(set(counts) - set(selected))]
    if not body["complete"]:
        rest = {case.id: case for case in cases}
        due = {"of": len(cases), **selection(body, [rest[i] for i in counts if i in rest])}
        if body["level"] != "lowering" and body.get("selection") != due:
            problems.append(f"selection is {body.get('selection')!r}, but the cases and claims give {due!r}")
    else:
        problems += [f"missing case {i!r}" for i in sorted(set(selected) - set(counts))]
    claimed = declared(body["claims"])
    if claimed is None:
        problems.append("claims are no declaration of a backend, so what they leave unclaimed cannot be told")
    waived = {i for waiver in body["waivers"] if waiver.get("applies") for i in waiver.get("matched") or ()}
    for entry in body["cases"]:
        case = selected.get(entry["id"])
        if case is not None:
            problems += [f"case {entry['id']!r} {what}" for what in _contradictions(entry, case, claimed, waived)]
    return problems


def _contradictions(entry: Mapping[str, Any], case: Case, claimed: Capabilities | None, waived: set[str]) -> list[str]:
    """What an entry says that the catalogue, the claims or the waivers gainsay."""
    out = []
    for name, value in (("tier", case.tier), ("level", case.level), ("needs", list(case.needs))):
        if entry.get(name) != value:
            out.append(f"has {name} {entry.get(name)!r}, the catalogue says {value!r}")
    status = entry["status"]
    if claimed is not None:
        missing = unmet(required(case), claimed)
        if missing and status != "not-claimed":
            out.append(f"is {status!r}, but the claims lack what it needs: {', '.join(missing)}")
        if status == "not-claimed" and not missing:
            out.append("is 'not-claimed', but the claims have all that it needs")
    if not 0 <= entry["decided"] <= entry["elements"]:
        out.append(f"has {entry['decided']} elements decided of {entry['elements']}")
    if status == "pass" and (not entry["elements"] or "broken" in entry or "diagnosis" in entry):
        out.append("is 'pass' with nothing judged, or with a failure's diagnosis")
    if status == "waived" and (case.tier in UNWAIVABLE_TIERS or case.id not in waived):
        out.append("is 'waived', which no waiver of this certificate can have done")
    return out


def declared(claims: Mapping[str, Any]) -> Capabilities | None:
    """The declaration that a certificate's claims spell, or None if they spell none."""
    fields: dict[str, Any] = {}
    try:
        for name, value in claims.items():
            fields[name] = Range(**value) if isinstance(value, dict) else value
            fields[name] = frozenset(value) if isinstance(value, list) else fields[name]
        return Capabilities(**fields)
    except (TypeError, InvalidInputError):
        return None


def _check_state(body: Mapping[str, Any]) -> list[str]:
    tree = body["suite"].get("tree")
    return [] if tree == "clean" else [f"the suite's tree was {tree!r} and not clean when it was made"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """What changed from one certificate to another: four sets and no score.

    - `verdict`: (before, after), or None if equal.
    - `claims`: claim -> (before, after).
    - `status`: case -> (before, after); None where a certificate does not have the case.
    - `bits`: cases of equal status whose demanded bits differ, or, between certificates of one backend, whose own do.
      Where another arithmetic is claimed, other elements are decided, and nothing is compared.
    """

    verdict: tuple[str, str] | None
    claims: dict[str, tuple[Any, Any]]
    status: dict[str, tuple[str | None, str | None]]
    bits: tuple[str, ...]

    @property
    def regressions(self) -> list[str]:
        """Claims and passes that were lost, as sentences."""
        lost = [f"{i}: pass -> {new or 'absent'}" for i, (old, new) in self.status.items() if old == "pass"]
        for claim, (old, new) in self.claims.items():
            if isinstance(old, list) and (gone := [x for x in old if x not in (new or [])]):
                lost.append(f"claim {claim} lost {', '.join(map(str, gone))}")
        return lost

    def __bool__(self) -> bool:
        return bool(self.verdict or self.claims or self.status or self.bits)


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Compare two certificates' bodies."""
    old_cases = {e["id"]: e for e in entries(before)}
    new_cases = {e["id"]: e for e in entries(after)}
    same_backend = before["backend"].get("entry_point") == after["backend"].get("entry_point")
    status: dict[str, tuple[str | None, str | None]] = {}
    bits: list[str] = []
    for case_id in sorted(old_cases.keys() | new_cases.keys()):
        old, new = old_cases.get(case_id), new_cases.get(case_id)
        pair = (old and old["status"], new and new["status"])
        if pair[0] != pair[1]:
            status[case_id] = pair
        elif old and new and _moved(old, new, same_backend):
            bits.append(case_id)
    claims = {
        name: (before["claims"].get(name), after["claims"].get(name))
        for name in sorted(before["claims"].keys() | after["claims"].keys())
        if before["claims"].get(name) != after["claims"].get(name)
    }
    changed = (before["verdict"], after["verdict"])
    verdicts = changed if changed[0] != changed[1] else None
    return Difference(verdict=verdicts, claims=claims, status=status, bits=tuple(bits))


def _moved(old: Mapping[str, Any], new: Mapping[str, Any], same_backend: bool) -> bool:
    shared = (old.get("output"), new.get("output")) if old["decided"] == new["decided"] else (None, None)
    own = tuple(e.get("details", {}).get("bits") for e in (old, new)) if same_backend else (None, None)
    return any(None not in pair and pair[0] != pair[1] for pair in (shared, own))


_FEATURES = re.compile(r"window|soft_cap|sinks|non_causal|kv_scales|lse|value_head_dim")


def features_of(entry: Mapping[str, Any]) -> list[str]:
    """Features that a case exercises, from its needs; `plain` if none."""
    found = [need for need in entry.get("needs", ()) if _FEATURES.fullmatch(need)]
    return found or ["plain"]


def grid(body: Mapping[str, Any]) -> dict[str, dict[int, dict[str, int]]]:
    """Feature -> tier -> status -> number of cases."""
    out: dict[str, dict[int, dict[str, int]]] = {}
    for entry in body["cases"]:
        for feature in features_of(entry):
            cell = out.setdefault(feature, {}).setdefault(entry["tier"], {})
            cell[entry["status"]] = cell.get(entry["status"], 0) + 1
    return dict(sorted(out.items(), key=lambda item: (item[0] != "plain", item[0])))


def decided_shares(body: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """dtype -> (decided, judged elements) over the tier-3 cases that passed."""
    out: dict[str, tuple[int, int]] = {}
    for entry in body["cases"]:
        if entry["tier"] == 3 and entry["status"] == "pass":
            names = [n.partition(":")[2] for n in entry.get("needs", ()) if n.startswith("dtype:")]
            decided, elements = out.get(names[0] if names else "any", (0, 0))
            out[names[0] if names else "any"] = (decided + entry["decided"], elements + entry["elements"])
    return dict(sorted(out.items()))
