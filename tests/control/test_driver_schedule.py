"""Order, budgets, shapes: what goes into a step, and who goes first."""

import numpy as np
import pytest
from driver_helpers import expected, make_driver, run

from paged.common import InvalidInputError, PoolExhaustedError, UnsupportedError
from paged.control import FixedShape, ShapeLadders, Slice


def test_mixed_steps_decode_all_and_give_prompts_the_rest_of_the_budget():
    driver, runner = make_driver(num_pages=40, max_step_tokens=8)
    a, b = driver.submit([1] * 3, 6), driver.submit([2] * 4, 6)
    driver.step()
    c = driver.submit([3] * 9, 2)
    for _ in range(2):
        driver.step()
    assert runner.steps == [
        [(a, 0, 3), (b, 0, 4)],
        [(a, 3, 1), (b, 4, 1), (c, 0, 6)],
        [(a, 4, 1), (b, 5, 1), (c, 6, 3)],
    ]
    assert (driver.counters.decode_tokens, driver.counters.prefill_tokens) == (4, 16)


def test_prefill_first_feeds_prompts_before_anybody_decodes():
    driver, runner = make_driver(num_pages=40, max_step_tokens=8, schedule="prefill_first")
    a = driver.submit([1] * 3, 3)
    driver.step()
    b = driver.submit([2] * 10, 2)
    run(driver)
    assert runner.steps == [
        [(a, 0, 3)],
        [(b, 0, 8)],
        [(b, 8, 2)],
        [(a, 3, 1), (b, 10, 1)],
        [(a, 4, 1)],
    ]


def test_without_mixing_slices_of_one_token_and_longer_ones_go_apart():
    driver, runner = make_driver(num_pages=40, can_mix=False)
    assert driver.schedule == "prefill_first"
    keys = [driver.submit([5] * n, 2) for n in (3, 1, 4, 1)]
    run(driver)
    assert [[count for _, _, count in step] for step in runner.steps] == [[3, 4], [1, 1], [1, 1, 1, 1]]
    assert [[key for key, _, _ in step] for step in runner.steps[:2]] == [keys[::2], keys[1::2]]


def test_a_budget_below_the_rows_lets_the_older_decode_first():
    driver, runner = make_driver(num_pages=40, max_step_tokens=2)
    keys = [driver.submit([i + 1], 3) for i in range(3)]
    results = run(driver)
    assert all(len(step) <= 2 for step in runner.steps)
    assert [results[key].tokens for key in keys] == [expected([i + 1], 3)[0] for i in range(3)]


def test_lower_priority_values_go_first_and_later_ones_give_way_first():
    driver, runner = make_driver(num_pages=8, max_requests=2)
    low, high = driver.submit([1] * 6, 14, priority=5), driver.submit([2] * 6, 14)
    results = run(driver)
    assert runner.steps[0] == [(high, 0, 6), (low, 0, 6)]
    assert (results[low].preemptions, results[high].preemptions) == (1, 0)


def test_admission_counts_what_prompts_have_yet_to_take_and_a_page_in_hand_for_each_that_runs():
    for usable_pages, running in ((4, 1), (5, 2), (6, 2), (7, 3)):
        driver, _ = make_driver(1 + usable_pages, tokens_per_page=4, max_step_tokens=64)
        for prompt in ([1] * 8, [2] * 8, [3] * 3):
            driver.submit(prompt, 2)
        driver.step()
        assert driver.num_running == running


def test_the_last_in_turn_gives_way_whatever_phase_it_is_in():
    driver, _ = make_driver(15, tokens_per_page=1, max_step_tokens=3)
    low = driver.submit([1], 12, priority=1)
    driver.step()
    high = driver.submit([2] * 12, 2)  # is still being fed when pages run out
    while not driver.counters.preemptions:
        driver.step()
    results = run(driver)
    assert (results[low].preemptions, results[high].preemptions) == (1, 0)


def test_at_depth_2_the_next_step_is_dispatched_before_a_token_is_known():
    driver, runner = make_driver(depth=2)
    key = driver.submit([1, 2, 3], 5)
    outcome = driver.step()
    assert outcome is not None
    assert runner.steps == [[(key, 0, 3)], [(key, 3, 1)]]
    assert (outcome.query_lens.tolist(), outcome.cached.tolist()) == ([3], [0])
    assert outcome.tokens.tolist() == list(expected([1, 2, 3], 1)[0])
    assert run(driver)[key].tokens == expected([1, 2, 3], 5)[0]
    assert len(runner.steps) == 5  # a length is known in advance: nothing runs beyond it


def test_equal_calls_give_equal_steps():
    histories = []
    for _ in range(2):
        driver, runner = make_driver(num_pages=9, depth=2, max_step_tokens=6)
        keys = [driver.submit([i + 1] * (1 + i * 5 % 11), 1 + i * 7 % 9, priority=i % 2) for i in range(12)]
        for _ in range(9):
            driver.step()
        driver.abort(keys[-1])
        run(driver)
        histories.append((runner.steps, runner.pool.scrubbed, driver.counters))
    assert histories[0] == histories[1]


def test_outcomes_tell_what_a_step_did():
    driver, _ = make_driver(num_pages=40, max_step_tokens=5)
    a, b = driver.submit([1] * 3, 2, request_id="a"), driver.submit([2] * 4, 1, request_id="b")
    first, second = driver.step(), driver.step()
    assert first is not None
    assert second is not None
    assert (a, b) == ("a", "b")
    assert first.batch == ("a", "b")
    assert first.query_lens.tolist() == [3, 2]
    assert first.cached.tolist() == [0, 0]
    assert first.tokens.tolist() == [expected([1] * 3, 1)[0][0], -1]
    assert first.finished == ()
    assert second.query_lens.tolist() == [1, 2]
    assert second.cached.tolist() == [3, 2]
    assert second.finished == ("a", "b")
    assert driver.step() is None
    assert driver.take("a").tokens == expected([1] * 3, 2)[0]
    assert list(driver.finished) == ["b"]


def test_a_step_that_does_not_start_changes_nothing():
    driver, runner = make_driver()
    key = driver.submit([1] * 6, 3)
    driver.step()
    runner.fail_dispatch = True
    for _ in range(2):
        with pytest.raises(ConnectionError, match="no device"):
            driver.step()
        driver.verify()
    runner.fail_dispatch = False
    assert run(driver)[key].tokens == expected([1] * 6, 3)[0]
    assert driver.counters.recomputed_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_step_that_is_lost_its_requests_are_computed_again(depth):
    driver, runner = make_driver(depth=depth)
    keys = [driver.submit([i + 1] * 5, 4) for i in range(2)]
    for _ in range(2):
        driver.step()
    runner.fail_collect = True
    with pytest.raises(ConnectionError, match="device lost"):
        driver.step()
    driver.verify()
    assert driver.num_running == driver.num_in_flight == 0
    assert driver.plane.held_pages == 0
    runner.fail_collect = False
    results = run(driver)
    assert [results[key].tokens for key in keys] == [expected([i + 1] * 5, 4)[0] for i in range(2)]
    assert [results[key].preemptions for key in keys] == [1, 1]


@pytest.mark.parametrize("answer", [np.zeros(2, np.int32), np.zeros(1, np.float32), np.array([-3], np.int32)])
def test_a_runner_that_answers_nonsense_is_refused(answer):
    driver, _ = make_driver()
    driver.submit([1], 3)
    driver.runner.collect = lambda ticket: answer
    with pytest.raises(InvalidInputError, match=r"runner\.collect must give 1 ints|sampled token must not be negative"):
        driver.step()
    driver.verify()


def test_wrong_requests_are_refused_and_leave_nothing(own_checks_only):
    driver, _ = make_driver()
    driver.submit([1], 1, request_id="a")
    for args, options, text in [
        (([], 1), {}, "prompt_tokens is empty"),
        (([1, -2], 1), {}, r"prompt_tokens must not be negative: token 1 has -2"),
        (([1.5], 1), {}, r"prompt_tokens must be int32"),
        (([1], 0), {}, r"max_tokens must be in 1"),
        (([1], True), {}, r"max_tokens must be an int"),
        (([1], 1), {"eos": [-1]}, r"eos must be in 0"),
        (([1], 1), {"priority": 0.5}, r"priority must be an int"),
        (([1], 1), {"request_id": "a"}, r"request_id 'a' is in use"),
        (([1], 1), {"request_id": 1.5}, r"request_id must be an int or a str, got 1\.5"),
    ]:
        with pytest.raises(InvalidInputError, match=text):
            driver.submit(*args, **options)
    assert driver.num_waiting == 1
    with pytest.raises(InvalidInputError, match=r"request 'a' has not finished"):
        driver.take("a")
    run(driver)
    with pytest.raises(InvalidInputError, match=r"'a' is in use"):
        driver.submit([1], 1, request_id="a")
    driver.take("a")
    with pytest.raises(InvalidInputError, match=r"request 'a' is unknown"):
        driver.take("a")
    with pytest.raises(InvalidInputError, match=r"there is no request 'a'"):
        driver.abort("a")


def test_a_given_number_is_never_given_out_again():
    driver, _ = make_driver()
    assert driver.submit([1], 1, request_id=1) == 1
    assert [driver.submit([1], 1) for _ in range(2)] == [2, 3]


def test_options_that_do_not_go_together_are_refused_at_construction():
    with pytest.raises(UnsupportedError, match="schedule is 'mixed', and this runner cannot") as info:
        make_driver(can_mix=False, schedule="mixed")
    assert info.value.capability == "mixed"
    with pytest.raises(InvalidInputError, match=r"Driver\.schedule must be one of mixed, prefill_first"):
        make_driver(schedule="shortest")
    with pytest.raises(InvalidInputError, match=r"FixedShape\.tokens is 8, the step needs 16"):
        make_driver(shapes=FixedShape(4, 8, 100, 16, 64))
    with pytest.raises(InvalidInputError, match=r"max_step_tokens must be in 1"):
        make_driver(max_step_tokens=0)
    driver, _ = make_driver(max_request_tokens=6)
    with pytest.raises(PoolExhaustedError, match="A request can have 6 here"):
        driver.submit([1] * 4, 4)
    driver.submit([1] * 4, 3)


def test_24_mixed_requests_need_at_most_7_shapes():
    """Requirement C4, for the steps that the driver makes."""
    ladders = ShapeLadders(tokens_per_page=4, max_rows=8, max_tokens=64, max_kv_len=256, min_tokens=16, min_kv_len=64)
    driver, runner = make_driver(200, max_requests=8, max_step_tokens=64, shapes=ladders, max_request_tokens=256)
    shapes = set()
    dispatch = runner.dispatch

    def watched(step):
        t = step.table
        shapes.add((t.num_rows, t.num_tokens, t.page_ids.shape[0], t.max_query_len, t.max_kv_len))
        return dispatch(step)

    driver.runner.dispatch = watched
    keys = [driver.submit([i + 1] * (3 + i * 37 % 150), 4 + i % 13) for i in range(24)]
    results = run(driver)
    assert len(keys) == len(results) == 24
    assert len(shapes) <= 7


def test_pages_or_rows_held_by_others_are_reported_and_not_waited_for():
    driver, _ = make_driver(num_pages=4)
    stranger = driver.plane.open()
    driver.plane.prepare([Slice(stranger, 0, 8)], lambda pages: None)
    driver.submit([1] * 8, 1)
    with pytest.raises(PoolExhaustedError, match=r"1 requests are unfinished .*: 1 of 4 rows are open, 0 of"):
        driver.step()
    driver.plane.release(stranger)
    run(driver)
