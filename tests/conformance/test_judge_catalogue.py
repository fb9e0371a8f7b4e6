"""The catalogue as data: frozen digests, clauses covered in both directions, needs, sizes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from conformance import freeze
from conformance.stream import Stream
from conformance.vectors import GENERATORS

ROOT = Path(__file__).parents[2]
FILES = sorted(freeze.DIRECTORY.glob("*.json"))
CASES = [case for file in FILES for case in json.loads(file.read_text("utf-8"))["cases"]]


def test_the_catalogue_is_frozen(capsys):
    assert freeze.main(["--check"]) == 0, capsys.readouterr().out


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


def test_every_clause_has_a_case_and_every_case_a_clause():
    text = (ROOT / "docs" / "semantics.md").read_text("utf-8")
    clauses = set(re.findall(r"^- \*\*([a-z]+\.\d+)\*\*", text, re.M))
    assert len(clauses) > 30
    named = {clause for case in CASES for clause in case["clause"]}
    assert named <= clauses, f"clauses that docs/semantics.md does not have: {sorted(named - clauses)}"
    assert clauses <= named, f"clauses without a case: {sorted(clauses - named)}"
    for case in CASES:
        assert case["clause"], case["id"]


def test_ids_are_unique_and_quick_is_a_stratified_tenth():
    ids = [case["id"] for case in CASES]
    assert len(set(ids)) == len(ids)
    quick = [case for case in CASES if case.get("quick")]
    assert 0.08 <= len(quick) / len(CASES) <= 0.18
    assert {case["tier"] for case in quick} == {0, 1, 2, 3, 4}
    assert {case["level"] for case in quick} == {"move", "core", "sharded"}
    assert {case["params"]["dtype"] for case in quick} >= {"bfloat16", "float16", "float32"}


def test_every_generator_is_used():
    assert {case["generator"] for case in CASES} == set(GENERATORS)


@pytest.mark.parametrize(
    ("param", "wanted"),
    [
        ("page", {1, 4, 16, 32, 128, 256}),
        ("head_dim", {16, 64, 80, 96, 128, 256}),
        ("dtype", {"bfloat16", "float16", "float32"}),
    ],
)
def test_geometries_asked_for_are_there(param, wanted):
    assert {case["params"][param] for case in CASES if case["level"] == "core"} >= wanted


def test_groups_asked_for_are_there():
    groups = {c["params"]["q_heads"] // c["params"]["kv_heads"] for c in CASES if "q_heads" in c["params"]}
    assert groups >= {1, 2, 3, 4, 6, 8}


def test_the_files_stay_small():
    assert sum(file.stat().st_size for file in FILES) < 200_000
