"""A driver over a real model gives the tokens of the step-level entry points: preempted, chunked, ahead, or warm."""

import pytest

from paged.common import CacheNamespace
from paged.control import ControlPlane, Driver, PrefixIndex
from paged.engine import replay

TIE = 1e-3
COUNT = 14  # generated tokens of each request


@pytest.fixture(scope="module")
def runtime(make_runtime):
    """13 pages of 4 tokens: the longest prompt with its generated tokens, and next to nothing beside it."""
    return make_runtime(num_pages=14)


@pytest.fixture(scope="module")
def alone(tiny, runtime, prompts, run_greedy):
    """Tokens of each prompt by `prefill` and `decode`, one request after the other."""
    out = []
    for prompt in prompts:
        handle = runtime.add(prompt)
        out.append(tuple(run_greedy(runtime, handle, COUNT)))
        runtime.release(handle)
        # Where the likeliest tokens are this far apart, another order of summation cannot change the choice.
        assert replay(tiny(), [*prompt, *out[-1]], len(prompt)).top_gap.min() > TIE
    return out


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("schedule", ["mixed", "prefill_first"])
def test_scenario_h7_preempted_requests_end_with_the_tokens_of_a_request_alone(
    runtime, prompts, alone, schedule, depth
):
    runtime.runner.depth = depth
    driver = Driver(
        runtime.plane, runtime.runner, max_step_tokens=16, schedule=schedule, max_request_tokens=runtime.max_tokens
    )
    keys = [driver.submit(prompt, COUNT) for prompt in prompts]
    while driver.step() is not None:
        driver.verify()
    assert driver.counters.preemptions == 2
    assert [driver.take(key).tokens for key in keys] == alone
    assert runtime.plane.held_pages == runtime.plane.leaked_pages() == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_warm_and_preempted_requests_end_with_the_tokens_of_a_cold_one(runtime, prompts, alone, depth):
    runtime.runner.depth = depth
    plane = ControlPlane(
        runtime.layout,
        max_requests=4,
        shapes=runtime.plane.shapes,
        prefixes=PrefixIndex(runtime.layout),
        poison_freed=runtime.runner.poison,
    )
    space = CacheNamespace(weights="tiny", revision=0, tokenizer="none", kv_dtype="float32")
    driver = Driver(plane, runtime.runner, max_step_tokens=16, max_request_tokens=runtime.max_tokens)
    for order in (range(6), range(5, -1, -1)):  # the last of the first round is the first of the second
        keys = [driver.submit(prompts[i], COUNT, namespace=space) for i in order]
        while driver.step() is not None:
            driver.verify()
        assert [driver.take(key).tokens for key in keys] == [alone[i] for i in order]
    assert driver.counters.prefix_tokens == 48
    assert driver.counters.preemptions == 4
    assert plane.held_pages == plane.retained_pages() > 0
    plane.forget_prefixes()
    assert plane.held_pages == 0
