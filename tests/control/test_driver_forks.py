"""Samples of one prompt: who feeds it, what is shared and copied, and what happens when one of them goes."""

import numpy as np
import pytest
from driver_helpers import expected, make_driver, run

from paged.common import InternalError, InvalidInputError

PROMPT = list(range(1, 11))  # two pages of four and a half one


def fed(runner, key):
    return [(start, count) for step in runner.steps for i, start, count in step if i == key]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("schedule", ["mixed", "prefill_first"])
def test_the_prompt_is_fed_once_and_its_pages_are_shared(schedule, depth):
    driver, runner = make_driver(num_pages=40, depth=depth, schedule=schedule)
    keys = list("abc")
    driver.submit_samples(PROMPT, 6, keys)
    while not all(fed(runner, key) for key in keys):
        driver.step()
        driver.verify()
    assert fed(runner, "a")[0] == (0, 10)
    assert [fed(runner, key)[0] for key in "bc"] == [(9, 1), (9, 1)]
    # Three times three pages, of which the two whole ones are shared; of three writers the last keeps the third page.
    assert driver.plane.held_pages == 2 + 3
    assert sum(len(targets) for _, targets in runner.pool.copied) == 2
    assert driver.counters.forked_tokens == 18
    results = run(driver)
    assert {results[key].tokens for key in keys} == {expected(PROMPT, 6)[0]}
    assert driver.counters.prefill_tokens == 12


def test_a_prompt_that_ends_at_a_page_is_shared_without_a_copy():
    driver, runner = make_driver(num_pages=40)
    driver.submit_samples(PROMPT[:9], 3, ["a", "b"])
    results = run(driver)
    assert fed(runner, "b")[0] == (8, 1)
    assert runner.pool.copied == []
    assert results["b"].tokens == expected(PROMPT[:9], 3)[0]


def test_samples_of_one_token_fork_before_the_first_of_them_is_gone():
    driver, runner = make_driver(num_pages=40)
    driver.submit_samples(PROMPT, 1, ["a", "b", "c"])
    run(driver)
    assert runner.steps == [[("a", 0, 10)], [("b", 9, 1), ("c", 9, 1)]]


def test_where_rows_are_too_few_another_one_feeds_the_prompt():
    driver, runner = make_driver(num_pages=40, max_requests=2)
    driver.submit_samples(PROMPT, 2, ["a", "b", "c", "d"])
    results = run(driver)
    assert {results[key].tokens for key in "abcd"} == {expected(PROMPT, 2)[0]}
    starts = [fed(runner, key)[0][0] for key in "abcd"]
    assert starts[:2] == [0, 9]
    assert sum(start == 0 for start in starts) == 1  # "c" or "d" found somebody to fork from


def test_admission_counts_the_page_that_is_copied_and_one_in_hand():
    for usable_pages, running in ((3, 1), (4, 2)):
        driver, _ = make_driver(1 + usable_pages)
        driver.submit_samples(PROMPT[:6], 3, ["a", "b"])
        driver.step()
        assert driver.num_running == running
        run(driver)


def test_a_prompt_of_one_token_has_nothing_to_share():
    driver, runner = make_driver(num_pages=40)
    driver.submit_samples([7], 3, ["a", "b"])
    results = run(driver)
    assert results["a"].tokens == results["b"].tokens == expected([7], 3)[0]
    assert fed(runner, "b")[0] == (0, 1)


def test_nobody_waits_behind_samples_that_stand_aside():
    driver, runner = make_driver(num_pages=40, max_step_tokens=8)
    driver.submit_samples(PROMPT, 2, ["a", "b"])
    driver.submit([5, 6], 2, request_id="other")
    driver.step()
    driver.step()
    assert runner.steps == [[("a", 0, 8)], [("a", 8, 2), ("other", 0, 2)]]
    results = run(driver)
    assert results["b"].tokens == expected(PROMPT, 2)[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["abort", "stop"])
def test_when_the_one_that_feeds_the_prompt_goes_another_takes_over(how, depth):
    driver, runner = make_driver(num_pages=40, max_step_tokens=4, depth=depth)
    driver.submit_samples(PROMPT, 3, ["a", "b", "c"])
    driver.step()
    assert getattr(driver, how)("a")
    driver.verify()
    results = run(driver)
    assert results["a"].tokens == ()
    assert fed(runner, "b")[0] == (0, 4)
    assert fed(runner, "c")[0] == (9, 1)
    assert results["b"].tokens == results["c"].tokens == expected(PROMPT, 3)[0]


def test_a_sample_that_stands_aside_can_be_aborted():
    driver, _ = make_driver(num_pages=40, max_step_tokens=4)
    driver.submit_samples(PROMPT, 3, ["a", "b", "c"])
    driver.step()
    driver.abort("b")
    driver.verify()
    results = run(driver)
    assert (results["b"].reason, results["c"].tokens) == ("abort", expected(PROMPT, 3)[0])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_preempted_samples_end_with_their_tokens(spare, depth):
    driver, _ = make_driver(num_pages=1 + 5 + spare, depth=depth)
    driver.submit_samples(PROMPT, 9, list("abcd"))
    other = driver.submit([9, 8, 7], 9)
    results = run(driver)
    assert {results[key].tokens for key in "abcd"} == {expected(PROMPT, 9)[0]}
    assert results[other].tokens == expected([9, 8, 7], 9)[0]
    assert driver.counters.preemptions > 0


def test_a_lost_step_of_the_one_that_feeds_the_prompt_is_fed_again():
    driver, runner = make_driver(num_pages=40, max_step_tokens=8)
    driver.submit_samples(PROMPT, 3, ["a", "b"])
    driver.step()
    runner.fail_collect = True
    with pytest.raises(ConnectionError):
        driver.step()
    runner.fail_collect = False
    driver.verify()
    results = run(driver)
    assert fed(runner, "a") == [(0, 8), (8, 2), (0, 8), (8, 2), *fed(runner, "a")[4:]]
    assert results["a"].tokens == results["b"].tokens == expected(PROMPT, 3)[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], r"request_ids must be distinct, at least one; got \[\]"),
        (["a", "a"], r"request_ids must be distinct, at least one; got \['a', 'a'\]"),
        (["b", "taken"], r"request_id 'taken' is in use"),
    ],
)
def test_ids_are_checked_before_anything_is_queued(keys, message):
    driver, _ = make_driver()
    driver.submit([1], 1, request_id="taken")
    with pytest.raises(InvalidInputError, match=message):
        driver.submit_samples([1], 1, keys)
    assert driver.num_waiting == 1


def test_verify_sees_a_sample_that_stands_aside_for_nobody():
    driver, _ = make_driver(num_pages=40, max_step_tokens=4)
    driver.submit_samples(PROMPT, 3, ["a", "b"])
    driver.step()
    family = driver._requests["a"].family
    assert family is not None
    family.held.append(driver._requests["b"])
    driver.verify()
    family.leader = None
    with pytest.raises(InternalError, match="stands aside, and nobody leads"):
        driver.verify()


def test_counts_of_tokens_are_arrays_of_the_batch():
    driver, _ = make_driver(num_pages=40)
    driver.submit_samples(PROMPT, 3, ["a", "b"])
    first, second = driver.step(), driver.step()
    assert first is not None
    assert second is not None
    assert first.cached.tolist() == [0]
    assert (second.batch, second.cached.tolist()) == (("a", "b"), [10, 9])
    assert second.query_lens.dtype == np.int32
