"""The catalogue as data: frozen digests, clauses covered in both directions, needs, sizes."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from conformance import coverage, freeze
from conformance.catalogue import load
from conformance.stream import Stream
from conformance.vectors import GENERATORS

ROOT = Path(__file__).parents[2]
FILES = sorted(freeze.DIRECTORY.glob("*.json"))
CASES = [case for file in FILES for case in json.loads(file.read_text("utf-8"))["cases"]]


LONG_SAMPLE = ("long/census/bf16/32k-window-4096/phase-255", "long/address/bf16/32k-window-4096")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_catalogue_is_frozen(file, tmp_path, capsys):
    """All of it but the long contexts, of which two are made anew here: they take as long as everything else."""
    shutil.copy(file, tmp_path)
    named = [x for case in LONG_SAMPLE for x in ("--case", case)] if file.stem == "contexts" else []
    assert freeze.main(["--check", "--directory", str(tmp_path), *named]) == 0, capsys.readouterr().out


def test_a_changed_generator_turns_the_check_red(monkeypatch, tmp_path, capsys):
    shutil.copy(freeze.DIRECTORY / "move.json", tmp_path)
    case = "append/bf16/bits"
    arguments = ["--check", "--directory", str(tmp_path), "--case", case]
    assert freeze.main(arguments) == 0
    drawn = Stream.words
    monkeypatch.setattr(Stream, "words", lambda self, shape: drawn(self, shape) ^ np.uint64(1))
    assert freeze.main(arguments) == 1
    assert f"differs: move.json: {case}: inputs" in capsys.readouterr().out


def test_a_changed_bound_turns_the_check_red(monkeypatch, tmp_path, capsys):
    shutil.copy(freeze.DIRECTORY / "certified.json", tmp_path)
    case = "attend/generic/bf16/mixed"
    monkeypatch.setattr("conformance.bounds.MIN_SPLITS", 1000)
    assert freeze.main(["--check", "--directory", str(tmp_path), "--case", case]) == 1
    assert capsys.readouterr().out.split() == ["differs:", "certified.json:", case + ":", "expected"]


def test_a_hand_edit_of_needs_or_form_turns_the_check_red(tmp_path, capsys):
    data = json.loads((freeze.DIRECTORY / "relations.json").read_text("utf-8"))
    data["cases"] = data["cases"][:1]
    needs = data["cases"][0]["needs"]
    assert needs
    data["cases"][0]["needs"] = [*needs, "window"]
    (tmp_path / "relations.json").write_text(freeze.render(data), "utf-8")
    assert freeze.main(["--check", "--directory", str(tmp_path)]) == 1
    assert ": needs" in capsys.readouterr().out
    data["cases"][0]["needs"] = needs
    (tmp_path / "relations.json").write_text(json.dumps(data), "utf-8")
    assert freeze.main(["--check", "--directory", str(tmp_path)]) == 1
    assert freeze.main(["--directory", str(tmp_path)]) == 0
    assert freeze.main(["--check", "--directory", str(tmp_path)]) == 0


CATALOGUE = load()
SEMANTICS = (ROOT / "docs" / "semantics.md").read_text("utf-8")


def test_a_catalogue_is_remembered_once_and_stays_readable_when_it_grows(tmp_path):
    data = json.loads((freeze.DIRECTORY / "move.json").read_text("utf-8"))
    grown, data["cases"] = data["cases"], data["cases"][:2]
    (tmp_path / "move.json").write_text(freeze.render(data), "utf-8")
    before = load(tmp_path)
    for _ in range(2):
        assert freeze.main(["--remember", "--directory", str(tmp_path)]) == 0
    (tmp_path / "move.json").write_text(freeze.render({"schema": 1, "cases": grown}), "utf-8")
    after = load(tmp_path)
    assert len(after.earlier) == 1
    assert after.digest != before.digest
    then = after.at(before.digest)
    assert then is not None
    assert [c.id for c in then.cases] == [c.id for c in before.cases]
    assert len(after.cases) > len(then.cases)


def test_every_clause_has_a_case_and_every_case_a_clause():
    clauses = coverage.clauses_of(SEMANTICS)
    assert len(clauses) > 35
    assert coverage.unmatched(clauses, CATALOGUE.cases) == ([], [])
    for case in CASES:
        assert case["clause"], case["id"]


def test_a_clause_without_a_case_and_a_case_without_a_clause_are_seen():
    more = SEMANTICS.replace("- **refuse.1**", "- **refuse.2** Nothing.\n- **refuse.1**")
    assert coverage.unmatched(coverage.clauses_of(more), CATALOGUE.cases) == (["refuse.2"], [])
    less = SEMANTICS.replace("- **steps.2** ", "")
    orphans = coverage.unmatched(coverage.clauses_of(less), CATALOGUE.cases)[1]
    assert "serving/prefix/bf16: steps.2" in orphans
    only = [case for case in CATALOGUE.cases if "attend.13" not in case.clause]
    assert coverage.unmatched(coverage.clauses_of(SEMANTICS), only) == (["attend.13"], [])


def test_whatever_is_asked_for_is_there():
    assert coverage.missing(CATALOGUE.cases) == {}


@pytest.mark.parametrize(
    ("drop", "kind", "value"),
    [
        (lambda c: c.params.get("page") == 2, "page", 2),
        (lambda c: c.params.get("share") or c.generator == "trace", "option", "shared_pages"),
        (lambda c: c.level == "long", "length", "32k"),
        (lambda c: "value_head_dim" in c.needs, "option", "value_head_dim"),
        (lambda c: len(c.params.get("kv_axes") or ()) > 1, "mesh", "2 head axes"),
    ],
)
def test_what_is_missing_is_seen(drop, kind, value):
    assert value in coverage.missing(c for c in CATALOGUE.cases if not drop(c))[kind]


def test_no_case_is_idle_and_one_that_is_would_be_seen():
    assert coverage.idle(CATALOGUE.cases) == []
    twin = dataclasses.replace(CATALOGUE.case("attend/address/bf16/prefill"), id="attend/address/bf16/again", kills=())
    (said,) = coverage.idle([*CATALOGUE.cases, twin])
    assert "attend/address/bf16/prefill" in said
    assert twin.id in said
    bare = dataclasses.replace(twin, clause=(), params={**twin.params, "window": 7})
    assert coverage.idle([*CATALOGUE.cases, bare]) == [f"{bare.id} kills nothing and covers no clause"]


def test_ids_are_unique_and_quick_is_a_stratified_tenth():
    ids = [case["id"] for case in CASES]
    assert len(set(ids)) == len(ids)
    quick = [case for case in CASES if case.get("quick")]
    assert 0.08 <= len(quick) / len(CASES) <= 0.18
    assert {case["tier"] for case in quick} == {0, 1, 2, 3, 4}
    assert {case["level"] for case in quick} == {"move", "core", "sharded", "serving"}
    assert {case["params"]["dtype"] for case in quick} >= {"bfloat16", "float16", "float32"}


def test_every_generator_is_used():
    assert {case["generator"] for case in CASES} == set(GENERATORS)


def test_the_files_stay_small():
    """A case names a generator's call and holds no arrays, so its size does not follow from its problem's."""
    assert sum(file.stat().st_size for file in FILES) < 850 * len(CASES)
    assert max(len(json.dumps(case)) for case in CASES) < 1500
