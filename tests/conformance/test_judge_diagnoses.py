"""Faults that are no mutant, and what they are called: factors, parts of a batch, neighbours on a page; numpy alone."""

import dataclasses

import numpy as np
import pytest

from conformance import oracle
from conformance.catalogue import load
from conformance.formats import encode
from conformance.hypotheses import _reversed, _turned, _unshared
from conformance.judge import expectation, judge_attend
from conformance.oracle import Rules
from conformance.vectors import generate
from paged.common.capabilities import NUMERIC_MODELS

CATALOGUE = load()


def judged(case_id, *, rules=oracle.SEMANTICS, heads=None, tokens=None, spec=None, lse_only=False):
    """The verdict on a kernel that is exact but for another specification or rule, for some heads or tokens."""
    vector = generate(CATALOGUE.case(case_id))
    problem = vector.problem
    altered = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, **(spec or {})))
    right, wrong = oracle.attend(problem), oracle.attend(altered, rules)
    where = np.zeros(problem.query.shape[:2], bool)
    where[np.ix_(*(range(n) if x is None else x for x, n in zip((tokens, heads), where.shape)))] = True
    output = right.output if lse_only else np.where(where[..., None], wrong.output, right.output)
    lse = np.where(where, wrong.lse, right.lse).astype(np.float32)
    expected = expectation(vector, NUMERIC_MODELS["N0"])
    return judge_attend(problem, expected, encode(output, problem.dtype), lse, id=case_id)


@pytest.mark.parametrize(
    ("case_id", "spec", "clause", "said"),
    [
        ("attend/generic/bf16/mixed", {"scale": 0.125 * 0.936}, "attend.2", "a scale of 0.117 instead of 0.125"),
        ("attend/generic/f32/mixed", {"scale": 0.125 * 1.003}, "attend.2", "1.003 times it"),
        ("attend/generic/bf16/soft-cap-1", {"soft_cap": 1.05}, "attend.5", "a soft cap of 1.05"),
        ("attend/ladder/bf16/soft-cap-1", {"soft_cap": 2.5}, "attend.5", "a soft cap of 2.5"),
    ],
)
def test_a_factor_is_measured(case_id, spec, clause, said):
    result = judged(case_id, spec=spec)
    assert (result.status, result.clause) == ("fail", clause), result.diagnosis
    assert said in result.diagnosis


def test_values_of_another_width_than_keys_are_judged_to_the_end():
    vector = generate(CATALOGUE.case("attend/address/bf16/decode/d192-page256-group1/plain"))
    right, expected = oracle.attend(vector.problem), expectation(vector, NUMERIC_MODELS["N0"])
    assert right.output.shape[-1] != vector.problem.query.shape[-1]
    output = right.output * np.linspace(0.5, 1.5, right.output.size).reshape(right.output.shape)
    result = judge_attend(vector.problem, expected, encode(output, "bfloat16"), right.lse.astype(np.float32), id="x")
    assert (result.status, result.clause) == ("fail", "attend.1"), result.diagnosis


def test_a_factor_that_only_the_lse_shows_is_measured_there():
    result = judged("attend/generic/bf16/soft-cap-1", spec={"soft_cap": 1.01}, lse_only=True)
    assert (result.status, result.clause) == ("fail", "attend.5"), result.diagnosis
    assert "the output is right" in result.diagnosis
    assert "1.01 times it" in result.diagnosis


@pytest.mark.parametrize(
    ("case_id", "spec", "part", "clause", "said"),
    [
        ("attend/generic/bf16/window-19", {"window": 18}, {"heads": [1, 3]}, "attend.4", "only there (heads 1, 3)"),
        ("attend/census/bf16/window-19", {"window": 20}, {"heads": [0]}, "attend.4", ""),
        ("attend/generic/bf16/mixed", {"scale": 0.117}, {"tokens": range(7)}, "attend.2", "a scale of 0.117 instead"),
        ("attend/generic/bf16/mixed", {"causal": False}, {"tokens": range(7)}, "attend.3", "tokens 0, 1, 2, 3"),
    ],
)
def test_what_is_wrong_in_a_part_only_is_named_there(case_id, spec, part, clause, said):
    result = judged(case_id, spec=spec, **part)
    assert (result.status, result.clause) == ("fail", clause), result.diagnosis
    assert said in result.diagnosis


@pytest.mark.parametrize(
    ("case_id", "rule", "said"),
    [
        ("attend/generic/bf16/mixed", lambda h, n, k: _turned(h, n, k, step=1), "counted around"),
        ("attend/census/bf16/d80-page4-kv3-group1", _reversed, "in reverse"),
    ],
)
def test_heads_of_another_order_are_named(case_id, rule, said):
    result = judged(case_id, rules=Rules(key_head=rule, value_head=rule))
    assert (result.status, result.clause) == ("fail", "attend.6"), result.diagnosis
    assert said in result.diagnosis


@pytest.mark.parametrize("first", [True, False])
def test_a_page_that_only_one_of_its_rows_reads_is_named(first):
    rule = Rules(pages=lambda p, r: _unshared(p, r, first=first))
    for case_id in ("attend/address/bf16/shared-prefix", "attend/generic/bf16/shared-prefix"):
        result = judged(case_id, rules=rule)
        assert (result.status, result.clause) == ("fail", "steps.2"), result.diagnosis
        assert f"by the {'first' if first else 'last'} of them only" in result.diagnosis
