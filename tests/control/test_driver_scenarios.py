"""Faults of schedulers in the field. Each test is one report reduced to a few numbers."""

import pytest
from driver_helpers import expected, make_driver, run

from paged.common import PoolExhaustedError, StaleHandleError


def slices_of(runner, key):
    return [(start, count) for step in runner.steps for i, start, count in step if i == key]


def test_scenario_h1_abort_after_finish_in_the_same_step():
    driver, _ = make_driver(depth=2)
    prompt = [1, 2, 3, 4, 5]
    key = driver.submit(prompt, 8, eos=expected(prompt, 1)[0])
    outcome = driver.step()
    assert outcome is not None
    assert outcome.finished == (key,)
    assert driver.num_in_flight == 1  # its next step, dispatched before its end was known
    assert driver.abort(key) is False
    assert run(driver)[key].reason == "stop"
    assert driver.abort(key) is False
    assert driver.counters.aborted == 0


def test_scenario_h1_one_path_releases():
    driver, _ = make_driver()
    key = driver.submit([1, 2, 3], 8)
    driver.step()
    handle = driver._requests[key].handle
    assert handle is not None
    assert driver.abort(key) is True
    with pytest.raises(StaleHandleError, match=r"row 0, epoch 0 is stale: .* The pages it let go of: \[1\]\."):
        driver.plane.release(handle)
    assert driver.abort(key) is False


def test_scenario_h4_a_page_named_by_a_step_under_way_has_no_second_owner():
    driver, runner = make_driver(num_pages=3, depth=2)  # two pages
    prompt = [1, 2, 3, 4, 5]
    first = driver.submit(prompt, 4, eos=expected(prompt, 1)[0])
    driver.step()
    assert driver.finished[first].tokens == expected(prompt, 1)[0]
    assert (driver.num_in_flight, driver.plane.pending_pages, driver.plane.available_pages) == (1, 2, 0)
    second = driver.submit([6] * 5, 4)
    outcome = driver.step()  # the step under way retires before the second is admitted
    assert outcome is not None
    assert (outcome.batch, outcome.tokens.tolist()) == ((first,), [-1])
    assert slices_of(runner, second) == []
    assert run(driver)[second].tokens == expected([6] * 5, 4)[0]


def test_scenario_h6_a_request_larger_than_the_pool_is_refused_at_submit():
    driver, _ = make_driver(num_pages=11)
    waits = driver.submit([1] * 30, 11)  # 40 tokens to cache: all ten pages
    with pytest.raises(
        PoolExhaustedError,
        match=r"a prompt of 41 tokens and 1 to generate, .* are 41 tokens to cache, 11 pages of 4\. A request can have "
        r"40 here: the pool has 10 pages \(11 less the sentinel\), .* Ask for 1 tokens less, or build a larger pool",
    ):
        driver.submit([1] * 41, 1)
    with pytest.raises(PoolExhaustedError, match="30 tokens and 12 to generate"):
        driver.submit([1] * 30, 12)
    assert run(driver)[waits].tokens == expected([1] * 30, 11)[0]


def test_scenario_h7_preemption_replays_prompt_and_generated_tokens():
    driver, runner = make_driver(num_pages=8, max_requests=2)  # seven pages for two requests of five
    prompts = [[1] * 6, [2] * 6]
    keys = [driver.submit(p, 14) for p in prompts]
    results = run(driver, limit=60)
    for key, prompt in zip(keys, prompts):
        assert results[key].tokens == expected(prompt, 14)[0]
    assert [results[key].preemptions for key in keys] == [0, 1]
    again = slices_of(runner, keys[1])
    restart = [i for i, (start, _) in enumerate(again) if start == 0]
    generated = restart[1]  # one token each from the prompt's step on
    assert again[restart[1]] == (0, 6 + generated)
    assert driver.counters.recomputed_tokens == 6 + generated - 1


@pytest.mark.parametrize("ends", [False, True])
def test_scenario_h9_with_a_fence_open_nobody_is_preempted_beyond_need(ends):
    driver, _ = make_driver(num_pages=6, tokens_per_page=2, depth=2)
    prompts = [[1, 2, 3], [4, 5, 6]]
    eos = expected(prompts[0], 2)[0][1:] if ends else ()
    keys = [driver.submit(p, 6, eos=eos if i == 0 else ()) for i, p in enumerate(prompts)]
    short = []
    prepare = driver.plane.prepare

    def watched(*args, **options):
        table = prepare(*args, **options)
        if table is None:
            short.append((driver.num_in_flight, driver.counters.preemptions))
        return table

    driver.plane.prepare = watched
    results = run(driver)
    assert short[0] == (1, 0)  # one page short of two while a step is under way: wait for it
    # If it ends a request, that is enough; if not, one of the two has to go and no more.
    assert driver.counters.preemptions == (0 if ends else 1)
    for key, prompt in zip(keys, prompts):
        assert results[key].tokens == expected(prompt, 6, eos if key == keys[0] else ())[0]


def test_scenario_h9_no_more_are_preempted_than_the_shortage_asks_for():
    driver, _ = make_driver(num_pages=13, tokens_per_page=2, max_step_tokens=64)
    keys = [driver.submit([i + 1] * 3, 8) for i in range(4)]  # two pages each, four in hand
    results = run(driver)
    assert driver.counters.preemptions == 2
    first_short = [r.preemptions for r in (results[key] for key in keys)]
    assert first_short[:2] == [0, 0]  # the older half never gives way


def test_scenario_h10_a_preempted_request_keeps_its_turn():
    driver, runner = make_driver(num_pages=8, max_requests=2)
    old, preempted = driver.submit([1] * 6, 14), driver.submit([2] * 6, 14)
    while not driver.counters.preemptions:
        driver.step()
    newer = driver.submit([3], 1)  # would fit at once, but it is not its turn
    assert driver.num_waiting == 2
    results = run(driver)
    order = [key for step in runner.steps for key, start, _ in step if start == 0]
    assert order == [old, preempted, preempted, newer]
    assert all(results[key].reason == "length" for key in (old, preempted, newer))


@pytest.mark.parametrize(("schedule", "can_mix", "preemptions"), [("mixed", True, 7), ("prefill_first", False, 4)])
def test_scenario_h11_a_step_that_admits_always_gets_its_pages(schedule, can_mix, preemptions):
    driver, _ = make_driver(12, 2, max_requests=8, max_step_tokens=9, schedule=schedule, can_mix=can_mix)
    wanted = {driver.submit([i + 1] * (1 + i % 7), 2 + i % 9): i for i in range(24)}
    results = run(driver)  # the driver of these tests checks it in every step
    assert driver.counters.preemptions == preemptions
    assert all(results[k].tokens == expected([i + 1] * (1 + i % 7), 2 + i % 9)[0] for k, i in wanted.items())


def test_scenario_h13_the_phase_is_a_state_and_not_a_token_count():
    driver, runner = make_driver(num_pages=5, tokens_per_page=2, max_requests=2, schedule="prefill_first")
    old, young = driver.submit([1, 2, 3], 3), driver.submit([4], 5)
    driver.step()
    driver.step()
    # One page is left for two that need one each. The younger one has generated, and still its next step is a prefill.
    driver.step()
    assert driver.counters.preemptions == 1
    assert driver.counters.prefill_tokens == 4
    results = run(driver)
    fed = slices_of(runner, young)
    assert results[old].tokens == expected([1, 2, 3], 3)[0]
    assert results[young].tokens == expected([4], 5)[0]
    assert fed[:3] == [(0, 1), (1, 1), (0, 3)]
    assert driver.counters.prefill_tokens == 4 + 3
    # A prompt of one token is a prefill, too: prompts go first, so the step is its own.
    late = driver.submit([9], 1)
    run(driver)
    assert runner.steps[-1] == [(late, 0, 1)]
    assert driver.counters.prefill_tokens == 4 + 3 + 1


def test_scenario_m7_later_chunks_and_replays_keep_their_positions():
    driver, runner = make_driver(max_step_tokens=8)
    key = driver.submit([7] * 12, 3)
    run(driver)
    assert slices_of(runner, key) == [(0, 8), (8, 4), (12, 1), (13, 1)]
