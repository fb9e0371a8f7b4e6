"""The recorded kill matrix: of this catalogue and these sources, complete, and what docs and certificates say of it."""

import json

import pytest

from conformance import killmatrix
from conformance.case import Result
from conformance.catalogue import load, questions
from conformance.mutants import MUTANTS

CATALOGUE = load()
FOUND = json.loads(killmatrix.RECORD.read_text("utf-8"))


def test_the_record_is_of_this_catalogue_and_these_sources():
    """If this fails: `paged certify reference --mutants -o conformance/catalogue/v1/record/mutants.json`."""
    assert killmatrix.recorded(CATALOGUE) == FOUND


def test_every_mutant_was_caught_by_every_case_that_lists_it():
    assert FOUND["caught"] == FOUND["mutants"] == len(MUTANTS)
    assert list(FOUND["matrix"]) == list(MUTANTS)
    for name, entry in FOUND["matrix"].items():
        assert entry["clause"] == MUTANTS[name].clause
        assert set(entry["by"]) == {c.id for c in CATALOGUE.cases if name in c.kills}
        assert entry["by"] == {i: killmatrix.kind(CATALOGUE.case(i)) for i in entry["by"]}


def test_the_page_is_that_of_the_record():
    """If this fails: `python -m conformance.killmatrix`."""
    assert killmatrix.PAGE.read_text("utf-8") == killmatrix.markdown(FOUND)


@pytest.mark.parametrize("what", ["listed", "sources"])
def test_an_old_record_says_nothing(tmp_path, what):
    path = tmp_path / "mutants.json"
    path.write_text(json.dumps({**FOUND, what: "sha256:" + "0" * 64}))
    assert killmatrix.recorded(CATALOGUE, path) is None
    path.write_text("{")
    assert killmatrix.recorded(CATALOGUE, path) is None


def test_a_mutant_that_got_away_is_no_catch_in_the_record():
    case = next(c for c in CATALOGUE.cases if "no_window" in c.kills)
    for status, clause, caught in [("fail", "attend.4", 1), ("fail", "attend.3", 0), ("pass", None, 0)]:
        runs = [("no_window", case, Result(id=case.id, status=status, clause=clause))]
        made = killmatrix.record(CATALOGUE, runs, {"no_window": [] if caught else ["survived"]})
        assert len(made["matrix"]["no_window"]["by"]) == made["caught"] == caught
        assert "no_window" in killmatrix.text(made)


def test_earlier_catalogues_are_parts_of_this_one_and_ask_what_they_asked():
    assert CATALOGUE.earlier
    for one in CATALOGUE.earlier:
        then = CATALOGUE.at(one.digest)
        assert then is not None
        assert [c.id for c in then.cases] == sorted(one.ids)
        assert questions(then.cases) == one.questions
    assert CATALOGUE.at(CATALOGUE.digest) is CATALOGUE
    assert CATALOGUE.at("sha256:" + "0" * 64) is None
