"""The driver on a device: parity through preemption, two steps under way at once, and log probabilities on the side."""

import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.control import Driver, Slice, StepRunner
from paged.engine import replay
from paged.engine import runner as runner_module
from paged.engine.step import num_compiled

TIE = 1e-3


@pytest.fixture(scope="module")
def serve(make_runtime, prompts):
    """Six requests through a driver: their results in order, the driver, and (id, token) of those that were kept."""

    def run(**options):
        told = []
        runtime = make_runtime(**options)
        driver = Driver(runtime.plane, runtime.runner, max_step_tokens=16)
        ids = [driver.submit(prompt, 14) for prompt in prompts]
        while (outcome := driver.step()) is not None:
            driver.verify()
            rows = zip(outcome.batch, outcome.tokens.tolist(), runtime.runner.collected)
            told += [(who, token) for who, kept, token in rows if kept >= 0]
        assert (runtime.plane.held_pages, runtime.plane.leaked_pages()) == (0, 0)
        return [driver.take(i) for i in ids], driver, told

    return run


@pytest.fixture(scope="module")
def roomy(serve):
    return serve()


def test_the_runner_is_what_a_driver_wants(make_runtime):
    assert isinstance(make_runtime().runner, StepRunner)


def test_a_driver_gives_the_tokens_of_the_dense_path(tiny, prompts, roomy):
    results, driver, told = roomy
    assert driver.counters.preemptions == 0
    assert driver.schedule == "mixed"
    for i, (prompt, result) in enumerate(zip(prompts, results)):
        parity = replay(tiny(), [*prompt, *result.tokens], len(prompt))
        assert parity.flips(TIE) == []
        mine = [token for who, token in told if who == i]
        assert tuple(token.id for token in mine) == result.tokens
        np.testing.assert_allclose([token.logprob for token in mine], parity.logprobs, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_token(tiny, prompts, serve, roomy, depth):
    # 13 pages hold the longest request with its 13 more tokens, and little beside it. Freed pages hold NaN.
    results, driver, _ = serve(num_pages=14, depth=depth)
    assert driver.counters.preemptions == 2
    for prompt, result, whole in zip(prompts, results, roomy[0]):
        parity = replay(tiny(), [*prompt, *result.tokens], len(prompt))
        assert parity.flips(TIE) == []
        if parity.top_gap.min() > TIE:
            assert result.tokens == whole.tokens
    assert any(result.preemptions for result in results)


def test_at_depth_two_tokens_stay_on_the_device(serve, roomy, monkeypatch):
    events = []
    launch, collect = runner_module.DeviceRunner.launch, runner_module.DeviceRunner.collect

    def launched(self, packed):
        events.append(("launch", bool((packed.vector[: packed.rung.tokens] < 0).any())))
        return launch(self, packed)

    def collecting(self, ticket):
        events.append(("collect", False))
        return collect(self, ticket)

    monkeypatch.setattr(runner_module.DeviceRunner, "launch", launched)
    monkeypatch.setattr(runner_module.DeviceRunner, "collect", collecting)
    results, _, told = serve(depth=2)
    assert [r.tokens for r in results] == [r.tokens for r in roomy[0]]
    assert {who for who, _ in told} == set(range(6))
    kinds = [kind for kind, _ in events]
    assert kinds[:3] == ["launch", "launch", "collect"]
    assert sum(unknown for _, unknown in events) == 30  # steps that fed tokens the host had not seen


def test_a_token_in_flight_of_a_request_that_was_not_there_is_refused(make_runtime):
    runtime = make_runtime()
    a, b = runtime.add([1, 2, 3]), runtime.add([4, 5])
    runtime.prefill([a, b])
    runtime.decode([a])
    table = runtime.plane.prepare([Slice(b, 2, 1)], runtime.runner.scrub)
    with pytest.raises(InvalidInputError, match=r"in flight, but the latest step did not hold that request"):
        runtime.runner.pack([b], [Slice(b, 2, 1)], [[4, 5, -1]], table)


def test_steps_compile_once_for_each_rung(make_runtime, prompts):
    """Where arrays are placed is part of what jax compiles for: the first step's inputs lie where the later ones do."""
    runtime = make_runtime(num_pages=23, max_requests=2)
    before = num_compiled("cpu")
    handles = [runtime.add(p) for p in prompts[:2]]
    runtime.prefill(handles)
    assert num_compiled("cpu") == before + 3  # before the layers, a block of them, after them
    for _ in range(3):
        runtime.decode(handles)
    for handle in handles:
        runtime.release(handle)
    runtime.prefill([runtime.add(prompts[3])])
    assert num_compiled("cpu") == before + 6
