"""Scripts and traces: who holds which page, what is refused, what a token is; numpy alone."""

import dataclasses

import numpy as np
import pytest

from conformance.catalogue import load
from conformance.formats import decode
from conformance.vectors import generate
from conformance.vectors.address import read_back
from conformance.vectors.script import Engine
from paged.common.errors import InvalidInputError

CASES = [case for case in load().cases if case.generator == "trace"]


def played(*texts, page=4, pages=12):
    engine = Engine(page, range(1, pages))
    return engine, [engine.step(text, f"step {i}") for i, text in enumerate(texts)]


def test_pages_are_shared_copied_and_taken_again():
    engine, steps = played("a+10", "b~a b+1 a+1", "c=a:8 c+3", "-a b+1", "-b c+1", "-c d+2")
    a, b = steps[0].rows[0].pages, steps[1].rows[0].pages
    assert b[:2] == a[:2]
    assert steps[1].copied == ((a[2], b[2]),)
    assert steps[2].rows[0].pages[:2] == a[:2]
    assert steps[3].freed == (a[2],)  # the others are held by b and c
    assert set(steps[5].freed) == set(steps[4].rows[0].pages)
    assert steps[5].rows[0].pages[0] == steps[5].freed[-1]  # last freed, first taken
    assert sum(engine.count.values()) == 1


def test_tokens_keep_their_names_over_preemption_and_forks():
    _, steps = played("a+6", "b~a b+1", "!a a+6")
    key = lambda row, j: row.request.key(j)  # noqa: E731
    assert key(steps[0].rows[0], 5) == key(steps[2].rows[0], 5) == "a@5"
    assert key(steps[1].rows[0], 6) == "a6/b@6"
    assert key(steps[1].rows[0], 3) == "a@3"
    assert steps[1].rows[0].request.origin(5) == "a"
    assert steps[1].rows[0].request.origin(6) == "b"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("a+1 b",), "'b' is not a word"),
        (("a+1 z+1",), "'z+1' is not a word"),
        (("-a a+1",), "request 'a' holds nothing"),
        (("a+1 a+1",), "feeds a request twice"),
        (("a+4", "-a"), "feeds no token"),
        (("a+9", "b=a:6 b+1"), "whole pages of 4"),
        (("a+9", "b=a:12 b+1"), "shares 12 of 9"),
        (("a+9", "a~a a+1"), "runs already"),
        (("a+45",), "no page is free"),
        (("a+9", "b~a a+1 b+1", "c~a c+1"), ""),
    ],
)
def test_a_script_that_cannot_be_is_refused(texts, said):
    if said:
        with pytest.raises(InvalidInputError, match="step") as info:
            played(*texts)
        assert said in str(info.value)
    else:
        played(*texts, pages=20)


def test_a_row_never_writes_to_a_page_that_another_lists():
    for case in CASES[::3]:
        for step in generate(case).problem.steps:
            table = step.layers[0].problem.table
            written = np.unique(table.write_slots[table.write_slots >= 0] // table.tokens_per_page)
            listed = np.concatenate([np.unique(table.pages_of(r)) for r in range(table.num_rows)])
            counts = dict(zip(*np.unique(listed, return_counts=True)))
            assert all(counts[p] == 1 for p in written), (case.id, step.text)


def test_the_pool_of_a_trace_holds_what_its_operations_and_appends_put_there():
    for case in CASES[:2]:
        trace = generate(case).problem
        keys = trace.keys.copy()
        for step in trace.steps:
            for operation in step.operations:
                if operation.kind == "write":
                    keys[operation.rows] = operation.keys
                elif operation.kind == "scrub":
                    keys[operation.rows] = 0
                else:
                    keys[operation.rows] = keys[operation.source]
            for vector in step.layers:
                problem = vector.problem
                slots = problem.table.write_slots
                rows = problem.layer * trace.num_pages + slots[slots >= 0] // problem.table.tokens_per_page
                at = rows, slots[slots >= 0] % problem.table.tokens_per_page
                keys[at] = problem.keys[at]
                assert np.array_equal(keys, problem.keys), step.text


def test_an_answer_spells_the_token_that_was_asked_for():
    case = load().case("serving/fork/bf16")
    for step in generate(case).problem.steps:
        for vector in step.layers:
            e, problem = vector.explain, vector.problem
            for token in range(len(step.tokens)):
                row = int(np.searchsorted(problem.table.query_offsets, token, side="right") - 1)
                found = read_back(decode(vector.predicted[0][token, 3], "bfloat16"), e["fields"], e["base"])
                j = int(e["target"][token, 3])
                due = {
                    "request": ord(e["origins"][row][j]) - ord("a"),
                    "position": j,
                    "head": 1,
                    "layer": problem.layer,
                }
                assert found == due


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"script": []}, "params.script must be a list"),
        ({"script": ["a+1"] * 49}, "params.script must be a list"),
        ({"script": [1]}, "params.script must be a list"),
        ({"script": ["a+25"]}, "24"),
        ({"reuse": "burn"}, "params.reuse"),
        ({"family": "census"}, "params.family"),
        ({"value_head_dim": 32}, "params.value_head_dim"),
        ({"soft_cap": 3.0}, "params.sinks and params.soft_cap"),
        ({"head_dim": 8}, "head_dim = 8"),
        ({"layers": 64, "num_pages": 1 << 18}, "pool"),
        ({"query_lens": [1]}, "query_lens is not a parameter"),
    ],
)
def test_parameters_of_a_trace_are_bounded(change, said):
    case = load().case("serving/churn/bf16")
    params = {**case.params, **change}
    with pytest.raises(InvalidInputError) as info:
        generate(dataclasses.replace(case, params=params))
    assert said in str(info.value)
