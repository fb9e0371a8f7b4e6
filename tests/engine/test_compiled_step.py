"""What the step compiles to: the pool stays where it is, nothing is as large as it, no dense cache (B7, M1, M3)."""

import dataclasses

import jax
import numpy as np
import pytest

from conformance.hlo import parse, pool_sized, problems
from paged.control import Slice
from paged.engine import Runtime
from paged.engine import runner as runner_module
from paged.engine import step as step_module
from paged.engine.step import Apart, jitted, jitted_apart, step, traced_step
from paged.models import shard_decoder

POSITIONS = 4096


@pytest.fixture(scope="module")
def prepare(tiny, tensor_mesh):
    """A runtime for texts of 4096 tokens, and one prepared step of five tokens."""

    def make(shards=1, dtype="float32"):
        sharding = None if shards == 1 else tensor_mesh(shards)
        model = tiny() if sharding is None else shard_decoder(tiny(), sharding)
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, max_positions=POSITIONS))
        options = {"num_pages": 1100, "tokens_per_page": 4, "max_requests": 2, "max_step_tokens": 16}
        runtime = Runtime(model, "xla", kv_dtype=dtype, sharding=sharding, **options)
        return runtime, runtime.prepare_step([Slice(runtime.add([1, 2, 3, 4, 5]), 0, 5)])

    return make


def compiled(program, runtime, prepared):
    """The program that `runtime.run(prepared)` runs, compiled and not run."""
    runner, packed = runtime.runner, prepared.packed
    arguments = (runner.program, packed.rung, runner.model, runtime.pool.arrays, runner._previous, packed.vector)
    return program.lower(*arguments).compile()


def found(runtime, program):
    return problems(
        program.as_text(),
        pool_elements=runtime.pool.arrays.keys.addressable_shards[0].data.size,
        pool_bytes=runtime.layout.bytes_per_device,
        alias_bytes=program.memory_analysis().alias_size_in_bytes,
    )


@pytest.mark.parametrize(("shards", "dtype"), [(1, "bfloat16"), (8, "float32")])
def test_the_pool_is_written_in_place_and_there_is_no_dense_cache(prepare, shards, dtype):
    runtime, prepared = prepare(shards, dtype)
    program = compiled(jitted("cpu"), runtime, prepared)
    assert found(runtime, program) == []
    # A dense cache would hold, for one layer, two rows of 4096 positions of this device's heads.
    dense = 2 * POSITIONS * (8 // shards) * 8
    assert pool_sized(parse(program.as_text()), dense) == []


def test_the_reading_can_fail(prepare):
    runtime, prepared = prepare()
    undonated = jax.jit(traced_step, static_argnums=(0, 1))
    sentences = found(runtime, compiled(undonated, runtime, prepared))
    assert any("it is not donated" in one for one in sentences)
    assert any("copy" in one for one in sentences)


def test_the_host_sends_one_array_in_a_step(prepare, monkeypatch):
    seen = []
    monkeypatch.setattr(runner_module, "step", lambda *arguments: seen.append(arguments) or step(*arguments))
    runtime, prepared = prepare()
    runtime.run(prepared)
    (arguments,) = seen
    from_host = [x for x in jax.tree.leaves(arguments[2:]) if not isinstance(x, jax.Array)]
    assert len(from_host) == 1
    assert isinstance(from_host[0], np.ndarray)
    assert (from_host[0].dtype, from_host[0].ndim) == (np.int32, 1)


def test_a_block_by_itself_writes_the_pool_in_place(prepare, monkeypatch):
    """What one CPU runs: no loop over layers, so no weight is copied out of a stacked array either."""
    begin, block, end = jitted_apart()
    seen = []

    def lowered(*arguments):
        seen.append(block.lower(*arguments) if not seen else None)
        return block(*arguments)

    monkeypatch.setattr(step_module, "jitted_apart", lambda: (begin, lowered, end))
    runtime, prepared = prepare()
    runtime.run(prepared)
    assert len(seen) == runtime.model.config.num_blocks
    assert found(runtime, seen[0].compile()) == []


def test_weights_of_a_block_lie_in_the_stacked_arrays(tiny):
    model = tiny(num_layers=4)
    stacked = model.layers[0].mlp.gate_up
    for i, (layer,) in enumerate(Apart.of(model).blocks):
        assert layer.mlp.gate_up.unsafe_buffer_pointer() == stacked.unsafe_buffer_pointer() + i * stacked[i].nbytes
        np.testing.assert_array_equal(layer.attention.qkv, model.layers[0].attention.qkv[i])


def test_blocks_by_themselves_and_a_loop_give_the_same_tokens(make_runtime, prompts, run_greedy):
    by_block, looped = make_runtime(), make_runtime(scan=True)
    assert (by_block.runner.program.apart, looped.runner.program.apart) == (True, False)
    for prompt in prompts[2:4]:
        tokens = [run_greedy(runtime, runtime.add(prompt), 5) for runtime in (by_block, looped)]
        assert tokens[0] == tokens[1]
