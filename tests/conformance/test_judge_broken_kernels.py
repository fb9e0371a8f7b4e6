"""Faults of kernels that are no mutants of the suite: each is caught, and the diagnosis names what is wrong."""

import dataclasses
import functools

import pytest
from broken_kernels import FAULTS, run

from conformance.catalogue import load
from conformance.formats import is_nan
from conformance.judge import expectation, judge_attend
from conformance.relations import unpoisoned
from conformance.runner import EMPTY, unpoisoned_cause
from conformance.vectors import generate
from paged.common.capabilities import NUMERIC_MODELS

CATALOGUE = load()
LONG = 40


@functools.cache
def prepared(case_id):
    vector = generate(CATALOGUE.case(case_id))
    return vector.problem, expectation(vector, NUMERIC_MODELS["N0"])


def judged(case_id, fault, above):
    """The verdict as a session reaches it, which asks again without poison where there is NaN."""
    problem, expected = prepared(case_id)
    output, lse = run(problem, fault, above)
    result = judge_attend(problem, expected, output, lse, id=case_id)
    nan = int(is_nan(output, problem.dtype).sum())
    if result.status != "fail" or not nan or result.details["wrong"] > 1.2 * nan or result.clause in EMPTY:
        return result
    bare = unpoisoned(problem)
    output, lse = run(bare, fault, above)
    if is_nan(output, problem.dtype).any():
        return dataclasses.replace(result, clause="attend.1", diagnosis=f"{result.diagnosis} arithmetic")
    return unpoisoned_cause(bare, expected, output, lse, result)


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_kernel_is_caught_and_named(name):
    fault, seen = FAULTS[name], 0
    for turn, case_id in enumerate(fault.cases):
        result = judged(case_id, fault, LONG if turn % 2 else 0)
        if result.status == "pass":
            continue  # this vector cannot show this fault
        seen += 1
        assert (result.status, result.clause) == ("fail", fault.clause), f"{case_id}: {result.diagnosis}"
        assert any(text in result.diagnosis for text in fault.said), f"{case_id}: {result.diagnosis}"
        if seen == 2:
            break
    assert seen


@pytest.mark.parametrize("case_id", sorted({case for fault in FAULTS.values() for case in fault.cases}))
def test_the_kernel_without_a_fault_is_honest(case_id):
    problem, expected = prepared(case_id)
    result = judge_attend(problem, expected, *run(problem, None), id=case_id)
    assert result.status == "pass", result.diagnosis


@pytest.mark.parametrize("name", ["last page left out", "partial tile left out"])
@pytest.mark.parametrize("case_id", ["attend/ladder/bf16/d128/decode", "attend/ladder/fp16/decode"])
def test_a_ladder_that_lacks_tokens_is_not_told_as_a_scale(case_id, name):
    result = judged(case_id, FAULTS[name], 0)
    assert result.clause != "attend.2"
    assert "effective scale" not in result.diagnosis
    if result.status == "fail":
        assert "left out" in result.diagnosis
