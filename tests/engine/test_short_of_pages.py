"""Requests over pools that hold little more than the longest of them: tokens are those of a roomy pool."""

import dataclasses

import numpy as np
import pytest

from paged.engine import OfflineEngine, SamplingParams

COUNT = 8
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.3, top_k=30, seed=11, n=3)


@pytest.fixture(scope="module")
def make_engine(tiny):
    def make(**options):
        base = {"num_pages": 200, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
        return OfflineEngine(tiny(), **{**base, **options})

    return make


@pytest.fixture(scope="module")
def short():
    """Lengths within a page, exactly pages, and one token more."""
    rng = np.random.default_rng(5)
    return [rng.integers(1, 96, size=n).tolist() for n in (16, 15, 13, 12, 9, 5, 4, 1)]


@pytest.fixture(scope="module")
def roomy(make_engine, short):
    return [o.token_ids for o in make_engine().batch_inference(short, GREEDY)]


def assert_nothing_left(engine):
    plane, runner = engine.runtime.plane, engine.runtime.runner
    assert (plane.num_open, plane.leaked_pages(), plane.pending_pages) == (0, 0, 0)
    assert plane.held_pages == plane.retained_pages()
    assert not runner.sampling
    assert not runner.prompt_scores
    engine.driver.verify()


@pytest.mark.parametrize("options", [{}, {"depth": 1}, {"prefix_cache": True}])
def test_a_pool_one_page_larger_than_the_longest_request_finishes_all(make_engine, short, roomy, options):
    # 16 tokens and 7 that are fed after them: six pages, and the sentinel.
    engine = make_engine(num_pages=1 + 6 + 1, **options)
    outputs = engine.batch_inference(short, GREEDY)
    assert [o.token_ids for o in outputs] == roomy
    assert sum(o.preemptions for o in outputs) == engine.driver.counters.preemptions == 1
    assert engine.flips(outputs).beyond(1e-3) == 0
    assert_nothing_left(engine)


def test_the_last_page_of_a_pool_and_not_a_token_more(make_engine, short):
    engine = make_engine(num_pages=1 + 5)
    prompts = [[*short[0], *short[6]], [*short[0], *short[6]], [*short[0], *short[6][:3]]]
    limits = [dataclasses.replace(GREEDY, max_tokens=n) for n in (1, 2, 2)]
    outputs = engine.batch_inference(prompts, limits)
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("length", 1), ("refused", 0), ("length", 2)]
    assert outputs[1].error.startswith("prompt 1: 20 tokens and 1 to generate need 6 pages of 4 tokens; the pool has 5")
    assert_nothing_left(engine)


def test_a_seed_draws_the_same_for_each_sample_whatever_gives_way(make_engine, short):
    prompts = [short[2], short[4]]
    wanted = [o.token_ids for o in make_engine(max_requests=8).batch_inference(prompts, RANDOM)]
    engine = make_engine(num_pages=8)
    outputs = engine.batch_inference(prompts, RANDOM)
    assert [o.token_ids for o in outputs] == wanted
    assert len(set(wanted)) == 6
    assert engine.driver.counters.preemptions == 1
    assert_nothing_left(engine)


def test_a_prompt_that_is_aborted_between_any_two_of_its_chunks_leaves_nothing_that_hits(make_engine, short):
    engine = make_engine(num_pages=13, prefix_cache=True)
    prompt = [token for one in short[:3] for token in one][:40]
    for steps in range(1, 4):
        number = engine.submit(prompt, dataclasses.replace(GREEDY, prompt_logprobs=steps % 2 or None))
        for _ in range(steps):
            engine.step()
        engine.abort(number)
        (output,) = engine.take(number)
        assert output.finish_reason == "abort"
        while not engine.idle:
            engine.step()
        assert_nothing_left(engine)
    first, second = (engine.batch_inference([prompt], GREEDY)[0] for _ in range(2))
    assert (first.prefix_tokens, second.prefix_tokens) == (0, 36)
    assert first.token_ids == second.token_ids == make_engine().batch_inference([prompt], GREEDY)[0].token_ids
