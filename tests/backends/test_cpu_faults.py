"""The CPU kernels with one fault each: every fault is found, by a case that names the clause it breaks."""

import functools

import pytest
from broken_cpu import broken, sources
from cpu_faults import EVERY, FAULTS

from conformance.catalogue import load
from conformance.runner import Session

CASES = {case.id: case for case in load().cases}
QUICK = [name for name, fault in FAULTS.items() if not fault.costly]


@functools.cache
def session(name):
    with broken(name) as backend:
        return Session(backend)


def result(name, case):
    with broken(name):
        return session(name).run(CASES[case])


@pytest.mark.parametrize("case", sorted({FAULTS[name].case for name in QUICK}))
def test_the_kernels_without_a_fault_pass(case):
    found = result("", case)
    assert found.status == "pass", found.diagnosis


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_found_and_named(name):
    found = result(name, FAULTS[name].case)
    assert (found.status, found.clause) == ("fail", FAULTS[name].clause), found.diagnosis


@pytest.mark.parametrize("name", EVERY)
def test_every_edit_is_of_a_text_that_is_there(name, tmp_path):
    sources(EVERY[name], tmp_path)
