"""Mutants: every one is built, a sample is caught, and what is not broken is not caught."""

import pytest

from conformance import faults
from conformance.case import Result
from conformance.catalogue import load
from conformance.mutants import MUTANTS, verdicts
from conformance.runner import Session
from paged.backends.registry import get_backend
from paged.common.errors import InvalidInputError

CATALOGUE = load()
HONEST = ("honest", "honest_kernel")
# One case of each kind that mutants are caught by.
LISTED = (
    "attend/address/bf16/mixed",
    "attend/census/bf16/mixed",
    "attend/generic/bf16/mixed",
    "attend/ladder/bf16/decode",
    "attend/census/bf16/lse",
    "append/bf16/bits",
    "copy-pages/bf16",
    "scrub/bf16",
)


@pytest.fixture(scope="module")
def reference():
    return get_backend("reference")


def listed(mutant):
    return [c for c in CATALOGUE.cases if mutant in c.kills]


def test_there_is_one_fault_for_every_mutant_and_a_case_for_each():
    assert set(faults.FAULTS) == set(MUTANTS) | set(HONEST)
    assert len(MUTANTS) >= 40
    for name in MUTANTS:
        assert listed(name), name


@pytest.mark.parametrize("name", HONEST)
def test_what_is_not_broken_is_not_caught(reference, name):
    session = Session(faults.Broken(reference, name))
    for case_id in LISTED:
        case = CATALOGUE.case(case_id)
        assert case.kills
        result = session.run(case)
        assert result.status == "pass", (case_id, result.diagnosis)


@pytest.mark.parametrize(
    ("name", "case_id"),
    [
        ("double_scale", "attend/ladder/bf16/decode"),
        ("no_causal_offset", "attend/address/bf16/mixed"),
        ("reads_padding", "attend/census/bf16/mixed"),
        ("unweighted_merge", "attend/generic/bf16/mixed"),
        ("lse_base2", "attend/census/bf16/lse"),
        ("append_padding_wraps", "append/bf16/bits"),
        ("copy_in_turn", "copy-pages/bf16"),
    ],
)
def test_a_sample_is_caught_and_named(reference, name, case_id):
    case = CATALOGUE.case(case_id)
    assert name in case.kills
    result = Session(faults.broken(name, reference)).run(case)
    assert verdicts([name], [(name, case, result)]) == {name: []}, result.diagnosis


def test_a_crash_a_wrong_shape_and_the_wrong_clause_are_no_catch():
    case = listed("no_window")[0]

    def judged(status, clause=None):
        result = Result(id=case.id, status=status, clause=clause, diagnosis="why")
        return verdicts(["no_window"], [("no_window", case, result)])["no_window"]

    assert judged("fail", "attend.4") == []
    for status in ("pass", "error", "not-claimed"):
        assert f"survived {case.id}" in judged(status)[0]
    assert "names attend.3 and not attend.4" in judged("fail", "attend.3")[0]
    assert verdicts(["no_window"], []) == {"no_window": ["no case lists it"]}


def test_one_case_that_misses_is_enough_to_survive():
    first, second = listed("no_window")[:2]
    good = Result(id=first.id, status="fail", clause="attend.4")
    bad = Result(id=second.id, status="pass")
    runs = [("no_window", first, good), ("no_window", second, bad)]
    assert len(verdicts(["no_window"], runs)["no_window"]) == 1


def test_mutants_are_of_the_reference_and_known(reference):
    with pytest.raises(InvalidInputError, match="mutant must be one of"):
        faults.broken("typo", reference)
    with pytest.raises(InvalidInputError, match="broken versions of the reference"):
        faults.broken("no_window", get_backend("xla"))
