"""Traces in this process: every kind of declaration passes, and what is kept, copied or scrubbed wrongly is named."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from toy_backend import Toy

from conformance.case import Case
from conformance.catalogue import load
from conformance.runner import Session
from paged.backends import moves
from paged.common import Capabilities

CATALOGUE = load()
SCRIPT = ["a+20", "a+1 b+5", "c~a c+2 b+1 a+1", "-a b+1 c+1", "d=c:16 d+7 b+1", "!b d+1", "b+8 d+1"]


def case(name: str = "serving/fork/bf16", **params) -> Case:
    """A trace of one small shape, so that a backend compiles it once."""
    found = CATALOGUE.case(name)
    rung = {"rows": 4, "tokens": 20, "listed_pages": 9, "max_query_len": 20, "max_kv_len": 32}
    small = {"head_dim": 32, "kv_heads": 2, "q_heads": 4, "num_pages": 10, "rung": rung, "script": SCRIPT}
    return dataclasses.replace(found, params={**found.params, **small, **params})


@dataclasses.dataclass(frozen=True)
class Kept(Toy):
    """Toy attention with one thing changed by `change`."""

    change: str = ""

    @property
    def capabilities(self) -> Capabilities:
        declared = super().capabilities
        changes = {
            "finite": {"poison": "finite"},
            "typed": {"pool_storage": "typed"},
            "per-layer": {"pool_layout": "per_layer"},
            "no-lse": {"features": declared.features - {"lse"}},
        }
        return dataclasses.replace(declared, **changes.get(self.change, {}))

    def attend(self, query, pool, page_base, static, arrays, spec, extras):
        if self.change == "layer":
            page_base = jnp.int32(0)
        if self.change == "sharing":  # of a page that several rows list, only the first reads anything
            ids = arrays.page_ids
            at = jnp.arange(ids.shape[0])
            again = ((ids[None] == ids[:, None]) & (at[None] < at[:, None])).any(1)
            arrays = dataclasses.replace(arrays, page_ids=jnp.where(again, 0, ids))
        out, lse = super().attend(query, pool, page_base, static, arrays, spec, extras)
        if self.change == "rows":  # a bit that depends on how many rows are live
            live = (arrays.kv_lens > 0).sum() % 2 == 0
            out = jnp.where(live, out, jnp.nextafter(out, jnp.full_like(out, np.inf)))
        return out, None if self.change == "no-lse" else lse

    def scrub(self, pool, pages):
        return pool if self.change == "scrub" else moves.scrub(pool, pages)

    def copy_pages(self, pool, source, target):
        return moves.copy_pages(pool, source, source if self.change == "copy" else target)


def run(what: Case, change: str = ""):
    return Session(Kept(change=change)).run(what)


@pytest.mark.parametrize("change", ["", "finite", "typed", "per-layer", "no-lse"])
def test_every_kind_of_declaration_passes(change):
    for reuse in ("stale", "poison", "scrub")[: None if not change else 1 if change == "no-lse" else 2]:
        result = run(case(reuse=reuse), change)
        assert result.status == "pass", result.diagnosis
        assert result.elements == result.decided == 7 * 2 * 20 * 4 * 32


@pytest.mark.parametrize(
    ("change", "clause", "said"),
    [
        ("layer", "pages.4", "step 1 of 7 (a+20), layer 1:"),
        ("scrub", "pages.1", "before step 1 of 7 (a+20): scrub:"),
        ("copy", "pages.2", "before step 3 of 7 (c~a c+2 b+1 a+1): copy_pages:"),
        ("sharing", "steps.2", "step 3 of 7"),
    ],
)
def test_a_fault_is_told_at_the_step_where_it_shows(change, clause, said):
    result = run(case(), change)
    assert (result.status, result.clause) == ("fail", clause), result.diagnosis
    assert said in result.diagnosis


def test_relations_compare_whole_traces_and_bite():
    other = {"script": ["a+13", "a+7 b+3", "b+2 a+1", "c~a c+2 a+1", "b+1 c+1", "-a d=c:16 d+8", "b+2"]}
    repeat = case("self/trace/repeat/bf16", dtype="bfloat16", relation="repeat", layers=2)
    schedule = case("self/trace/schedule/bf16/exact", relation_args=other)
    for what in (repeat, schedule):
        result = run(what)
        assert result.status == "pass", result.diagnosis
        assert result.decided == result.elements > 0
    assert run(repeat, "rows").status == "pass"  # an error that both sides share
    moved = run(schedule, "rows")
    assert (moved.status, moved.clause) == ("fail", "steps.3")
    assert "bits moved when the requests were scheduled otherwise" in moved.diagnosis


def test_what_a_relation_of_traces_cannot_be_is_an_error():
    for params, said in [
        ({"relation": "warm"}, "must be repeat or schedule"),
        ({"relation": "schedule"}, "relation_args must be an object with script"),
        ({"relation": "schedule", "relation_args": {"script": ["p+3"]}}, "no token in common"),
    ]:
        result = run(case(**params))
        assert result.status == "error"
        assert said in result.diagnosis
