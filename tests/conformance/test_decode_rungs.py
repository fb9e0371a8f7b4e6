"""Steps of single tokens: the design is held, faults stay behind their condition, needs and traces go by the rung."""

import dataclasses

import pytest

from conformance import covering, faults, faults_gated
from conformance.case import AttendProblem, Case
from conformance.catalogue import load
from conformance.mutants import GATED, MUTANTS
from conformance.needs import required
from conformance.quick import single_tokens
from conformance.runner import Session
from conformance.vectors import Trace, generate
from paged.backends.protocol import Rung
from paged.backends.registry import get_backend
from paged.common import AttentionSpec
from paged.common.errors import InvalidInputError

CATALOGUE = load()
RUNG = Rung(rows=2, tokens=2, listed_pages=4, max_query_len=1, max_kv_len=64, tokens_per_page=16, num_pages=8,
            group_size=2, head_dim=64, kv_dtype="bfloat16")  # fmt: skip


def test_every_combination_of_the_design_has_a_case():
    assert covering.missing(CATALOGUE.select("core")) == []
    few = [c for c in CATALOGUE.cases if "soft_cap" not in c.needs]
    assert ("soft_cap", "head_dim", 80) in covering.missing(few)
    assert ("sinks", "soft_cap") in covering.missing(few)


def test_relations_and_movement_do_not_count_for_the_design():
    relations = [c for c in CATALOGUE.cases if c.params.get("relation") or c.generator in covering.MOVERS]
    assert set(covering.missing(relations)) == covering.asked()


def test_conditions_hold_where_they_say():
    spec = AttentionSpec(scale=1.0, window=4)
    where = {
        "single": {},
        "single_narrow": {},
        "several": {"max_query_len": 2},
        "single_wide_page": {"tokens_per_page": 64},
        "single_long": {"max_kv_len": 1024},
        "single_row": {"rows": 1},
        "single_8_bit": {"kv_dtype": "float8_e5m2"},
    }
    for name, changes in where.items():
        assert faults_gated.GATES[name](dataclasses.replace(RUNG, **changes), None), name
    for name in set(where) - {"single", "single_narrow"}:
        assert not faults_gated.GATES[name](RUNG, None), name
    assert not faults_gated.GATES["single"](dataclasses.replace(RUNG, max_query_len=2), None)
    assert faults_gated.GATES["single_window"](RUNG, spec)
    assert not faults_gated.GATES["single_window"](RUNG, AttentionSpec(scale=1.0))
    assert set(GATED) == set(faults_gated.GATES)


def test_a_confined_fault_breaks_what_the_fault_breaks():
    for gate, names in GATED.items():
        for name in names:
            confined = MUTANTS[f"{name}_{gate}"]
            assert confined.clause == MUTANTS[name].clause
            assert confined.breaks.startswith(MUTANTS[name].breaks)


def test_a_confined_fault_is_caught_in_its_rung_and_in_no_other():
    """The mutant of the whole hole: no soft cap in steps of single tokens, right everywhere else."""
    mutant = Session(faults.broken("no_soft_cap_single", get_backend("reference")))
    caught = mutant.run(CATALOGUE.case("attend/generic/bf16/decode/d128-page16-group4/window-19+soft-cap-30"))
    assert (caught.status, caught.clause) == ("fail", "attend.5"), caught.diagnosis
    assert mutant.run(CATALOGUE.case("attend/generic/bf16/soft-cap-30")).status == "pass"


def test_a_step_of_single_tokens_in_a_wider_rung_is_a_mixed_batch():
    wide, narrow = CATALOGUE.case("attend/ladder/bf16/decode"), CATALOGUE.case("attend/ladder/bf16/d128/decode")
    assert "decode" in wide.needs
    assert "decode" not in required(wide)
    assert "mixed" in required(wide)
    assert required(narrow) == narrow.needs
    trace = CATALOGUE.case("serving/rungs/bf16")
    assert {"decode", "mixed"} <= set(required(trace))
    for case in CATALOGUE.cases:
        lens = case.params.get("query_lens")
        if "decode" in required(case) and lens is not None:
            assert single_tokens(case), case.id


def test_each_step_of_a_trace_takes_the_first_rung_that_holds_it():
    case = CATALOGUE.case("serving/rungs/bf16/buckets")
    small, single = case.params["ladder"]
    seen = set()
    trace = generate(case).problem
    assert isinstance(trace, Trace)
    for step in trace.steps:
        problem = step.layers[0].problem
        assert isinstance(problem, AttendProblem)
        table = problem.table
        fed = [int(word.partition("+")[2]) for word in step.text.split() if "+" in word]
        if max(fed) > 1:
            want = case.params["rung"]
        else:
            want = small if len(fed) <= small["rows"] and max(table.kv_lens) <= small["max_kv_len"] else single
        assert (table.num_rows, table.max_query_len) == (want["rows"], want["max_query_len"]), step.text
        seen.add((want["rows"], want["max_query_len"]))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("ladder", "said"),
    [
        ([], "must be a list of 1 to 8"),
        ([{"rows": 1}], "must be an object with"),
        ([{"rows": 9, "tokens": 5, "listed_pages": 24, "max_query_len": 1, "max_kv_len": 192}], "is above"),
    ],
)
def test_a_ladder_that_cannot_be_is_refused(ladder, said):
    case: Case = CATALOGUE.case("serving/rungs/bf16")
    with pytest.raises(InvalidInputError, match=said):
        generate(dataclasses.replace(case, params={**case.params, "ladder": ladder}))
