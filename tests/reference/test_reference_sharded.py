"""The same bits on 1, 2, 4 and 8 devices, on meshes of one and two axes, with no word between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from reference_compiled import addresses, collectives, new_tokens, scanned_step, small_step
from reference_problem import DTYPES, bits

from paged.backends.protocol import AttentionExtras
from paged.backends.sharding import KvSharding
from paged.common import AttentionSpec

SPEC = AttentionSpec(scale=0.3, window=7, soft_cap=1.7)
HEADS = (16, 8)
EXTRAS = AttentionExtras(sinks=jnp.asarray(np.linspace(-1, 1, 16, dtype=np.float32)))
MESHES = {
    "1": ((1,), ("tensor",), ("tensor",)),
    "2": ((2,), ("tensor",), ("tensor",)),
    "4": ((4,), ("model",), ("model",)),
    "8": ((8,), ("tensor",), ("tensor",)),
    "2x4": ((2, 4), ("data", "tensor"), ("tensor",)),
    "4x2-both": ((4, 2), ("expert", "model"), ("expert", "model")),
}
CASES = [("float32", name) for name in MESHES] + [("bfloat16", "8"), ("float16", "2x4")]


@pytest.fixture(scope="module")
def unsharded():
    answers = {}
    for dtype in DTYPES:
        batch, laid = small_step(dtype, heads=HEADS, num_pages=20)
        step = jax.jit(scanned_step(laid.table, SPEC, EXTRAS, num_layers=3))
        answers[dtype] = step(laid.pool, laid.query, *new_tokens(batch, laid), laid.arrays)
    return answers


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_shards_move_no_bit(unsharded, dtype, name):
    shape, axes, kv_axes = MESHES[name]
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    assert len(jax.devices()) == 8
    sharding = KvSharding(Mesh(devices, axes), kv_axes)
    batch, laid = small_step(dtype, heads=HEADS, num_pages=20)
    pool = jax.device_put(laid.pool, sharding.named(sharding.pool_spec))
    arguments = (pool, laid.query, *new_tokens(batch, laid), laid.arrays)
    step = jax.jit(scanned_step(laid.table, SPEC, EXTRAS, num_layers=3, sharding=sharding), donate_argnums=0)
    compiled = step.lower(*arguments).compile()
    heads = {s.data.shape[2] for s in pool.keys.addressable_shards}
    assert heads == {8 // sharding.kv_head_shards}  # scenario S1: one head per shard at 8
    before = addresses(pool)
    after, (out, lse) = compiled(*arguments)
    assert collectives(compiled) == []
    assert addresses(after) == before
    expected_pool, (expected_out, expected_lse) = unsharded[dtype]
    for got, expected in ((out, expected_out), (lse, expected_lse)):
        assert np.count_nonzero(bits(got) != bits(expected)) == 0
    for got, expected in ((after.keys, expected_pool.keys), (after.values, expected_pool.values)):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
        for shard in got.addressable_shards:  # every copy on an axis that shards no heads
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected)[shard.index])
