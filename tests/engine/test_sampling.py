"""Greedy sampling and its log probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.engine.sampling import greedy


def oracle(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_takes_the_argmax_and_its_float32_log_probability(dtype):
    logits = (jax.random.normal(jax.random.key(0), (5, 1000)) * 4).astype(dtype)
    out = jax.jit(greedy, static_argnames="num_top")(logits, num_top=3)
    exact = oracle(np.asarray(logits.astype(jnp.float32)))
    best = exact.argmax(-1)
    np.testing.assert_array_equal(out.tokens, best)
    assert out.logprobs.dtype == jnp.float32
    np.testing.assert_allclose(out.logprobs, exact[np.arange(5), best], atol=2e-6)
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :3]
    np.testing.assert_array_equal(out.top_tokens, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(exact, order, -1), atol=2e-6)


def test_log_probabilities_survive_large_logits_and_16_bit_inputs():
    # A softmax in float16 overflows at 65504 and loses everything past three digits.
    logits = jnp.asarray([[60000.0, 60000.0, 0.0], [-60000.0, -59968.0, -60000.0]], jnp.float16)
    out = greedy(logits)
    np.testing.assert_allclose(out.logprobs, [np.log(0.5), 0.0], atol=1e-6)
    assert out.top_tokens.shape == (2, 0)


def test_among_equal_logits_the_lowest_id_wins():
    out = greedy(jnp.asarray([[0.0, 7.0, 7.0, 1.0]]), num_top=2)
    assert out.tokens.tolist() == [1]
    assert out.top_tokens.tolist() == [[1, 2]]


def test_more_top_tokens_than_the_vocabulary_are_refused():
    with pytest.raises(InvalidInputError, match=r"greedy.num_top must be in 0..4, got 5"):
        greedy(jnp.zeros((1, 4)), num_top=5)
