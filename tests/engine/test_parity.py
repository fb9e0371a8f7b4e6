"""The parity tool itself: it accepts the dense path's own tokens, and a wrong one shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.engine import replay


def test_dense_tokens_are_no_flips_and_a_wrong_one_is(tiny, prompts):
    model, prompt = tiny(), prompts[3]
    dense = jax.jit(lambda model, tokens: model.dense(tokens))
    tokens = list(prompt)
    rows = []
    for _ in range(6):
        padded = jnp.zeros(64, jnp.int32).at[: len(tokens)].set(jnp.asarray(tokens))
        logits = np.asarray(dense(model, padded))[len(tokens) - 1].astype(np.float64)
        rows.append(logits)
        tokens.append(int(logits.argmax()))
    parity = replay(model, tokens, len(prompt))
    assert parity.flips(0.0) == []
    for i, logits in enumerate(rows):
        top = np.sort(logits)
        np.testing.assert_allclose(parity.top_gap[i], top[-1] - top[-2], atol=1e-4)
        np.testing.assert_allclose(parity.logprobs[i], top[-1] - np.log(np.exp(logits).sum()), atol=1e-4)
    second = int(np.argsort(rows[2])[-2])
    wrong = [*tokens[: len(prompt) + 2], second, *tokens[len(prompt) + 3 :]]
    flipped = replay(model, wrong, len(prompt))
    assert flipped.flips(parity.top_gap[2] / 2)[0] == 2
    np.testing.assert_allclose(flipped.behind[2], parity.top_gap[2], atol=1e-4)
    with pytest.raises(InvalidInputError, match="leave none generated"):
        replay(model, prompt, len(prompt))
