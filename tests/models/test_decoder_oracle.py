"""The decoder against a Llama in numpy float64 that shares no code with it."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import drawn_decoder, tiny_config

from paged.common import AttentionSpec


def llama(model, tokens):
    """Logits after every token. Rotary as multiplication of complex numbers, attention as a loop over queries."""
    c = model.config
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), model)
    half = c.head_dim // 2
    factors = np.ones(half) if c.rope_factors is None else np.asarray(c.rope_factors)
    turns = np.arange(len(tokens))[:, None] / (c.rope_theta ** (np.arange(half) * 2 / c.head_dim) * factors)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_eps) * weight

    def rotate(x):
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    def attend(q, k, v, spec):
        out = np.zeros_like(q)
        for t in range(len(tokens)):
            first = 0 if spec.window is None else max(0, t + 1 - spec.window)
            for h in range(c.num_query_heads):
                g = h // (c.num_query_heads // c.num_kv_heads)
                logits = k[first : t + 1, g] @ q[t, h] * spec.scale
                if spec.soft_cap is not None:
                    logits = spec.soft_cap * np.tanh(logits / spec.soft_cap)
                p = np.exp(logits - logits.max())
                out[t, h] = p / p.sum() @ v[first : t + 1, g]
        return out

    x = w.embedding[tokens]
    for i in range(c.num_layers):
        block, j = divmod(i, len(c.block))
        layer = jax.tree.map(operator.itemgetter(block), w.layers[j])
        y = norm(x, layer.attention_norm)
        q, k, v = (
            (y @ m.T).reshape(len(tokens), -1, c.head_dim)
            for m in (layer.attention.query, layer.attention.key, layer.attention.value)
        )
        heads = attend(rotate(q), rotate(k), v, c.block[j])
        x = x + heads.reshape(len(tokens), -1) @ layer.attention.output.T
        y = norm(x, layer.mlp_norm)
        gate = y @ layer.mlp.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer.mlp.up.T)) @ layer.mlp.down.T
    return norm(x, w.norm) @ (w.embedding if w.head is None else w.head).T


CONFIGS = {
    "tied, every head its own keys, a large epsilon": {
        "tied_embeddings": True,
        "num_kv_heads": 4,
        "rms_eps": 0.3,
    },
    "a block of two, scaled rotary": {
        "num_layers": 4,
        "block": (AttentionSpec(scale=0.25), AttentionSpec(scale=0.5, window=5, soft_cap=3.0)),
        "rope_theta": 100.0,
        "rope_factors": (1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 8.0),
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_dense_logits_are_those_of_the_oracle(name):
    model = drawn_decoder(tiny_config(**CONFIGS[name]), 4)
    tokens = np.random.default_rng(0).integers(0, 96, 21)
    got = jax.jit(lambda model, tokens: model.dense(tokens))(model, jnp.asarray(tokens, jnp.int32))
    want = llama(model, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * np.abs(want).max())
