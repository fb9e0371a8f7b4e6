"""Waiver files: what is refused, and when a waiver is itself a failure."""

import pytest

from conformance import waivers
from conformance.case import Case, Result
from paged.common.errors import InvalidInputError

TEXT = """
[[waiver]]
case = "{case}"
reason = "known"
issue = "https://example.org/1"
until = "{until}"
devices = {devices}
"""


def load(case="t3/*", until="0.3", devices="[]"):
    return waivers.load(TEXT.format(case=case, until=until, devices=devices))


def run(found, *, device="cpu", version="0.1.0", **statuses):
    cases = [
        Case(id=f"t{t}/{n}", tier=t, level="core", generator="g", params={}, clause=("attend.1",))
        for t in (0, 1, 2, 3)
        for n in "ab"
    ]
    results = [Result(id=c.id, status=statuses.get(c.id.replace("/", ""), "pass")) for c in cases]
    done, records = waivers.apply(found, cases, results, device_kind=device, suite_version=version)
    return {r.id: r.status for r in done}, records


def test_a_waiver_turns_fail_into_waived_and_nothing_else():
    statuses, records = run(load(), t3a="fail")
    assert statuses["t3/a"] == "waived"
    assert statuses["t3/b"] == "pass"
    assert records[0]["problem"] is None
    assert records[0]["matched"] == ["t3/a"]
    assert run(load(), t3a="error")[0]["t3/a"] == "error"


@pytest.mark.parametrize("case", ["t0/a", "t1/a", "t2/*"])
def test_structure_and_exact_tiers_cannot_be_waived(case):
    statuses, records = run(load(case), t0a="fail", t1a="fail", t2b="fail")
    assert "waived" not in statuses.values()
    assert records[0]["problem"] == "unused"


@pytest.mark.parametrize(
    ("waiver", "statuses", "problem"),
    [
        ({}, {}, "passing"),
        ({"case": "nothing"}, {"t3a": "fail"}, "unused"),
        ({"until": "0.0.9"}, {"t3a": "fail"}, "expired"),
        ({"until": "0.1"}, {"t3a": "fail"}, None),
        ({}, {"t3a": "not-claimed", "t3b": "not-claimed"}, "unused"),
        ({}, {"t3a": "error"}, None),
    ],
)
def test_a_waiver_must_not_outlive_its_reason(waiver, statuses, problem):
    done, records = run(load(**waiver), **statuses)
    assert records[0]["problem"] == problem
    if problem:
        assert "waived" not in done.values()


def test_a_waiver_of_another_device_is_left_out():
    found = load(devices='["NVIDIA*"]')
    statuses, records = run(found, t3a="fail")
    assert statuses["t3/a"] == "fail"
    assert records[0] | {"applies": False, "problem": None} == records[0]
    assert run(found, device="NVIDIA H200", t3a="fail")[0]["t3/a"] == "waived"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[waiver]]\ncase = 'x'", "reason"),
        (TEXT.format(case="x", until="soon", devices="[]"), "until"),
        (TEXT.format(case="x", until="1", devices="[3]"), "devices"),
        (TEXT.format(case="x", until="1", devices="[]") + "module = 'os'", "module"),
        (TEXT.format(case="x", until="1", devices="[]").replace("https://example.org/1", "later"), "issue"),
        ("[waivers]", "waivers"),
        ("waiver = [1]", "tables"),
        ("=", "waivers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(text, said):
    with pytest.raises(InvalidInputError, match=said):
        waivers.load(text)
