"""The driver over a prefix index: what is fed, what is published, and what a hit may not do."""

import pytest
from driver_helpers import expected, make_driver, published, run
from plane_helpers import make_namespace

from paged.common import InvalidInputError

SPACE = make_namespace()
PROMPT = list(range(1, 13))  # three pages of four


def fed(runner, key):
    return [(start, count) for step in runner.steps for i, start, count in step if i == key]


@pytest.mark.parametrize("depth", [1, 2])
def test_prefill_starts_at_the_cached_tokens_and_tokens_are_those_of_a_cold_run(depth):
    driver, runner = make_driver(num_pages=30, depth=depth, prefixes=True)
    keys = []
    for prompt in (PROMPT, [*PROMPT[:9], 30, 31], PROMPT, PROMPT[:8]):
        keys.append(driver.submit(prompt, 6, namespace=SPACE))
        result = run(driver)[keys[-1]]
        assert result.tokens == expected(prompt, 6)[0]
    assert [fed(runner, key)[0] for key in keys] == [(0, 12), (8, 3), (8, 4), (4, 4)]
    assert [driver.finished[key].prefix_tokens for key in keys] == [0, 8, 8, 4]
    assert driver.counters.prefix_tokens == 20
    assert driver.counters.prefill_tokens == 12 + 3 + 4 + 4


def test_scenario_c1_a_whole_cached_prompt_still_feeds_a_token():
    driver, runner = make_driver(num_pages=30, prefixes=True)
    for _ in range(2):
        key = driver.submit(PROMPT[:8], 3, namespace=SPACE)
        assert run(driver)[key].tokens == expected(PROMPT[:8], 3)[0]
    assert fed(runner, key)[0] == (4, 4)


def test_a_prompt_is_shared_while_its_request_still_runs():
    driver, runner = make_driver(num_pages=30, prefixes=True)
    first = driver.submit(PROMPT, 9, namespace=SPACE)
    driver.step()
    second = driver.submit(PROMPT, 9, namespace=SPACE)
    results = run(driver)
    assert fed(runner, second)[0] == (8, 4)
    assert results[first].tokens == results[second].tokens == expected(PROMPT, 9)[0]


def test_a_finished_request_publishes_the_whole_pages_that_it_filled():
    driver, runner = make_driver(num_pages=30, prefixes=True)
    key = driver.submit(PROMPT[:6], 8, namespace=SPACE)
    tokens = PROMPT[:6] + list(run(driver)[key].tokens)
    assert published(driver, runner) == sorted([tokens[:4], tokens[4:8], tokens[8:12]])  # 13 were fed
    assert driver.plane.retained_pages() == driver.plane.held_pages == 3


def test_other_tenants_and_requests_without_a_namespace_share_nothing():
    driver, runner = make_driver(num_pages=30, prefixes=True)
    keys = []
    for namespace in (make_namespace(tenant="a"), make_namespace(tenant="b"), None, None):
        keys.append(driver.submit(PROMPT, 2, namespace=namespace))
        run(driver)
    assert [fed(runner, key)[0] for key in keys] == [(0, 12)] * 4
    assert len(published(driver, runner)) == 6


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_that_nobody_holds_are_had_whatever_hangs_below_them(depth):
    # Both are computed at once. The second's third page is published below the first's two, which it does not hold.
    driver, runner = make_driver(num_pages=10, max_requests=2, depth=depth, prefixes=True)
    short, long = [*PROMPT[:8], 20, 21, 22, 23], [*PROMPT[:8], 30, 31, 32, 33]
    keys = [driver.submit(short, 1, namespace=SPACE), driver.submit(long, 20, namespace=SPACE)]  # 8 of 9 pages
    results = run(driver)
    assert [results[key].tokens for key in keys] == [expected(short, 1)[0], expected(long, 20)[0]]
    assert [fed(runner, key)[0][0] for key in keys] == [0, 0]
    assert driver.counters.preemptions == 0
    assert driver.plane.leaked_pages() == 0
    assert driver.plane.cached_tokens(SPACE, [*long, 0]) == 12  # what it fed it publishes at its end, on its own


@pytest.mark.parametrize("end", ["preempt", "abort"])
def test_being_preempted_or_aborted_publishes_nothing_generated(end):
    driver, runner = make_driver(num_pages=8, max_requests=2, prefixes=True)
    prompts = [[1] * 6, [2] * 6]
    keys = [driver.submit(p, 14, namespace=SPACE) for p in prompts]
    if end == "preempt":
        while not driver.counters.preemptions:
            driver.step()
    else:
        for _ in range(9):
            driver.step()
        assert driver.abort(keys[1])
    assert published(driver, runner) == [[1] * 4, [2] * 4]  # whole pages of prompts
    results = run(driver)
    assert results[keys[0]].tokens == expected(prompts[0], 14)[0]
    if end == "preempt":
        assert results[keys[1]].tokens == expected(prompts[1], 14)[0]
        assert (4, 2) in [(start, min(count, 2)) for start, count in fed(runner, keys[1])]
        assert results[keys[1]].prefix_tokens == 0  # its own page, found again, is no hit of its prompt


@pytest.mark.parametrize("depth", [1, 2])
def test_stopping_a_request_finishes_it_with_what_it_has(depth):
    driver, runner = make_driver(num_pages=30, depth=depth, prefixes=True)
    key = driver.submit(PROMPT[:5], 20, namespace=SPACE)
    for _ in range(5):
        driver.step()
    assert driver.stop(key) is True
    assert driver.stop(key) is driver.abort(key) is False
    result = run(driver)[key]
    assert (result.tokens, result.reason) == (expected(PROMPT[:5], 5)[0], "stop")
    assert published(driver, runner) == sorted([PROMPT[:4], [*PROMPT[4:5], *result.tokens[:3]]])
    with pytest.raises(InvalidInputError, match="stop: there is no request 'x'"):
        driver.stop("x")


def test_what_a_lost_step_wrote_is_not_published():
    driver, runner = make_driver(num_pages=30, depth=2, prefixes=True)
    prompt = PROMPT[:7]
    key = driver.submit(prompt, 6, eos=expected(prompt, 1)[0], namespace=SPACE)
    outcome = driver.step()  # its end is known; the step under way writes the eighth token, which fills a page
    assert outcome is not None
    assert outcome.finished == (key,)
    assert driver.num_in_flight == 1
    assert published(driver, runner) == [PROMPT[:4]]
    runner.fail_collect = True
    with pytest.raises(ConnectionError):
        driver.step()
    runner.fail_collect = False
    again = driver.submit([*prompt, *driver.finished[key].tokens, 5], 3, namespace=SPACE)
    assert run(driver)[again].tokens == expected([*prompt, *driver.finished[key].tokens, 5], 3)[0]


def test_scenario_c3_pages_that_matched_may_be_evicted_while_the_request_waits():
    driver, runner = make_driver(num_pages=7, max_requests=2, prefixes=True)  # six pages
    run_first = driver.submit(PROMPT, 1, namespace=SPACE)
    run(driver)
    assert driver.plane.retained_pages() == 3
    grows = driver.submit([20] * 10, 14)  # three pages, then six
    for _ in range(3):
        driver.step()
    waits = driver.submit([*PROMPT, 30, 31, 32, 33], 3, namespace=SPACE)
    assert driver.plane.cached_tokens(SPACE, [*PROMPT, 1]) == 12
    results = run(driver)
    assert (results[grows].preemptions, results[waits].preemptions) == (0, 0)
    assert fed(runner, waits)[0][0] == 0  # all of them were evicted meanwhile, the last page first
    assert results[waits].tokens == expected([*PROMPT, 30, 31, 32, 33], 3)[0]
    assert results[grows].tokens == expected([20] * 10, 14)[0]
    assert results[run_first].tokens == expected(PROMPT, 1)[0]


def test_scenario_c3_what_a_request_attached_is_not_evicted_for_it():
    driver, runner = make_driver(num_pages=5, prefixes=True)  # four pages, three of them published
    driver.submit(PROMPT, 1, namespace=SPACE)
    run(driver)
    key = driver.submit([*PROMPT[:8], *[40] * 8], 1, namespace=SPACE)  # two of the three, and two more
    assert run(driver)[key].tokens == expected([*PROMPT[:8], *[40] * 8], 1)[0]
    assert fed(runner, key) == [(8, 8)]


def test_a_request_that_does_not_fit_is_not_matched_in_every_step():
    driver, _ = make_driver(num_pages=8, max_requests=3, prefixes=True)
    driver.submit([1] * 6, 14)
    driver.step()
    driver.submit(PROMPT * 2, 3, namespace=SPACE)
    attach, attached = driver.plane.attach, []
    driver.plane.attach = lambda *args: attached.append(1) or attach(*args)
    steps = 0
    while driver.num_waiting:
        driver.step()
        steps += 1
    assert len(attached) < steps / 2
    run(driver)


def test_a_namespace_needs_an_index(own_checks_only):
    driver, _ = make_driver()
    with pytest.raises(InvalidInputError, match=r"over a plane with prefixes=; got CacheNamespace.* over none"):
        driver.submit([1], 1, namespace=SPACE)
    driver, _ = make_driver(prefixes=True)
    with pytest.raises(InvalidInputError, match=r"must be a CacheNamespace, .* got 'a' over one"):
        driver.submit([1], 1, namespace="a")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_is_stopped_before_it_sampled_publishes_nothing(depth):
    """A chunk under way may yet be lost, and of one that is collected nobody knows whether its logits are numbers."""
    driver, runner = make_driver(num_pages=30, depth=depth, max_step_tokens=4, prefixes=True)
    for bad in (None, 3):
        runner.bad = bad
        key = driver.submit([*PROMPT, *PROMPT], 5, namespace=SPACE)
        driver.step()
        driver.step()
        assert driver.stop(key)
        assert driver.take(key).reason == "stop"
        run(driver)
        assert published(driver, runner) == []


def test_a_request_that_fails_publishes_nothing_more_and_its_neighbours_go_on():
    driver, runner = make_driver(num_pages=20, prefixes=True, depth=2)
    prompt = list(range(1, 9))
    tokens, _ = expected(prompt, 8)
    runner.bad = tokens[5]
    assert runner.bad not in [*prompt, *tokens[:5], 9, 10, *expected([9, 10], 8)[0]]
    ill = driver.submit(prompt, 8, namespace=SPACE)
    good = driver.submit([9, 10], 8, namespace=SPACE)
    results = run(driver)
    assert (results[ill].tokens, results[ill].reason) == (tokens[:6], "error")
    assert (results[good].tokens, results[good].reason) == expected([9, 10], 8)
    assert (driver.counters.failed, driver.counters.finished) == (1, 1)
    # Its prompt, which was sound, and what its neighbour fed; nothing of what it generated.
    assert published(driver, runner) == sorted(
        [prompt[:4], prompt[4:], [9, 10, *results[good].tokens[:2]], list(results[good].tokens[2:6])]
    )
