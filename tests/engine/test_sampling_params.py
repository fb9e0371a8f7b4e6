"""What `SamplingParams` refuses, and what it sends to the device."""

import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.engine import SamplingParams
from paged.engine.params import FILTERED, GREEDY, NUM_WORDS, RANDOM


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, r"SamplingParams.max_tokens must be in 1\.\."),
        ({"temperature": -0.5}, r"SamplingParams.temperature must be 0 or more, got -0.5"),
        ({"temperature": float("nan")}, r"SamplingParams.temperature must be finite, got nan"),
        ({"temperature": 1e-45}, r"SamplingParams.temperature must be within the normal range of float32"),
        ({"top_p": 0.0}, r"SamplingParams.top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, r"SamplingParams.top_p must be above 0 and at most 1, got 1.5"),
        ({"min_p": 1.01}, r"SamplingParams.min_p must be in 0 .. 1, got 1.01"),
        ({"top_k": -1}, r"SamplingParams.top_k must be in 0\.\."),
        ({"seed": 2**64}, r"SamplingParams.seed must be in 0\.\.18446744073709551615"),
        ({"n": 0}, r"SamplingParams.n must be in 1\.\."),
        ({"stop": ["a", ""]}, r"SamplingParams.stop must hold non-empty strings: entry 1 is ''"),
        ({"stop_token_ids": [-1]}, r"SamplingParams.stop_token_ids must be in 0\.\."),
        ({"prompt_logprobs": -1}, r"SamplingParams.prompt_logprobs must be in 0\.\."),
    ],
)
def test_wrong_values_are_refused_by_field_and_value(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        SamplingParams(**changes)


def test_the_level_is_the_least_that_will_do():
    assert SamplingParams(top_k=5, seed=3).level == GREEDY
    assert SamplingParams(temperature=0.5).level == RANDOM
    for filters in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert SamplingParams(temperature=0.5, **filters).level == FILTERED
    assert SamplingParams(logprobs=2, prompt_logprobs=5).num_top == 5
    assert SamplingParams(stop="x").stop == ("x",)


def test_words_hold_every_parameter_bit_for_bit():
    params = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, top_k=40)
    words = params.words(2**64 - 2, 3)
    assert words.shape == (NUM_WORDS,)
    assert words[:2].view(np.uint32).tolist() == [2**32 - 2, 2**32 - 1]
    assert words[2:4].tolist() == [3, 40]
    assert words[4:].view(np.float32).tolist() == [np.float32(x) for x in (0.7, 0.9, 0.05)]
