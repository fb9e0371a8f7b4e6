"""Layers by a backend's own kernels: which layers of weights and pool a call is for, and when a backend is asked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import Rows, drawn_decoder, tiny_config

from paged.backends.protocol import LayerKernels, PackedHeads
from paged.backends.step import packed_attention_step
from paged.backends.xla.backend import XlaBackend
from paged.common import AttentionSpec
from paged.models.layers import linear, rms_norm


@dataclasses.dataclass(frozen=True)
class Plain:
    """`LayerKernels` in plain jnp, layer by layer; what the next layer adds travels in two parts."""

    backend: XlaBackend

    def start(self, x):
        return jnp.zeros((2, *x.shape), jnp.float32)

    def layers(self, x, parts, pool, weights, counter, at, cos, sin, plan, eps):
        for i in range(at.count):
            index = counter * at.times + at.plus + i
            w = jax.tree.map(lambda a: a[index], weights)  # noqa: B023
            x = x + parts.sum(0).astype(x.dtype)
            heads = PackedHeads(linear(rms_norm(x, w.attention_norm, eps), w.qkv), cos, sin)
            layer = index * at.block + at.position
            out, _, pool = packed_attention_step(self.backend, plan, pool, heads, layer=layer)
            x = x + linear(out.reshape(x.shape[0], -1), w.output)
            both = linear(rms_norm(x, w.mlp_norm, eps), w.gate_up)
            added = linear(jax.nn.silu(both[:, 0]) * both[:, 1], w.down).astype(jnp.float32)
            parts = jnp.stack([0.75 * added, 0.25 * added])
        return x, parts, pool


@dataclasses.dataclass(frozen=True)
class WithKernels(XlaBackend):
    """The default CPU backend, which offers kernels for steps of at most `most` tokens."""

    most: int = 0
    seen: list = dataclasses.field(default_factory=list, compare=False)

    def layer_kernels(self, plan, sizes, dtype):
        self.seen.append((plan.rung.tokens, sizes.head_dim, dtype))
        return Plain(XlaBackend()) if plan.rung.tokens <= self.most else None


BLOCKS = {
    "one": {"num_layers": 3},
    "two": {
        "num_layers": 6,
        "block": (AttentionSpec(scale=0.25), AttentionSpec(scale=0.25, window=5)),
    },
}


@pytest.mark.parametrize("name", BLOCKS)
def test_each_call_is_for_its_own_layers_of_weights_and_pool(name):
    model = drawn_decoder(tiny_config(**BLOCKS[name]), 0)
    offering = WithKernels(most=32)
    plain, kernels = Rows(model), Rows(model, backend=offering)
    slices = [(0, 0, [5, 6, 7, 8, 9, 10, 11]), (2, 0, [12, 13])]
    for step in (slices, [(0, 7, [14]), (2, 2, [15])]):
        want, got = plain.step(step), kernels.step(step)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert {head_dim for _, head_dim, _ in offering.seen} == {16}
    for a, b in zip(jax.tree.leaves(plain.pool.arrays), jax.tree.leaves(kernels.pool.arrays)):
        # Pages of every layer hold the same tokens: sums in another order differ in the last places only.
        a, b = (np.asarray(x).view(np.float32) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-5)


def test_a_backend_that_declines_leaves_the_layers_to_the_model():
    model = drawn_decoder(tiny_config(), 0)
    declining = WithKernels(most=0)
    plain, other = Rows(model), Rows(model, backend=declining)
    slices = [(1, 0, [5, 6, 7])]
    np.testing.assert_array_equal(other.step(slices), plain.step(slices))
    assert declining.seen, "it was not asked"


def test_the_stand_in_is_what_a_backend_would_offer():
    assert isinstance(Plain(XlaBackend()), LayerKernels)
