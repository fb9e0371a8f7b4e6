"""Choosing tokens: greedily and at random, the filters, and log probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.engine import SamplingParams
from paged.engine.sampling import RowParams, _kept, greedy, greedy_tokens, random_tokens


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
    with pytest.raises(InvalidInputError, match=r"scored.num_top must be in 0..4, got 5"):
        greedy(jnp.zeros((1, 4)), num_top=5)


def rows(*params, seed=0, samples=None):
    """`RowParams` of these requests, through the words that a host sends."""
    words = [p.words(p.seed or seed, 0 if samples is None else samples[i]) for i, p in enumerate(params)]
    return RowParams.unpack(jnp.asarray(np.concatenate(words)))


draw = jax.jit(random_tokens, static_argnames="filtered")


def kept_by(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The plain definition: rank, cut, renormalise, cut."""
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: params.top_k or len(order)]
    total, mass, out = weights[order].sum(), 0.0, []
    for token in order:
        if mass >= params.top_p * total:
            break
        out.append(token)
        mass += weights[token]
    return {token for token in out if weights[token] >= params.min_p or token == order[0]}


FILTERS = [
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 500},
    *({"top_k": k, "top_p": p} for k in (3, 4, 5) for p in (0.5, 0.7, 0.9)),  # p of what top_k leaves, not of all
]


def test_the_filters_keep_what_their_definition_keeps():
    rng = np.random.default_rng(1)
    logits = np.round(rng.normal(size=(len(FILTERS), 40)) * 2, 1).astype(np.float32)  # rounded, so there are ties
    logits[:, 5] = -0.0
    logits[:, 30] = 0.0
    params = [SamplingParams(temperature=0.9, **filters) for filters in FILTERS]
    scaled = (logits - logits.max(-1, keepdims=True)) / np.float32(0.9)
    kept = np.asarray(jax.jit(_kept)(jnp.asarray(logits), jnp.asarray(scaled), rows(*params)))
    for row, one in enumerate(params):
        assert set(np.flatnonzero(kept[row]).tolist()) == kept_by(logits[row], one), one


def test_of_equal_logits_the_lowest_ids_stay():
    params = rows(SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.5))
    logits = jnp.asarray([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    kept = _kept(logits, logits - logits.max(-1, keepdims=True), params)
    assert kept.tolist() == [[False, True, True, False], [True, True, False, False]]


def test_draws_follow_the_distribution():
    logits = jnp.asarray([2.0, 1.0, 0.0, -1.0])
    params = [SamplingParams(temperature=2.0), SamplingParams(temperature=1.0, top_k=2)]
    count = 4000
    for one in params:
        many = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), rows(one))
        positions = jnp.arange(count, dtype=jnp.int32)
        drawn = draw(jnp.broadcast_to(logits, (count, 4)), positions, many, filtered=True)
        weights = np.exp(np.asarray(logits, np.float64) / one.temperature)
        weights[[i for i in range(4) if i not in kept_by(np.asarray(logits), one)]] = 0
        found = np.bincount(np.asarray(drawn), minlength=4) / count
        np.testing.assert_allclose(found, weights / weights.sum(), atol=4 * 0.5 / count**0.5)


def test_a_draw_depends_on_seed_sample_and_position_and_not_on_its_neighbours():
    logits = jax.random.normal(jax.random.key(3), (6, 500))
    logits = jnp.concatenate([logits[:1]] * 3 + [logits[3:]])
    base = SamplingParams(temperature=1.0, seed=11)
    params = [base, base, base, SamplingParams(), SamplingParams(temperature=1.0, seed=12), base]
    positions = jnp.asarray([7, 7, 7, 1, 7, 9], jnp.int32)
    out = draw(logits, positions, rows(*params), filtered=False).tolist()
    assert out[0] == out[1] == out[2]
    assert out[3] == int(jnp.argmax(logits[3]))
    alone = [
        draw(logits[i : i + 1], positions[i : i + 1], rows(params[i]), filtered=True).tolist()[0] for i in range(6)
    ]
    assert alone == out
    # Each of the three alone moves the draw: fifty tokens drawn twice are not the same.
    same = jnp.broadcast_to(logits[0], (50, 500))
    drawn = set()
    for seed, sample, start in ((11, 0, 0), (12, 0, 0), (11 + 2**32, 0, 0), (11, 1, 0), (11, 0, 100)):
        one = SamplingParams(temperature=1.0, seed=seed)
        positions = jnp.arange(start, start + 50, dtype=jnp.int32)
        drawn.add(tuple(draw(same, positions, rows(*[one] * 50, samples=[sample] * 50), filtered=False).tolist()))
    assert len(drawn) == 5


def test_the_smallest_temperature_is_greedy_and_finite():
    logits = jnp.asarray([[3e38, -3e38, 3e37, 0.0], [1.0, 2.0, 3.0, 2.5]])
    params = rows(*[SamplingParams(temperature=1.2e-38, top_p=0.9)] * 2)
    assert draw(logits, jnp.zeros(2, jnp.int32), params, filtered=True).tolist() == [0, 2]


def test_the_likeliest_token_is_argmax_s_whatever_a_row_holds():
    nan, inf = np.nan, np.inf
    rows = [[1, 3, 3, 2], [-0.0, 0.0, -0.0, 0.0], [-inf] * 4, [2, inf, 1, inf], [5, nan, inf, nan], [nan] * 4]
    rows += [[-inf, nan, -inf, -inf], [inf, -nan, 0, 0], [-1, -2, -1, -5]]
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = jnp.asarray(rows, dtype)
        np.testing.assert_array_equal(greedy_tokens(logits), jnp.argmax(logits, axis=-1))
        np.testing.assert_array_equal(jax.jit(greedy_tokens)(logits), jnp.argmax(logits, axis=-1))
