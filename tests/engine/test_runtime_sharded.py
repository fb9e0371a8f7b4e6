"""The same tokens over 2, 4 and 8 devices, each holding its share of the pool at the same addresses."""

import dataclasses

import jax
import numpy as np
import pytest

from paged.common import InvalidInputError
from paged.engine import replay
from paged.models import shard_decoder

TIE = 1e-3


@pytest.fixture(scope="module")
def serve(prompts):
    """Two arrivals, a release and a reuse of its pages; prompt and tokens of every request, and the runtime."""

    def run(runtime):
        done = []
        first = [runtime.add(p) for p in (prompts[5], prompts[3], prompts[2])]
        runtime.prefill(first)
        for _ in range(6):
            runtime.decode(first)
        done.append((prompts[5], runtime.tokens(first[0])))
        runtime.release(first[0])
        late = runtime.add(prompts[4])
        runtime.prefill([late])
        open_now = [late, *first[1:]]
        for _ in range(6):
            runtime.decode(open_now)
        done += [(p, runtime.tokens(h)) for p, h in zip((prompts[4], prompts[3], prompts[2]), open_now)]
        return done

    return run


@pytest.fixture(scope="module")
def alone(make_runtime, serve):
    return serve(make_runtime(num_pages=20))


@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (8, 1), (4, 2)])
def test_sharded_steps_give_the_same_tokens(tiny, make_runtime, tensor_mesh, serve, alone, shards, replicas):
    sharding = tensor_mesh(shards, replicas)
    runtime = make_runtime(shard_decoder(tiny(), sharding), num_pages=20, sharding=sharding)
    before = runtime.pool.addresses()
    assert len(set(before)) == 2 * shards * replicas
    got = serve(runtime)
    assert runtime.pool.addresses() == before
    assert {s.data.shape[2] for s in runtime.pool.arrays.keys.addressable_shards} == {8 // shards}
    for (prompt, tokens), (_, expected) in zip(got, alone):
        parity = replay(tiny(), tokens, len(prompt))
        assert parity.flips(TIE) == []
        if parity.top_gap.min() > TIE:  # no tie on the way: nothing may differ at all
            assert tokens == expected
    assert sum(tokens == expected for (_, tokens), (_, expected) in zip(got, alone)) >= 3
    runtime.plane.verify()


def test_sampled_tokens_are_the_same_on_every_device(tiny, make_runtime, tensor_mesh, prompts, monkeypatch):
    from paged.engine import runner as module

    kept = []
    sharding = tensor_mesh(2, 1)
    runtime = make_runtime(shard_decoder(tiny(), sharding), num_pages=20, sharding=sharding)
    program = module.step

    def spy(*args):
        out = program(*args)
        kept.append(out[1:])
        return out

    monkeypatch.setattr(module, "step", spy)
    runtime.prefill([runtime.add(prompts[3])])
    for leaf in jax.tree.leaves(kept[0]):
        assert leaf.is_fully_replicated
        copies = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert len(copies) == 2
        np.testing.assert_array_equal(copies[0], copies[1])


def test_a_model_that_is_elsewhere_is_refused(tiny, make_runtime, tensor_mesh):
    with pytest.raises(InvalidInputError, match=r"weights are on 1 devices, .*mesh \{'fsdp': 1, 'tensor': 2\}"):
        make_runtime(sharding=tensor_mesh(2))
    with pytest.raises(InvalidInputError, match=r"weights are on 2 devices, .*one device \(no sharding was given\)"):
        make_runtime(shard_decoder(tiny(), tensor_mesh(2)))


def test_more_shards_than_kv_heads_are_refused_with_a_way_out(tiny, make_runtime, tensor_mesh):
    # Refused before anything runs, so the weights' shapes do not matter here.
    sharding = tensor_mesh(8)
    model = jax.device_put(tiny(), sharding.named(jax.sharding.PartitionSpec()))
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, num_kv_heads=4))
    with pytest.raises(InvalidInputError, match="Put the surplus on an axis that does not shard KV heads"):
        make_runtime(model, sharding=sharding)
