"""Results as JUnit XML, the form that CI systems read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from typing import Any

from conformance.clauses import said

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(entries: Iterable[Mapping[str, Any]], *, name: str, seconds: Mapping[str, float] | None = None) -> str:
    """XML of a certificate's case entries. Failures and errors carry their diagnosis; not-claimed cases are skipped,
    waived ones too, each with its reason; a failure's type is the clause that it breaks, and its text begins with that
    clause's line; characters that XML cannot hold are replaced."""
    entries, seconds = list(entries), seconds or {}
    counts = {status: sum(e["status"] == status for e in entries) for status in ("fail", "error")}
    skipped = sum(e["status"] in ("not-claimed", "waived") for e in entries)
    suite = ET.Element(
        "testsuite",
        name=_clean(name),
        tests=str(len(entries)),
        failures=str(counts["fail"]),
        errors=str(counts["error"]),
        skipped=str(skipped),
        time=f"{sum(seconds.values()):.3f}",
    )
    for entry in entries:
        group, _, leaf = entry["id"].rpartition("/")
        spent = f"{seconds.get(entry['id'], 0.0):.3f}"
        case = ET.SubElement(suite, "testcase", classname=_clean(group or name), name=_clean(leaf), time=spent)
        if entry["status"] != "pass":
            tag = {"fail": "failure", "error": "error"}.get(entry["status"], "skipped")
            text = entry.get("diagnosis") or entry["status"]
            text = _clean(f"{said(entry['broken'])}. {text}" if entry.get("broken") else text)
            found = ET.SubElement(case, tag, message=text[:500])
            if tag != "skipped":
                found.set("type", _clean(entry.get("broken") or "error"))
                found.text = text
    root = ET.Element("testsuites")
    root.append(suite)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
