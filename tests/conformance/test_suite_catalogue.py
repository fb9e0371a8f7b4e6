"""The catalogue's loader: what is refused, by name; levels, retractions, the digest; the shipped catalogue itself."""

import copy
import json
from pathlib import Path

import pytest

from conformance import catalogue, needs
from conformance.catalogue import case_to_json, load, parse_case
from conformance.mutants import MUTANTS
from paged.common import Capabilities, Range
from paged.common.errors import InvalidInputError

TINY = Path(__file__).parent / "tiny"
CASE = json.loads((TINY / "tiny.json").read_text())["cases"][1]


def write(folder, *cases, name="a.json", retracted=None):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"schema": 1, "cases": list(cases)}))
    if retracted is not None:
        (folder / "retracted.toml").write_text(retracted)
    return folder


def changed(**changes):
    return {**copy.deepcopy(CASE), **changes}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ([], "expected an object"),
        (changed(colour="red"), "unknown field 'colour'"),
        ({k: v for k, v in CASE.items() if k != "clause"}, "field 'clause' is missing"),
        (changed(id="../up"), "id '../up'"),
        (changed(id="a//b"), "id 'a//b'"),
        (changed(id="a b"), "id 'a b'"),
        (changed(tier=5), "tier must be an int in 0..4"),
        (changed(tier=True), "tier must be an int"),
        (changed(level="deep"), "level must be one of"),
        (changed(quick=1), "quick must be true or false"),
        (changed(generator="os.system"), "generator must be one of"),
        (changed(generator=["address"]), "generator must be one of"),
        (changed(params=[]), "params must be an object"),
        (changed(params={"a": float("inf")}), "is not finite"),
        (changed(params={"a": 2**40}), "outside"),
        (changed(params={"a": [[[[[1]]]]]}), "nested deeper"),
        (changed(params={"a": [0] * 5000}), "more than 4096 items"),
        (changed(params={"a": "x" * 2000}), "2000 characters"),
        (changed(clause=[]), "clause is empty"),
        (changed(clause=["attend"]), "clause 'attend'"),
        (changed(needs=["a", "a"]), "twice"),
        (changed(needs=["a; b"]), "needs 'a; b'"),
        (changed(flags={"x": 3}), "flags must map"),
        (changed(expected="sha256:zz"), "expected 'sha256:zz'"),
        (changed(kills="all"), "kills must be a list"),
    ],
)
def test_a_case_that_does_not_fit_is_refused_by_name(entry, said):
    with pytest.raises(InvalidInputError, match="here") as info:
        parse_case(entry, "here")
    assert said in str(info.value)


def test_a_case_survives_json():
    case = parse_case(CASE, "here")
    assert parse_case(json.loads(json.dumps(case_to_json(case))), "again") == case
    assert "kills" not in case_to_json(case)


def test_files_are_refused_by_name(tmp_path):
    with pytest.raises(InvalidInputError, match="no catalogue in"):
        load(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"a\.json is not JSON"):
        load(tmp_path)
    (tmp_path / "a.json").write_text('{"schema": 2, "cases": []}')
    with pytest.raises(InvalidInputError, match="schema"):
        load(tmp_path)
    write(tmp_path, CASE)
    write(tmp_path, CASE, name="b.json")
    with pytest.raises(InvalidInputError, match=r"'attend/address' is in a\.json and again in b\.json"):
        load(tmp_path)


def test_retractions_leave_a_case_out_and_move_the_digest(tmp_path):
    other = changed(id="other")
    before = load(write(tmp_path / "a", CASE, other))
    text = '[[retracted]]\nid = "other"\nreason = "wrong"\nissue = "12"\nreplacement = "attend/address"\n'
    after = load(write(tmp_path / "b", CASE, other, retracted=text))
    assert [c.id for c in before.select()] == ["attend/address", "other"]
    assert [c.id for c in after.select()] == ["attend/address"]
    assert after.case("other").id == "other"
    assert before.digest != after.digest
    for bad, said in [
        (text.replace('id = "other"', 'id = "nobody"'), "'nobody' is not a case"),
        (text.replace('reason = "wrong"\n', ""), "reason"),
        (text.replace("wrong", ""), "non-empty"),
        ("[other]\n", "unknown key 'other'"),
        ("=", "retracted.toml"),
    ]:
        with pytest.raises(InvalidInputError, match=said):
            load(write(tmp_path / "c", CASE, other, retracted=bad))


def test_a_level_contains_those_before_it():
    tiny = load(TINY)
    assert [c.id for c in tiny.select("move")] == ["move/append"]
    assert len(tiny.select("core")) == len(tiny.select("all")) == 5
    assert [c.id for c in tiny.select("all", quick=True)] == ["move/append"]
    with pytest.raises(InvalidInputError, match="level must be one of"):
        tiny.select("deep")
    with pytest.raises(InvalidInputError, match="Near: attend/pair"):
        tiny.case("attend/pairs")


def test_the_digest_covers_every_field_of_every_case():
    tiny = load(TINY)
    assert tiny.digest == load(TINY).digest
    for index, case in enumerate(tiny.cases):
        entry = case_to_json(case) | {"flags": {"new": "flag"}}
        moved = list(tiny.cases)
        moved[index] = parse_case(entry, "here")
        assert catalogue.Catalogue(version="v1", cases=tuple(moved)).digest != tiny.digest


DECLARED = Capabilities(
    dtypes=frozenset({"bfloat16"}), kv_dtypes=frozenset({"bfloat16"}), page_sizes=Range(1, 16, powers_of_two=True),
    head_dims=frozenset({64}), group_sizes=Range(1, 4), features=frozenset({"window", "decode"}), numerics="N0",
    max_page_id=1000, poison="finite",
)  # fmt: skip


@pytest.mark.parametrize(
    ("need", "declared"),
    [
        ("window", True), ("sinks", False), ("dtype:bfloat16", True), ("dtype:float16", False),
        ("page:16", True), ("page:12", False), ("page:32", False), ("head_dim:64", True), ("head_dim:80", False),
        ("group:4", True), ("group:5", False), ("promise:deterministic", True), ("promise:batch_invariant", False),
        ("regime:partition", True), ("regime:replicate", False), ("max_page_id:1000", True), ("pool_bytes:10", True),
        ("max_page_id:1001", False), ("pool_layout:stacked", True), ("pool_storage:words", False),
        ("poison:any_bits", False), ("kv_dtype:int8", False),
        ("poison:finite", True),
    ],
)  # fmt: skip
def test_needs_are_compared_with_the_declaration(need, declared):
    assert (needs.unmet([need], DECLARED) == []) is declared


@pytest.mark.parametrize("need", ["windows", "dtypes:x", "promise:speed", "regime:any", "page:many", ":", "page:"])
def test_a_need_that_nobody_can_have_is_refused(need):
    with pytest.raises(InvalidInputError, match="need"):
        needs.unmet([need], DECLARED)


def test_the_shipped_catalogue_names_real_needs_mutants_and_has_a_quick_tenth():
    shipped = load()
    named = set()
    for case in shipped.cases:
        needs.unmet(case.needs, DECLARED)
        named |= set(case.kills)
    assert named == set(MUTANTS)
    for level in ("core", "sharded"):
        every, quick = len(shipped.select(level)), len(shipped.select(level, quick=True))
        assert every / 20 < quick < every / 4
    assert {1, 2, 3, 4} <= {c.tier for c in shipped.select("core", quick=True)}


def test_cases_that_share_programs_are_neighbours():
    order = catalogue.by_program(load(TINY).cases)
    shapes = [json.dumps([c.params.get("query_lens"), c.params.get("head_dim")]) for c in order]
    assert len(order) == 5
    assert shapes.index(shapes[0]) == 0
    assert sorted(c.id for c in order) == sorted(c.id for c in load(TINY).cases)
