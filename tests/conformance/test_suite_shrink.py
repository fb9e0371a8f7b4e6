"""Failing cases made smaller: still failing with the same clause, still cases."""

import dataclasses
import json

import pytest

from conformance.case import Case, Result
from conformance.catalogue import case_to_json, load, parse_case
from conformance.shrink import candidates, shrink
from conformance.vectors import generate
from paged.common.errors import InvalidInputError

PARAMS = {
    "dtype": "bfloat16", "page": 16, "num_pages": 24, "kv_heads": 2, "q_heads": 8, "head_dim": 64, "scale": 0.125,
    "layers": 2, "layer": 1, "query_lens": [7, 3, 1], "kv_lens": [53, 9, 130], "window": 19, "statistic": True,
}  # fmt: skip
CASE = Case(
    id="attend/x", tier=3, level="core", generator="generic", params=PARAMS, clause=("attend.1",), kills=("no_window",),
    inputs="sha256:" + "0" * 64,
)  # fmt: skip


def failing(rule, clause="attend.4"):
    """A run that fails with `clause` wherever `rule(params)`, and is an error where the inputs cannot be made."""
    runs = []

    def run(case):
        runs.append(case)
        try:
            generate(case)
        except InvalidInputError as error:
            return Result(id=case.id, status="error", diagnosis=str(error))
        bad = rule(case.params)
        return Result(id=case.id, status="fail" if bad else "pass", clause=clause if bad else None)

    return run, runs


def test_everything_that_does_not_matter_goes():
    run, _ = failing(lambda p: p.get("window") == 19 and max(p["kv_lens"]) > 40)
    small = shrink(CASE, "attend.4", run)
    p = small.params
    assert p["window"] == 19
    assert len(p["kv_lens"]) == 1
    assert 40 < p["kv_lens"][0] <= 64
    assert p["query_lens"] == [1]
    assert (p["kv_heads"], p["q_heads"], p["dtype"]) == (1, 1, "float32")
    assert p["num_pages"] < 8
    assert not {"layers", "layer", "statistic"} & set(p)
    assert small.inputs is None
    assert small.kills == ()
    assert small.id == CASE.id
    assert parse_case(json.loads(json.dumps(case_to_json(small))), "repro") == small


def test_another_clause_is_another_failure():
    run, runs = failing(lambda p: True, clause="attend.3")
    small = shrink(CASE, "attend.4", run)
    assert small.params == PARAMS
    assert len(runs) == 1 + sum(1 for _ in candidates(PARAMS))


def test_a_smaller_case_that_fails_for_another_reason_is_not_taken():
    def run(case):
        hint = "left-out" if max(case.params["kv_lens"]) > 64 else "fitted-scale"
        return Result(id=case.id, status="fail", clause="pages.3", details={"hint": hint})

    small = shrink(CASE, "pages.3", run)
    assert max(small.params["kv_lens"]) > 64
    assert len(small.params["kv_lens"]) == 1


def test_the_number_of_runs_is_bounded():
    run, runs = failing(lambda p: True)
    shrink(CASE, "attend.4", run, most=5)
    assert len(runs) == 5


@pytest.mark.parametrize(
    ("generator", "params"),
    [
        ("append_slots", {"tokens": 40, "padding": "tail"}),
        ("copy_pages", {"pages": 8}),
    ],
)
def test_movements_shrink_too(generator, params):
    base = {
        k: v
        for k, v in PARAMS.items()
        if k in ("dtype", "page", "num_pages", "kv_heads", "head_dim", "layers", "layer")
    }
    case = dataclasses.replace(CASE, generator=generator, params={**base, **params})
    run, _ = failing(lambda p: True, clause="append.1")
    small = shrink(case, "append.1", run).params
    assert small.get("tokens", small.get("pages")) == 1
    assert "layers" not in small


def test_a_trace_is_cut_to_the_step_at_which_it_fails():
    trace = load().case("serving/churn/bf16")
    run, _ = failing(lambda p: len(p["script"]) >= 4 and "b+1 a+1" not in p["script"][0], "steps.1")
    small = shrink(trace, "steps.1", run)
    assert len(small.params["script"]) == 4
    assert small.id == trace.id
    assert parse_case(json.loads(json.dumps(case_to_json(small))), "repro.json") == small
