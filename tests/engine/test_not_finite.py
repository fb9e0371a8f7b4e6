"""A request whose logits are no numbers fails alone; its neighbours do not see it, and neither do later owners of its
pages."""

import dataclasses

import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.engine import OfflineEngine, SamplingParams
from paged.models import Decoder

BAD = 95
COUNT = 6
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def ill(tiny) -> Decoder:
    """Token 95 reads a row of NaN, and so does padding, which is token 0."""
    model = tiny()
    return dataclasses.replace(model, embedding=model.embedding.at[np.array([0, BAD])].set(np.nan))


@pytest.fixture(scope="module")
def make_engine(ill):
    def make(model=None, **options):
        # 11 pages hold the longest request and little beside it; freed ones hold NaN until they are scrubbed.
        base = {"num_pages": 14, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
        return OfflineEngine(ill if model is None else model, **{**base, **options})

    return make


def bits(output):
    return output.token_ids, np.asarray(output.logprobs, np.float32).tobytes(), output.finish_reason, output.error


def with_bad(prompt, at):
    return [*prompt[:at], BAD, *prompt[at:]]


def assert_nothing_left(engine):
    plane, runner = engine.runtime.plane, engine.runtime.runner
    assert (plane.num_open, plane.leaked_pages(), plane.pending_pages) == (0, 0, 0)
    assert plane.held_pages == plane.retained_pages()
    assert not runner.sampling
    assert not runner.prompt_scores
    engine.driver.verify()


@pytest.mark.parametrize("options", [{}, {"invariant": True}, {"depth": 1, "prefix_cache": True}])
def test_it_fails_alone_and_the_others_have_the_bits_they_have_without_it(make_engine, prompts, options):
    sound, engine = make_engine(**options), make_engine(**options)
    # A prompt of the same length and without the bad token keeps all shapes and the schedule as they are.
    batch = [with_bad(prompts[4], 9), prompts[5], with_bad(prompts[1], 4), prompts[3], prompts[0]]
    like = [[7 if t == BAD else t for t in prompt] for prompt in batch]
    short = dataclasses.replace(GREEDY, max_tokens=1)
    params = [short, GREEDY, short, GREEDY, GREEDY]
    want = sound.batch_inference(like, params)
    got = engine.batch_inference(batch, params)
    assert [o.finish_reason for o in got] == ["error", "length", "error", "length", "length"]
    for i in (1, 3, 4):
        assert bits(got[i]) == bits(want[i])
        assert got[i].error is None
    assert [o.token_ids for o in got if o.error] == [(), ()]
    assert got[0].error.startswith("prompt 0: the log probability of its token 0 (position 17, step ")
    assert got[2].error.startswith("prompt 2: the log probability of its token 0 (position 5, step ")
    assert engine.driver.counters.failed == 2
    assert_nothing_left(engine)
    # What it left in its pages is gone when others get them.
    assert [bits(o)[0] for o in engine.batch_inference(like, params)] == [bits(o)[0] for o in want]


def test_in_the_midst_of_its_text(make_engine, tiny, prompts):
    """A token that it samples itself is bad: the first one that was seen is kept, and the text ends there."""
    sound = OfflineEngine(tiny(), num_pages=14, tokens_per_page=4, max_requests=4, max_step_tokens=16)
    whole = sound.batch_inference([prompts[3]], GREEDY)[0].token_ids
    bad = whole[2]
    at = whole.index(bad)
    model = dataclasses.replace(tiny(), embedding=tiny().embedding.at[bad].set(np.nan))
    engine = make_engine(model)
    pieces = []
    prompt = [3 if t == bad else t for t in prompts[1]]
    want = engine.batch_inference([prompt], GREEDY)[0]
    assert want.error is None
    got = engine.batch_inference([prompts[3], prompt], GREEDY, on_delta=pieces.append)
    assert got[0].token_ids == whole[: at + 1]
    assert got[0].finish_reason == "error"
    assert f"its token {at + 1} (position {11 + at + 1}, step" in got[0].error
    assert got[1].token_ids == want.token_ids
    mine = [piece for piece in pieces if piece.request == 0]
    assert [piece.token is None for piece in mine] == [False] * (at + 1) + [True]
    assert mine[-1].finish_reason == "error"
    assert_nothing_left(engine)


def test_nothing_of_it_is_cached_for_others(make_engine, prompts):
    engine = make_engine(prefix_cache=True)
    bad = with_bad(prompts[4], 9)
    twin = [7 if t == BAD else t for t in bad]
    found = [engine.batch_inference([prompt], GREEDY)[0] for prompt in (bad, bad, twin, bad)]
    assert [o.finish_reason for o in found] == ["error", "error", "length", "error"]
    assert [o.prefix_tokens for o in found] == [0, 0, 0, 8]  # of its sound twin's pages, those before the bad token
    assert_nothing_left(engine)


def test_samples_of_an_ill_prompt_fail_each_and_a_submitted_request_is_named_by_its_number(make_engine, prompts):
    engine = make_engine(prefix_cache=True)
    several = dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=1, prompt_logprobs=1)
    got = engine.batch_inference([prompts[3], with_bad(prompts[3], 0)], [several, several])
    assert [o.finish_reason for o in got] == ["length"] * 3 + ["error"] * 3
    assert [o.error and o.error.split(":")[0] for o in got[3:]] == [
        "prompt 1, sample 0",
        "prompt 1, sample 1",
        "prompt 1, sample 2",
    ]
    assert got[0].prompt_logprobs is not None
    assert got[3].prompt_logprobs is None
    engine.submit(prompts[0], GREEDY)
    number = engine.submit(with_bad(prompts[0], 0), GREEDY)
    while not engine.idle:
        engine.step()
    (output,) = engine.take(number)
    assert output.error.startswith(f"request {number}: the log probability of its token 0 (position 2, ")
    engine.take(number - 1)
    assert_nothing_left(engine)


def test_step_level_entry_points_raise_and_name_the_handle(make_runtime, ill, prompts):
    runtime = make_runtime(ill)
    handle, other = runtime.add(with_bad(prompts[1], 2)), runtime.add(prompts[0])
    with pytest.raises(InvalidInputError, match=r"request Handle\(.*\(row 0\) is NaN.*Release it to go on"):
        runtime.prefill([handle, other])
    runtime.release(handle)
    assert len(runtime.prefill([other])) == 1
