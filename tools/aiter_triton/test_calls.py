"""The handlers: what they refuse, what they leave alone, and that one launch is under way at a time."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from aiter_triton import ffi, kernels
from conformance import execute
from conformance.catalogue import load
from conformance.kits.aiter.calls import run
from conformance.kits.aiter.lowered import sharding_over
from paged.backends.aiter import contract, ops
from paged.backends.protocol import KvArrays


@pytest.fixture(autouse=True)
def started(executor):
    return executor


def pool(dtype=jnp.float16):
    shape = (4, 16, 1, 16)
    return KvArrays(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def appended(held, tokens, slots):
    new = jnp.arange(1.0, tokens * 16 + 1, dtype=held.keys.dtype).reshape(tokens, 1, 16)
    run = jax.jit(ops.append, donate_argnums=0)
    return new, run(held, new, -new, jnp.asarray(slots, jnp.int32))


def test_append_writes_in_place_and_skips_negative_slots():
    held = pool()
    before = [array.unsafe_buffer_pointer() for array in (held.keys, held.values)]
    new, after = appended(held, 3, [17, -1, 63])
    assert [array.unsafe_buffer_pointer() for array in (after.keys, after.values)] == before
    want = np.zeros((64, 16), np.float16)
    want[[17, 63]] = np.asarray(new)[[0, 2], 0]
    np.testing.assert_array_equal(np.asarray(after.keys).reshape(64, 16), want)
    np.testing.assert_array_equal(np.asarray(after.values).reshape(64, 16), -want)


def test_a_step_without_tokens_writes_nothing():
    _, after = appended(pool(), 0, np.zeros(0, np.int32))
    assert not np.asarray(after.keys).any()


def test_subnormal_words_are_moved_although_xla_flushes_them():
    held = pool(jnp.bfloat16)
    words = np.full((1, 1, 16), 0x0001, np.uint16)
    run = jax.jit(ops.append, donate_argnums=0)
    new = jnp.asarray(words.view(jnp.bfloat16))
    after = run(held, new, new, jnp.asarray([5], jnp.int32))
    for array in (after.keys, after.values):
        np.testing.assert_array_equal(np.asarray(array)[0, 5].view(np.uint16), words[0])


def test_a_pool_that_is_not_aliased_is_refused():
    held, one = pool(), jnp.ones(1, jnp.float32)
    new, slots = jnp.ones((1, 1, 16), jnp.float16), jnp.zeros(1, jnp.int32)
    results = (jax.ShapeDtypeStruct(held.keys.shape, held.keys.dtype),) * 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="not aliased to its result: donate it"):
        jax.block_until_ready(
            jax.ffi.ffi_call("AppendKvJA", results)(
                new, new, slots, one, one, held.keys, held.values, kv_cache_dtype="auto"
            )
        )


def prefill(**changes):
    held, query = pool(), jnp.ones((2, 1, 16), jnp.float16)
    attributes = {
        "scale": 1.0, "logits_soft_cap": 0.0, "max_seqlen_q": 2, "max_seqlen_k": 2, "causal": True,
        "window_size_left": -1, "window_size_right": -1,
    }  # fmt: skip
    offsets = jnp.asarray([0, 2], jnp.int32)
    lists = (jnp.asarray([0, 1], jnp.int32), jnp.asarray([1, 0], jnp.int32), jnp.asarray([2], jnp.int32))
    operands = (query, held.keys, held.values, offsets, *lists)
    return jax.block_until_ready(ops.call(contract.PREFILL, (query,), operands, **{**attributes, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits_soft_cap": 30.0}, "logits_soft_cap is 30.0"),
        ({"causal": False}, "got causal False"),
        ({"window_size_left": 3, "window_size_right": 1}, r"the window \(3, 1\)"),
    ],
)
def test_options_that_the_kernel_has_not_are_refused(changes, words):
    prefill()
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        prefill(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": 1.0}, "attribute scale is f64, the contract has f32"),
        ({"max_seqlen_q": np.int32(2)}, "attribute max_seqlen_q is i32, the contract has i64"),
        ({"causal": np.int64(1)}, "attribute causal is i64, the contract has i1"),
        ({"extra": np.int64(1)}, "attributes .*extra"),
    ],
)
def test_a_call_that_is_not_by_the_contract_is_refused(changes, words):
    held, query = pool(), jnp.ones((2, 1, 16), jnp.float16)
    given = {
        "scale": np.float32(1), "logits_soft_cap": np.float32(0), "max_seqlen_q": np.int64(2), "causal": True,
        "max_seqlen_k": np.int64(2), "window_size_left": np.int64(-1), "window_size_right": np.int64(-1),
    }  # fmt: skip
    lists = (jnp.asarray([0, 1], jnp.int32), jnp.asarray([1, 0], jnp.int32), jnp.asarray([2], jnp.int32))
    operands = (query, held.keys, held.values, jnp.asarray([0, 2], jnp.int32), *lists)
    # Jitted anew each time: to jax's cache of calls, 1.0 and float32(1) are one value.
    run(contract.PREFILL, (query,), operands, **given)
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        run(contract.PREFILL, (query,), operands, **{**given, **changes})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays: arrays[:-1], "6 operands, the contract has 7"),
        (lambda arrays: [*arrays[:-1], arrays[-1].astype(jnp.float32)], r"kv_last_page_lens is f32\[1\]"),
        (lambda arrays: [arrays[0][0], *arrays[1:]], r"query is f16\[1, 16\]"),
    ],
)
def test_arrays_that_are_not_by_the_contract_are_refused(change, words):
    held, query = pool(), jnp.ones((2, 1, 16), jnp.float16)
    arrays = [query, held.keys, held.values, *(jnp.asarray(x, jnp.int32) for x in ([0, 2], [0, 1], [1, 0], [2]))]
    attributes = {
        "scale": np.float32(1), "logits_soft_cap": np.float32(0), "max_seqlen_q": np.int64(2), "causal": True,
        "max_seqlen_k": np.int64(2), "window_size_left": np.int64(-1), "window_size_right": np.int64(-1),
    }  # fmt: skip
    call = jax.ffi.ffi_call("PagedPrefillJA", jax.ShapeDtypeStruct(query.shape, query.dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(call(*change(arrays), **attributes))


def test_long_text_arrives_whole_and_leaves_the_heap_alone():
    seen = []
    handler = ffi.capsule(lambda call: seen.append(call.attributes["name"]))
    jax.ffi.register_ffi_target("aiter_triton_text", handler, platform="cpu")
    call = jax.ffi.ffi_call("aiter_triton_text", jax.ShapeDtypeStruct((1,), jnp.float32), has_side_effect=True)
    for size in (0, 7, 8, 42, 5000):
        program = jax.jit(functools.partial(call, name="x" * size))
        for _ in range(20):
            jax.block_until_ready(program())
        assert seen[-1] == ffi.Attribute("string", "x" * size)


def test_a_workspace_that_is_too_small_is_refused():
    held, query = pool(), jnp.ones((1, 1, 16), jnp.float16)
    lists = (jnp.asarray([0, 1], jnp.int32), jnp.asarray([1], jnp.int32), jnp.asarray([2], jnp.int32))
    attributes = {"scale": 1.0, "max_num_partitions": 2, "func_name": ""}
    with pytest.raises(jax.errors.JaxRuntimeError, match="the workspace has 8 bytes, 80 are needed"):
        jax.block_until_ready(ops.decode(query, held, lists, workspace_bytes=8, attributes=attributes))


def test_devices_call_at_once_and_launches_take_turns(session, monkeypatch):
    attend, threads, inside, most = kernels.attend, set(), [], []

    def watched(*given, **options):
        threads.add(threading.get_ident())
        with kernels.launching():
            inside.append(1)
            most.append(len(inside))
            attend(*given, **options)
            inside.pop()

    monkeypatch.setattr(kernels, "attend", watched)
    problem = session.vector(load().case("sharded/address/d128/tensor8")).problem
    execute.attend(session.backend, problem, sharding=sharding_over({"tensor": 8}, ("tensor",)))
    assert len(most) == 8
    assert max(most) == 1
    assert len(threads) > 1


def test_a_block_table_is_a_tile_wider_than_its_rows():
    """What the kernel loads past a row's pages must be there (finding `block-table-overread`)."""
    offsets, ids = torch.tensor([0, 3, 4]), torch.tensor([7, 5, 6, 9], dtype=torch.int32)
    table = kernels.table_of(offsets, ids, 16)
    assert table.tolist() == [[7, 5, 6, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0, 0]]
