"""`paged bench`: the names it knows, and what it says where there are no benchmarks."""

import importlib.util

import pytest

from benchmarks import harness
from paged.cli import main


def test_lists_every_benchmark_and_each_can_be_loaded(capsys):
    assert main(["bench"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(harness.NAMES)
    for name in harness.NAMES:
        module = harness.load(name)
        assert callable(module.run)
        assert module.__doc__


def test_an_unknown_name_is_refused_with_those_there_are(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "no benchmark is named 'nothing'; there are " in capsys.readouterr().err


def test_without_a_checkout_it_says_where_they_are(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench"]) == 2
    assert "not part of the installed package" in capsys.readouterr().err


@pytest.mark.parametrize(("passes", "begins"), [(1, ["a", "b"]), (3, ["a", "b", "b", "a", "a", "b"])])
def test_arms_take_turns_and_begin_in_turn(passes, begins):
    order = []
    found = harness.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, passes)
    assert order == begins
    assert {name: len(values) for name, values in found.items()} == {"a": passes, "b": passes}
