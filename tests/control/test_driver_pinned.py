"""A driver over pinned shapes: what is computed for a request does not depend on what runs beside it."""

import pytest
from driver_helpers import expected, make_driver, published, run
from plane_helpers import checked, make_namespace

from paged.common import UnsupportedError
from paged.control import PinnedShapes, Slice
from paged.control.schedule import chunk_tokens

SPACE = make_namespace()


def pinned(num_pages=30, max_step_tokens=8, **options):
    shapes = PinnedShapes.of(tokens_per_page=4, max_rows=4, max_tokens=max_step_tokens, max_kv_len=4 * (num_pages - 1))
    return make_driver(num_pages, max_step_tokens=max_step_tokens, shapes=shapes, **options)


def fed(runner, key):
    return [(start, count) for step in runner.steps for i, start, count in step if i == key]


@pytest.mark.parametrize("least", [1, 2])
def test_chunks_add_up_and_are_never_shorter_than_the_least(least):
    for left in range(1, 40):
        for room in range(2 * least, 12):
            todo, counts = left, []
            while todo:
                counts.append(chunk_tokens(todo, room, least))
                assert 0 < counts[-1] <= room
                todo -= counts[-1]
            assert min(counts) >= min(least, left)
    assert chunk_tokens(3, 2, 2) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_have_the_shape_of_their_phase_and_phases_are_kept_apart(depth, monkeypatch):
    driver, runner = pinned(depth=depth, prefixes=True)
    shapes = []
    dispatch = runner.dispatch
    monkeypatch.setattr(
        runner, "dispatch", lambda step: shapes.append((step.table.num_rows, step.table.num_tokens)) or dispatch(step)
    )
    lengths = {0: 1, 1: 9, 2: 2, 3: 17, "x": 6, "y": 6, "alone": 1}
    for key in range(4):
        driver.submit([key + 1] * lengths[key], 6, namespace=SPACE, request_id=key)
    driver.submit_samples([5] * 6, 4, ["x", "y"], namespace=SPACE)
    run(driver)
    driver.submit([6], 2, request_id="alone")  # by its size it might decode
    run(driver)
    assert driver.schedule == "prefill_first"
    assert set(shapes) == {(4, 8), (4, 4)}
    for step, shape in zip(runner.steps, shapes):
        feeds_prompts = {start < lengths[key] for key, start, _ in step}
        assert feeds_prompts == {shape == (4, 8)}


def test_prompts_are_fed_two_tokens_or_more_at_a_time():
    driver, runner = pinned(prefixes=True)
    prompt = list(range(1, 14))  # three pages of four and one token
    for key in "ab":
        driver.submit(prompt, 2, namespace=SPACE, request_id=key)
        run(driver)
    driver.submit_samples(prompt[:10], 2, ["c", "d"], namespace=SPACE)
    run(driver)
    assert fed(runner, "a")[:2] == [(0, 8), (8, 5)]
    assert fed(runner, "b")[0] == (8, 5)  # a third page is published, and would leave one token
    assert fed(runner, "c")[0] == (8, 2)
    assert fed(runner, "d")[0] == (8, 2)
    assert all(count > 1 for key in "abcd" for start, count in fed(runner, key) if start < 10)


def test_only_what_was_fed_as_a_prompt_is_published():
    driver, runner = pinned(prefixes=True)
    driver.submit(list(range(1, 7)), 9, namespace=SPACE)
    run(driver)
    assert published(driver, runner) == [[1, 2, 3, 4]]


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_is_preempted_however_small_the_pool_is(depth):
    driver, _ = pinned(num_pages=9, depth=depth, prefixes=True)
    prompts = [[1] * n for n in (6, 20, 3, 11, 6)]
    keys = [driver.submit(prompt, 12, namespace=SPACE) for prompt in prompts]
    driver.submit_samples([7] * 6, 12, list("abc"), namespace=SPACE)
    results = run(driver)
    for key, prompt in zip([*keys, *"abc"], [*prompts, *[[7] * 6] * 3]):
        assert results[key].tokens == expected(prompt, 12)[0]
    assert driver.counters.preemptions == 0


def test_a_mixed_schedule_and_steps_too_short_are_refused():
    with pytest.raises(UnsupportedError, match="which keeps its phases apart"):
        pinned(schedule="mixed")
    with pytest.raises(UnsupportedError, match="with steps of 3 tokens"):
        pinned(max_step_tokens=3)


def test_pinned_shapes_by_size():
    shapes = PinnedShapes.of(tokens_per_page=4, max_rows=3, max_tokens=8, max_kv_len=10)
    assert [s.listed_pages for s in shapes.rungs()] == [9, 9]
    plane = pinned()[0].plane
    handle = plane.open()
    assert handle is not None
    table = checked(plane.prepare([Slice(handle, 0, 1)], lambda pages: None))
    assert (table.num_rows, table.num_tokens, table.max_query_len) == (4, 4, 1)
