"""Handlers that are wrong in one way: each fault is found, by a case that names the clause it breaks."""

import functools

import pytest
from aiter_faults import aiter, set_fault  # noqa: F401 (a fixture)

from conformance.catalogue import load
from conformance.runner import Session

CASES = {case.id: case for case in load().cases}


@functools.cache
def session(backend):
    """One for all faults: the programs are the same, only what runs under their targets changes."""
    return Session(backend)


FAULTS = [
    ("slot-off-by-one", "append/bf16/d128/bits", "append.1"),
    ("padding-is-written", "append/bf16/d128/bits", "append.2"),
    ("minus-zero-is-cleared", "append/bf16/d128/special", "append.4"),
    ("new-values-are-keys", "append/bf16/d128/bits", "append.1"),
    ("scale-twice", "attend/ladder/bf16/d128/decode", "attend.2"),
    ("scale-twice", "attend/generic/bf16/d128/mixed", "attend.2"),
    ("scale-from-heads", "attend/ladder/bf16/d128/decode", "attend.2"),
    ("whole-last-page", "attend/census/bf16/d128/mixed", "attend.7"),
    ("one-token-short", "attend/address/bf16/d128/decode", "pages.3"),
    ("pages-reversed", "attend/address/bf16/d128/decode", "pages.3"),
    ("pages-reversed", "attend/address/bf16/d128/mixed", "pages.3"),
    ("first-rows-pages", "attend/address/bf16/d128/mixed", "attend.12"),
    ("page-ids-in-four-bits", "attend/address/bf16/d128/mixed", "attend.12"),
    ("heads-modulo", "attend/address/bf16/d128/decode", "attend.6"),
    ("heads-modulo", "attend/address/bf16/d128/mixed", "attend.6"),
    ("values-are-keys", "attend/address/bf16/d128/decode", "attend.1"),
    ("window-too-long", "attend/census/bf16/d128/window-19", "attend.4"),
    ("top-left", "attend/census/bf16/d128/mixed", "attend.3"),
    ("merge-unweighted", "attend/generic/bf16/d128/long-decode", "attend.1"),
    ("truncates", "attend/generic/bf16/d128/mixed", "attend.1"),
    ("truncates", "attend/address/bf16/d128/decode", "attend.1"),
    ("never-the-same", "self/repeat/bf16/d128", "invariant.1"),
]


@pytest.mark.parametrize("case", sorted({case for _, case, _ in FAULTS}))
def test_honest_handlers_pass(aiter, case):  # noqa: F811
    result = session(aiter).run(CASES[case])
    assert result.status == "pass", result.diagnosis


@pytest.mark.parametrize(("fault", "case", "clause"), FAULTS)
def test_a_fault_is_found_and_named(aiter, fault, case, clause):  # noqa: F811
    set_fault(fault)
    result = session(aiter).run(CASES[case])
    assert (result.status, result.clause) == ("fail", clause), result.diagnosis
