"""What no case of the catalogue asks and the CPU kernels owe all the same; each check is red on the fault it is for."""

import dataclasses

import numpy as np
import pytest
from broken_cpu import broken
from cpu_faults import UNSEEN

from conformance import execute
from conformance.catalogue import load
from conformance.formats import decode, encode
from conformance.oracle import attend
from conformance.runner import Session
from conformance.vectors import generate
from paged.backends.registry import get_backend

CASES = {case.id: case for case in load().cases}


def problem_of(case_id, **fields):
    problem = generate(CASES[case_id], "any_bits").problem
    return dataclasses.replace(problem, **fields)


def nan_of_a_later_token(backend):
    """A NaN that a row's last token sees touches no token before it."""
    problem = problem_of("attend/generic/f32/mixed")
    table = problem.table
    slot = int(table.write_slots[int(table.query_offsets[1]) - 1])
    values = np.array(problem.values)
    page = problem.layer * table.num_pages + slot // table.tokens_per_page
    values[page, slot % table.tokens_per_page] = 0x7FC00000
    right = execute.attend(backend, problem).out
    found = execute.attend(backend, dataclasses.replace(problem, values=values)).out
    last = int(table.query_offsets[1]) - 1
    assert last >= 2
    assert (found[:last] == right[:last]).all()
    assert np.isnan(decode(found[last], "float32")).any()


def chunks_under_a_window(backend):
    """The cut of a prompt changes no bit under a window that is longer than a block of 64."""
    case = CASES["self/chunk/f32"]
    params = {**case.params, "window": 100, "query_lens": [12, 9, 3], "kv_lens": [253, 9, 130], "num_pages": 48}
    result = Session(backend).run(dataclasses.replace(case, id="self/chunk/f32/window-100", params=params))
    assert result.status == "pass", result.diagnosis


def subnormal_values(backend):
    """Values of a float16 pool below 2^-14 are what they are, to half a unit of the last place of the answer."""
    problem = problem_of("attend/generic/fp16/mixed")
    values = np.array(problem.values) & 0x83FF  # no exponent: multiples of 2^-24
    problem = dataclasses.replace(problem, values=values)
    found, right = execute.attend(backend, problem).out, attend(problem).output
    assert np.abs(right).max() > 2.0**-16
    assert np.abs(decode(found, "float16") - right).max() <= 0.5001 * 2.0**-24
    # The same of float32, where 2^-140 of 1 is 512 units.
    problem = problem_of("attend/generic/f32/mixed")
    values = encode(decode(problem.values, "float32") * 2.0**-135, "float32")
    problem = dataclasses.replace(problem, values=values)
    found, right = execute.attend(backend, problem).out, attend(problem).output
    assert np.abs(decode(found, "float32") - right).max() < 2.0**-143


def zeros_from_below(backend):
    """What rounds to zero from below is +0."""
    problem = problem_of("attend/generic/fp16/mixed")
    values = np.array(problem.values)
    values[:], values[:, 0] = 0, 0x8001  # −2^-24 at one slot of a page
    found = execute.attend(backend, dataclasses.replace(problem, values=values)).out
    assert (found != 0x8000).all()


def exponential(backend):
    """Weights to 2^-22, seen through values of 1 at one slot of each page and 0 elsewhere."""
    problem = problem_of("attend/generic/f32/mixed")
    values = np.zeros_like(problem.values)
    values[:, 0] = encode(np.ones(values[:, 0].shape), "float32")
    problem = dataclasses.replace(problem, values=values)
    found, right = decode(execute.attend(backend, problem).out, "float32"), attend(problem).output
    with np.errstate(all="ignore"):
        off = np.abs(found - right) / right
    assert np.nanmax(np.where(right > 0, off, 0)) < 2.0**-20


CHECKS = {
    check.__name__: check
    for check in (nan_of_a_later_token, chunks_under_a_window, subnormal_values, zeros_from_below, exponential)
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_keep_it(name):
    CHECKS[name](get_backend("cpu"))


@pytest.mark.parametrize("name", [name for name, fault in UNSEEN.items() if not fault.costly])
def test_a_fault_is_seen(name):
    with broken(name) as backend, pytest.raises(AssertionError):
        CHECKS[UNSEEN[name].case](backend)


def test_every_check_is_for_a_fault():
    assert set(CHECKS) == {fault.case for fault in UNSEEN.values()}
