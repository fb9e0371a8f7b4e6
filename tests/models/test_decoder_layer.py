"""One layer on pages against the same layer without a cache, ulp by ulp (requirement M1)."""

import jax
import jax.numpy as jnp
import numpy as np
from model_steps import Rows, drawn_decoder, tiny_config

from paged.backends.metadata import unpack_table
from paged.backends.registry import get_backend
from paged.backends.step import plan_step
from paged.common import AttentionSpec
from paged.models.attention import dense_attention, paged_attention
from paged.models.layers import Rotary

SPEC = AttentionSpec(scale=0.2, window=7, soft_cap=5.0)


def both_paths(backend, dtype):
    """The layer's output for 29 tokens, dense and paged."""
    config = tiny_config(num_layers=1, head_dim=64, hidden_size=64, block=(SPEC,))
    model = drawn_decoder(config, 0, dtype)
    layer = jax.tree.map(lambda w: w[0], model.layers[0])
    tokens = np.random.default_rng(0).integers(3, 96, 29).tolist()
    rows = Rows(model, backend=backend, dtype=dtype)
    (ids, positions, _, vector), static = rows.arguments([(0, 0, tokens)])

    @jax.jit
    def both(layer, pool):
        x, rotary = model._embed(ids), Rotary.at(positions, config)
        plan = plan_step(backend, unpack_table(vector, static["rung"]), static["rung"], SPEC)
        options = {"backend": backend, "layer": 0, "sharding": None}
        dense = layer(x, rotary, config, lambda heads: (dense_attention(*heads.split(), SPEC), None))[0]
        return dense, layer(x, rotary, config, lambda heads: paged_attention(*heads.split(), pool, plan, **options))[0]

    return [np.asarray(out)[: len(tokens)] for out in both(layer, rows.pool.take())]


def ulps(a, b, dtype):
    """Largest difference in units in the last place of `dtype`, element by element."""
    bits = jnp.finfo(dtype).nmant
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(a), np.abs(b)))) - bits)
    return np.max(np.abs(a - b) / ulp)


def test_a_float32_layer_agrees_with_dense_within_one_ulp():
    dense, paged = both_paths(get_backend("reference"), "float32")
    assert ulps(dense, paged, "float32") <= 1


def test_a_bfloat16_layer_on_float32_kernels_agrees_within_one_ulp():
    dense, paged = both_paths(get_backend("xla"), "bfloat16")
    scale = np.abs(dense.astype(np.float32)).max(-1, keepdims=True)
    one = 2.0 ** (np.floor(np.log2(scale)) - 7)
    assert np.all(np.abs(dense.astype(np.float32) - paged.astype(np.float32)) <= one)


def test_the_measure_sees_two_ulps():
    assert ulps(np.float32(1), np.float32(1) + np.float32(2.0**-22), "float32") == 2


def test_dense_attention_against_a_loop():
    """The dense side has an oracle of its own: a loop over tokens, heads and visible positions."""
    rng = np.random.default_rng(1)
    query, key, value = (rng.standard_normal((9, h, 4)).astype(np.float32) for h in (6, 2, 2))
    for spec in (AttentionSpec(scale=0.5), AttentionSpec(scale=0.7, window=3, soft_cap=2.0)):
        want = np.zeros((9, 6, 4))
        for t in range(9):
            for h in range(6):
                seen = [s for s in range(t + 1) if spec.window is None or s > t - spec.window]
                logits = np.array([spec.scale * (query[t, h].astype(float) @ key[s, h // 3]) for s in seen])
                if spec.soft_cap is not None:
                    logits = spec.soft_cap * np.tanh(logits / spec.soft_cap)
                weights = np.exp(logits - logits.max())
                want[t, h] = weights @ value[seen, h // 3] / weights.sum()
        got = dense_attention(*(jnp.asarray(x) for x in (query, key, value)), spec)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
