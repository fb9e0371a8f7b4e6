"""What a level asks for, traced, against what its cases really call."""

import dataclasses
import fnmatch

import pytest

from conformance import catalogue, programs
from conformance.needs import required, unmet
from conformance.runner import Session
from paged import get_backend

CASES = catalogue.load().cases


@dataclasses.dataclass(frozen=True, eq=False)
class Spy:
    """A backend that notes every distinct call while it is traced."""

    inner: object
    seen: set

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def static_plan(self, rung, spec):
        self.seen.add((rung, spec))
        return self.inner.static_plan(rung, spec)

    def append(self, pool, key, value, slots, static, arrays):
        self.seen.add(("append", pool.dtype.name, key.shape))
        return self.inner.append(pool, key, value, slots, static, arrays)

    def attend(self, query, pool, page_base, static, arrays, spec, extras):
        sinks = None if extras.sinks is None else extras.sinks.shape
        self.seen.add((query.shape, query.dtype.name, pool.dtype.name, pool.keys.shape, spec, sinks))
        return self.inner.attend(query, pool, page_base, static, arrays, spec, extras)


def chosen():
    """A case of every generator, relation and check on one device."""
    found = {}
    for case in CASES:
        relation, check = (case.params.get(name) for name in ("relation", "check"))
        if case.level not in ("long", "sharded") and check not in ("refusals", "over_sharded"):
            found.setdefault((relation, check) if relation or check else case.generator, case)
    return list(found.values())


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.id)
def test_traced_calls_are_those_that_a_run_makes(case):
    inner = get_backend("reference")
    if unmet(required(case), inner.capabilities):
        pytest.skip("not claimed")
    traced, ran = Spy(inner, set()), Spy(inner, set())
    count = programs.trace(traced, [case])
    assert Session(ran).run(case).status == "pass"
    assert traced.seen == ran.seen
    assert (count > 0) == bool(ran.seen)


def test_cases_that_are_not_claimed_are_not_traced():
    of = get_backend("flashinfer", sm_count=132)
    wide = [case for case in CASES if fnmatch.fnmatch(case.id, "*value*width*") or "value_head_dim" in case.needs]
    assert wide
    assert programs.trace(of, wide) == 0
