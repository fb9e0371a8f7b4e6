"""Waivers: failures that a vendor knows of, with a reason, a source and an end.

`paged-waivers.toml` lives with the backend:

    [[waiver]]
    case = "attend/window/*"          # an exact id or a glob
    reason = "the split planner of driver 570 counts chunks on the whole length"
    issue = "https://example.org/issues/12"
    devices = ["NVIDIA H100*"]        # globs of the device kind; left out: every device
    until = "0.3.0"                   # last suite version for which it holds

A waiver turns `fail` into `waived`. One that is expired, that matches no case that was run, or whose cases all pass is
itself a failure of the run, so that none outlives its reason. Only tiers 3 and 4 can be waived: movement and exact
vectors are exact, and structure and refusals are yes or no, so a failure there is a fault or a retraction.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.case import Case, Result
from paged.common.errors import InvalidInputError

UNWAIVABLE_TIERS = (0, 1, 2)
_VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,3}\Z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiver:
    """One entry of a waiver file; see the module."""

    case: str
    reason: str
    issue: str
    until: str
    devices: tuple[str, ...] = ()

    def holds_on(self, device_kind: str) -> bool:
        """Whether it speaks about this device."""
        return not self.devices or any(fnmatch.fnmatchcase(device_kind, d) for d in self.devices)

    def expired(self, suite_version: str) -> bool:
        """Whether the suite is past its last version."""
        return _version(suite_version) > _version(self.until)


def load(text: str, where: str = "waivers") -> tuple[Waiver, ...]:
    """Waivers of a TOML text. Raises `InvalidInputError` for an unknown key or a missing reason, issue or end."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{where}: {error}") from None
    entries = data.pop("waiver", [])
    if data or not isinstance(entries, list):
        raise InvalidInputError(f"{where}: only [[waiver]] tables are read, found {sorted(data) or type(entries)}.")
    if not all(isinstance(entry, dict) for entry in entries):
        raise InvalidInputError(f"{where}: waiver must be written as [[waiver]] tables.")
    return tuple(_parse(entry, f"{where}, waiver {i}") for i, entry in enumerate(entries))


def _parse(entry: Mapping[str, Any], where: str) -> Waiver:
    names = {f.name for f in dataclasses.fields(Waiver)}
    unknown = sorted(set(entry) - names)
    if unknown:
        raise InvalidInputError(f"{where}: unknown key {unknown[0]!r}; a waiver has {', '.join(sorted(names))}.")
    for name in ("case", "reason", "issue", "until"):
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            raise InvalidInputError(f"{where}: {name} must be non-empty text, got {entry.get(name)!r}.")
    if not re.match(r"https?://\S+\Z", entry["issue"]):
        raise InvalidInputError(f"{where}: issue must be the address of the report, got {entry['issue']!r}.")
    if not _VERSION.match(entry["until"]):
        raise InvalidInputError(f"{where}: until must be a suite version such as '0.3.0', got {entry['until']!r}.")
    devices = entry.get("devices", [])
    if not isinstance(devices, list) or not all(isinstance(d, str) and d for d in devices):
        raise InvalidInputError(f"{where}: devices must be a list of device kinds, got {devices!r}.")
    return Waiver(**{**entry, "devices": tuple(devices)})


def apply(
    waivers: Sequence[Waiver],
    cases: Sequence[Case],
    results: Sequence[Result],
    *,
    device_kind: str,
    suite_version: str,
) -> tuple[list[Result], list[dict[str, Any]]]:
    """Results with waived failures, and the waivers as a certificate records them.

    A record's `problem` is None, `"expired"`, `"unused"` (it matches no case that was run, or none that may be waived)
    or `"passing"` (every case it matches passes). A waiver of another device is left out of the judgement:
    `"applies": false`.
    """
    tiers = {case.id: case.tier for case in cases}
    out = {result.id: result for result in results}
    records: list[dict[str, Any]] = []
    for waiver in waivers:
        record = {**dataclasses.asdict(waiver), "devices": list(waiver.devices), "applies": True}
        record |= {"matched": [], "problem": None}
        records.append(record)
        if not waiver.holds_on(device_kind):
            record["applies"] = False
            continue
        if waiver.expired(suite_version):
            record["problem"] = "expired"
            continue
        matched = [i for i in sorted(out) if fnmatch.fnmatchcase(i, waiver.case)]
        allowed = [i for i in matched if tiers.get(i, 1) not in UNWAIVABLE_TIERS and out[i].status != "not-claimed"]
        failing = [i for i in allowed if out[i].status in ("fail", "waived")]
        record["matched"] = failing
        if not allowed:
            record["problem"] = "unused"
        elif all(out[i].status == "pass" for i in allowed):
            record["problem"] = "passing"
        for case_id in failing:
            out[case_id] = dataclasses.replace(out[case_id], status="waived")
    return [out[result.id] for result in results], records


def _version(text: str) -> tuple[int, ...]:
    parts = [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4]]
    return tuple(parts + [0] * (4 - len(parts)))
