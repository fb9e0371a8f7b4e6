"""Reference and oracle, which share no code, give the same words; tools/reference_against_oracle.py counts more."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools" / "reference_against_oracle.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("reference_against_oracle", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("dtype", "family"),
    [("bfloat16", "fp8 pages"), ("float16", "window, cap, sinks"), ("float32", "not causal")],
)
def test_every_decided_element_has_the_oracles_bits(tool, dtype, family):
    count = tool.compare(tool.problem_of(tool.FAMILIES[family], dtype, seed=0))
    assert count.elements > 10_000
    assert count.wrong == 0
    assert count.undecided <= count.elements / 1000


def test_the_comparison_can_fail(tool, monkeypatch):
    problem = tool.problem_of(tool.FAMILIES["window, cap, sinks"], "float16", seed=1)
    out, lse = tool.reference_words(problem)
    out, lse = out.copy(), lse.copy()
    out[3, 2, 1] ^= 1
    lse[7, 0] += 1e-5
    monkeypatch.setattr(tool, "reference_words", lambda _: (out, lse))
    assert tool.compare(problem).wrong == 2
