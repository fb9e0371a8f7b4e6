"""Weights laid over a mesh by the rules beside the config (requirements S1, S2, S4)."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from model_steps import Rows, tiny_config

from paged.backends.sharding import KvSharding
from paged.common import InvalidInputError
from paged.models import decoder_specs, random_decoder, shard_decoder

CONFIG = tiny_config(num_query_heads=16, num_kv_heads=8, head_dim=8, intermediate_size=64)
MESHES = {
    "tensor=2": ((2,), ("tensor",), ("tensor",)),
    "tensor=8": ((8,), ("tensor",), ("tensor",)),
    "data=2,tensor=4": ((2, 4), ("data", "tensor"), ("tensor",)),
    "a=2,b=2,c=2 over a and c": ((2, 2, 2), ("a", "b", "c"), ("a", "c")),
}


def sharding_of(name, kind=AxisType.Auto):
    shape, names, axes = MESHES[name]
    devices = np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape)
    return KvSharding(Mesh(devices, names, axis_types=(kind,) * len(names)), axes)


@pytest.fixture(scope="module")
def model():
    return random_decoder(CONFIG, jax.random.key(0))


def serve(model, **options):
    """Prefill of two rows, then a step that mixes decode with prefill: four rows of logits."""
    rows = Rows(model, **options)
    a, b, c = np.random.default_rng(3).integers(3, 96, (3, 9)).tolist()
    first = rows.step([(0, 0, a[:7]), (1, 0, b[:5])], width=16)
    return np.concatenate([first, rows.step([(0, 7, a[7:8]), (2, 0, c)], width=16)])


@pytest.fixture(scope="module")
def alone(model):
    return serve(model)


@pytest.mark.parametrize("name", MESHES)
def test_a_sharded_model_gives_the_same_logits(name, model, alone):
    sharding = sharding_of(name)
    got = serve(shard_decoder(model, sharding), sharding=sharding)
    np.testing.assert_allclose(got, alone, rtol=0, atol=2e-5 * np.abs(alone).max())
    assert (got.argmax(-1) == alone.argmax(-1)).all()


def test_each_device_holds_its_share_and_copies_lie_on_the_other_axes(model):
    sharding = sharding_of("data=2,tensor=4")
    sharded = shard_decoder(model, sharding)
    layer = sharded.layers[0]
    shapes = {
        "qkv": (layer.attention.qkv, (2, 2, 4, 8, 32)),
        "output": (layer.attention.output, (2, 32, 32)),
        "gate and up": (layer.mlp.gate_up, (2, 2, 16, 32)),
        "down": (layer.mlp.down, (2, 32, 16)),
        "norm": (layer.attention_norm, (2, 32)),
        "embedding": (sharded.embedding, (24, 32)),
    }
    for name, (weight, shape) in shapes.items():
        assert {s.data.shape for s in weight.addressable_shards} == {shape}, name
    first, copy = (layer.attention.qkv.addressable_shards[i] for i in (0, 4))
    assert first.index == copy.index
    assert (np.asarray(first.data) == np.asarray(copy.data)).all()


def test_random_weights_are_the_same_sharded_or_not(model):
    sharding = sharding_of("tensor=2")
    there = random_decoder(CONFIG, jax.random.key(0), sharding=sharding)
    assert there.layers[0].attention.qkv.sharding == sharding.named(PartitionSpec(None, ("tensor",)))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), model, there)))


def test_a_vocabulary_that_does_not_divide_is_replicated():
    specs = decoder_specs(tiny_config(vocab_size=97, num_kv_heads=4), sharding_of("tensor=2"))
    assert specs.embedding == PartitionSpec(None, None)
    assert specs.head == PartitionSpec(None, None)
    assert specs.layers[0].attention.qkv == PartitionSpec(None, ("tensor",))


def test_heads_that_do_not_divide_are_refused_with_the_way_out():
    with pytest.raises(InvalidInputError, match=r"num_kv_heads=4 does not divide over 8 shards.*e\.g\. 4 × 2"):
        decoder_specs(tiny_config(num_kv_heads=4), sharding_of("tensor=8"))
    with pytest.raises(InvalidInputError, match=r"intermediate_size=50 does not divide over 4 shards"):
        decoder_specs(tiny_config(num_kv_heads=4, intermediate_size=50), sharding_of("data=2,tensor=4"))
