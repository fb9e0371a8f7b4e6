"""Signals wait for the end of a step, and only for that."""

import signal
import threading

import pytest

from paged.engine import OfflineEngine, SamplingParams
from paged.engine.interrupts import Deferred


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """A process that a shell started in the background ignores SIGINT, and so would its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def block(*actions):
    with Deferred():
        for action in actions:
            action()


def fail():
    raise ValueError("mine")


def test_a_signal_waits_for_the_end_of_the_block():
    steps = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        block(interrupt, lambda: steps.append("went on"))
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_waits_too_and_handlers_that_are_not_pythons_are_left_alone():
    told, steps = [], []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        block(lambda: signal.raise_signal(signal.SIGTERM), lambda: steps.append(len(told)))
        assert (steps, told) == ([0], [signal.SIGTERM])
        for other in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, other)
            block(lambda: steps.append(signal.getsignal(signal.SIGTERM)))
            assert steps.pop() == other == signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_does_not_wait():
    steps = []
    with pytest.raises(KeyboardInterrupt):
        block(interrupt, interrupt, lambda: steps.append("went on"))
    assert steps == []


def test_a_signal_is_not_lost_where_the_block_raises():
    with pytest.raises(KeyboardInterrupt) as info:
        block(interrupt, fail)
    assert isinstance(info.value.__context__, ValueError)
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        with pytest.raises(ValueError, match="mine"):
            block(lambda: signal.raise_signal(signal.SIGTERM), fail)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]


def test_other_threads_are_left_alone():
    done = []

    def other():
        with Deferred():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]


def test_ctrl_c_inside_the_bookkeeping_leaves_nothing_behind(tiny, prompts, monkeypatch):
    options = {"num_pages": 41, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
    engine = OfflineEngine(tiny(), **options)
    plane = engine.runtime.plane
    opened = plane.open

    def interrupted():
        handle = opened()
        interrupt()  # a row is taken, and nobody knows it yet
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(plane, "open", interrupted)
        with pytest.raises(KeyboardInterrupt) as info:
            engine.batch_inference(prompts[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert "0 of 1 completions are done" in info.value.__notes__[0]
    assert (plane.num_open, plane.held_pages, plane.leaked_pages()) == (0, 0, 0)
    engine.driver.verify()
    assert len(engine.batch_inference(prompts[:1], SamplingParams(max_tokens=3, ignore_eos=True))) == 1


def test_ctrl_c_inside_submit_or_step_leaves_whole_bookkeeping(tiny, prompts, monkeypatch):
    engine = OfflineEngine(tiny(), num_pages=41, tokens_per_page=4, max_requests=4, max_step_tokens=16)
    plane, driver = engine.runtime.plane, engine.driver

    def after(act):
        def acting(*args, **options):
            out = act(*args, **options)
            interrupt()
            return out

        return acting

    with monkeypatch.context() as patch:
        patch.setattr(driver, "submit_samples", after(driver.submit_samples))
        with pytest.raises(KeyboardInterrupt):
            engine.submit(prompts[0], SamplingParams(max_tokens=3, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(plane, "open", after(plane.open))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    driver.verify()
    while not engine.idle:
        engine.step()
    assert len(engine.take(0)[0].token_ids) == 3
    assert (plane.num_open, plane.held_pages) == (0, 0)


def test_ctrl_c_in_a_step_or_among_its_pieces_loses_none_of_them(tiny, prompts, monkeypatch):
    """What the interruption counts as generated was handed out before."""
    engine = OfflineEngine(tiny(), num_pages=41, tokens_per_page=4, max_requests=4, max_step_tokens=16)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    collect, pieces = engine.runtime.runner.collect, []

    def stopping(ticket):
        if len(pieces) >= 3:
            interrupt()
        return collect(ticket)

    def among(delta):
        pieces.append(delta)
        if len(pieces) == 3:
            interrupt()

    def run(on_delta, *counts):
        pieces.clear()
        with pytest.raises(KeyboardInterrupt):
            engine.batch_inference(prompts[:3], params, on_delta=on_delta)
        assert engine.interruption is not None
        got = {i: tuple(d.token.id for d in pieces if d.request == i) for i in range(3)}
        assert got == {o.request: o.token_ids for o in engine.interruption.outputs}
        assert tuple(map(len, got.values())) == counts

    run(among, 1, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime.runner, "collect", stopping)
        run(pieces.append, 2, 2, 2)
