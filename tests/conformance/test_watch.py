"""Backends that change their surroundings, raise what is no error, or change their mind, in this process."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
from toy_backend import Toy

from conformance import judge, runner
from conformance.catalogue import parse_case
from conformance.plain import indented, plain
from conformance.runner import Session, describe_error
from conformance.watch import Watch, signals_of_interrupt

CASE = parse_case(
    {
        "id": "attend/x", "tier": 3, "level": "core", "generator": "generic", "clause": ["attend.1"],
        "params": {
            "dtype": "bfloat16", "page": 4, "num_pages": 8, "kv_heads": 2, "q_heads": 4, "head_dim": 32, "scale": 0.5,
            "query_lens": [2, 1], "kv_lens": [7, 9],
        },
    },
    "test",
)  # fmt: skip


class Stop(Exception):
    """Ends a trace before anything is compiled."""

    def __str__(self):
        raise ValueError("no text")


@dataclasses.dataclass(frozen=True)
class Meddler(Toy):
    """Does something while it plans, and stops there."""

    deed: object = None

    @property
    def capabilities(self):
        declared = super().capabilities
        return dataclasses.replace(declared, numerics="N2") if FICKLE else declared

    def static_plan(self, rung, spec):
        self.deed()  # type: ignore[operator]
        raise Stop


FICKLE: set[str] = set()


def after(deed):
    result = Session(Meddler(deed=deed)).run(CASE)
    assert result.status == "error"
    return result.diagnosis


def fails(error):
    def deed():
        raise error

    return deed


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), pytest.skip.Exception("never mind"), Stop()]
)
def test_whatever_is_raised_is_an_error_of_the_case(error):
    assert type(error).__name__ in after(fails(error))


def test_an_interruption_from_outside_gets_through():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Session(Meddler(deed=lambda: signal.raise_signal(signal.SIGINT))).run(CASE)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    with signals_of_interrupt() as came:
        assert came == []


@pytest.mark.parametrize(
    ("option", "value"), [("jax_enable_x64", True), ("jax_debug_nans", True), ("jax_default_matmul_precision", "high")]
)
def test_an_option_of_jax_that_is_changed_is_told_and_put_back(option, value):
    before = jax.config.values[option]
    assert f"it set jax's option {option} to {value!r}" in after(lambda: jax.config.update(option, value))
    assert jax.config.values[option] == before


def _lenient(problem, expected, output, lse, *, id=""):
    return None


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (judge, "judge_attend", "in the place of conformance.judge.judge_attend"),
        (runner, "judge_attend", "in the place of conformance.runner.judge_attend"),
        (Session, "_judge", "in the place of conformance.runner.Session._judge"),
        (np, "where", "in the place of numpy.where"),
        (judge.judge_attend, "__code__", "it changed the code of conformance.judge.judge_attend"),
        (judge.judge_attend, "__kwdefaults__", "it changed the code of conformance.judge.judge_attend"),
    ],
)
def test_a_judge_that_is_changed_is_told_and_put_back(owner, name, said):
    before = getattr(owner, name)
    other = {"__code__": _lenient.__code__, "__kwdefaults__": {"id": "x"}}.get(name, _lenient)
    try:
        text = after(lambda: setattr(owner, name, other))
        assert "the backend changed what is not its own: " in text
        assert said in text
        assert getattr(owner, name) is before
    finally:
        setattr(owner, name, before)


def test_what_is_changed_before_the_session_is_seen_by_a_watch_that_is_older(monkeypatch):
    watch = Watch()
    assert watch.restore() == []
    monkeypatch.setattr(judge, "judge_attend", _lenient)
    assert "judge_attend" in Session(Meddler(deed=lambda: None), watch).run(CASE).diagnosis
    assert watch.restore() == []


def test_a_declaration_that_changes_is_an_error(monkeypatch):
    session = Session(Meddler())
    monkeypatch.setattr(session, "_run", lambda case: FICKLE.add("from now on"))
    try:
        said = session.run(CASE).diagnosis
    finally:
        FICKLE.clear()
    assert "declares something else than when it was made: numerics" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"static_plan": lambda *a: []}, "static_plan of backend 'toy' returned a list that cannot be hashed"),
        ({"attend": lambda *a: None}, "attend returned a NoneType, expected the pair (output, LSE)"),
        ({"attend": lambda *a: (1, 2, 3)}, "attend returned 3 values"),
        ({"attend": lambda q, *a: q}, "attend returned one array"),
        ({"attend": lambda *a: ("out", None)}, "attend returned a str as its output"),
        ({"append": lambda *a: None}, "append returned a NoneType, expected the pool"),
        (
            {"append": lambda p, *a: jax.tree.map(lambda x: x[:1], p)},
            "append returned keys uint16(1, 4, 2, 32), it was given uint16(8, 4, 2, 32)",
        ),
    ],
)
def test_a_result_of_the_wrong_form_is_named(changes, said):
    wrong = type("Wrong", (Toy,), {n: staticmethod(f) for n, f in changes.items()})
    result = Session(wrong()).run(CASE)
    assert result.status == "error"
    assert said in result.diagnosis


def test_text_of_a_backend_moves_no_cursor_and_poses_as_no_line():
    hostile = "a\x1b[2J\rb\n\x00\ud800\u202e\u2028ok\t\x9b∞"
    assert plain(hostile) == "a\\x1b[2J\\rb\n\\x00\\ud800\\u202e\\u2028ok\t\\x9b∞"
    assert indented("a\nacme: conformant") == "a\n      acme: conformant"
    assert "\x1b" not in after(fails(RuntimeError(hostile)))
    assert describe_error(Stop()) == "Stop, whose text cannot be made"
