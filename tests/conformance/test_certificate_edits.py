"""Edits of certificates whose digests are made anew: what `--check` refuses, what `--replay` says, what neither can."""

import copy
from pathlib import Path

import pytest
from edited_certificates import EDITS, resealed

from conformance import certificate, derived
from conformance.case import Result
from conformance.catalogue import load
from conformance.command import replayed, this_suite

ROOT = Path(__file__).parents[2]
CATALOGUE, SUITE = load(), this_suite()
DATA = certificate.read((ROOT / "certificates" / "reference-cpu.json").read_text("utf-8"))


def replay(edited, honest):
    """What a replay of every case says, if running them gives what the honest certificate has."""
    said = derived.here_and_there(edited, honest, honest["suite"])
    known = {entry["id"]: entry for entry in honest["cases"]}
    for entry in edited["cases"]:
        own = known[entry["id"]]
        fields = {name: own[name] for name in ("id", "status", "elements", "decided", "output")}
        if text := replayed(Result(**fields, details=own.get("details", {})), entry):
            said.append(text)
    return said


def test_the_certificate_is_sound_as_it_is():
    honest = resealed(DATA)
    assert certificate.check(honest, CATALOGUE, SUITE) == []
    assert replay(honest["body"], honest["body"]) == []


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_noticed_as_the_table_says(name):
    edit, notices = EDITS[name]
    honest = resealed(DATA)
    base = copy.deepcopy(DATA)
    if "was dirty" in name:
        base["body"]["suite"]["tree"] = "dirty"
        assert certificate.check(resealed(base), CATALOGUE, SUITE)
    edited = resealed(base, edit)
    problems = certificate.check(edited, CATALOGUE, SUITE)
    assert not any("was edited" in p for p in problems), "the digests are made anew"
    assert bool(problems) == (notices == "check"), problems
    if notices == "replay":
        assert replay(edited["body"], honest["body"])
    if notices == "signature" and "sources" not in str(replay(edited["body"], honest["body"])):
        assert replay(edited["body"], honest["body"]) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another numeric model is claimed", "backend.numerics is {'exact': True"),
        ("mutants 999/999", "suite.mutants is '999/999', but the suite has"),
        ("another device", "environment.device is 'NVIDIA H200' on environment.platform 'cpu'"),
        ("another version of jax", "environment.jax is '9.9.1', but backend.packages.jax gives"),
        ("a row's device", "but the row gives 'NVIDIA H200'"),
        ("the output of a movement", "but the generated case gives 'sha256:"),
        ("fewer devices than a mesh that passed", "but environment.devices is 1"),
    ],
)
def test_a_refusal_names_the_field_and_both_values(name, said):
    problems = certificate.check(resealed(DATA, EDITS[name][0]), CATALOGUE, SUITE)
    assert any(said in p for p in problems), problems


def test_the_documented_table_is_this_one():
    text = (ROOT / "docs" / "design" / "edited-certificates.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert {tuple(r) for r in rows[2:]} == {(name, notices) for name, (_, notices) in EDITS.items()}
    assert len(EDITS) >= 40


def test_two_certificates_are_named_before_their_difference():
    body = DATA["body"]
    line = certificate.identity(body)
    assert line.startswith("reference, paged ")
    assert f"on cpu (cpu, 8 devices); jax {body['environment']['jax']}" in line
