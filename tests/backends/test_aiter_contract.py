"""The FFI contract: lowered steps are compared with it to the bit width, and every kind of difference is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.kits.aiter import lowered
from conformance.kits.aiter.lowered import RUNGS, make_step, tensor8
from paged.backends.aiter import AiterBackend, contract, ops
from paged.backends.aiter.contract import APPEND, DECODE, PREFILL, TARGETS, check_lowering
from paged.backends.aiter.declared import read_source
from paged.backends.protocol import KvArrays
from paged.backends.step import attention_step

BACKEND = AiterBackend(lower_only=True)
B, T, N, P, HK, HQ, D = 3, 7, 6, 16, 2, 8, 128


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


ints = functools.partial(struct, dtype=jnp.int32)
POOLS = (struct(N, P, HK, D), struct(N, P, HK, D))
OPERANDS = {
    "AppendKvJA": (
        *(struct(T, HK, D), struct(T, HK, D), ints(T), struct(1, dtype=jnp.float32), struct(1, dtype=jnp.float32)),
        *POOLS,
    ),
    "PagedPrefillJA": (struct(T, HQ, D), *POOLS, ints(B + 1), ints(B + 1), ints(9), ints(B)),
}
ATTRIBUTES = {
    "AppendKvJA": {"kv_cache_dtype": "auto"},
    "PagedPrefillJA": {
        "scale": np.float32(1), "logits_soft_cap": np.float32(0), "max_seqlen_q": np.int64(7),
        "max_seqlen_k": np.int64(64), "causal": True, "window_size_left": np.int64(-1),
        "window_size_right": np.int64(-1),
    },
}  # fmt: skip
RESULTS = {"AppendKvJA": POOLS, "PagedPrefillJA": (struct(T, HQ, D),)}


def lower(target, operands=None, attributes=None, aliases=None, order=None):
    """A module with one call of `target`, by the contract unless something is given."""
    operands = OPERANDS[target] if operands is None else operands
    attributes = ATTRIBUTES[target] if attributes is None else attributes
    aliases = dict(TARGETS[target].aliases) if aliases is None else aliases

    def call(*arrays):
        arrays = arrays if order is None else tuple(arrays[i] for i in order)
        return jax.ffi.ffi_call(target, RESULTS[target], input_output_aliases=aliases)(*arrays, **attributes)

    return jax.jit(call).trace(*operands).lower(lowering_platforms=("rocm",))


def changed(target, **attributes):
    return {**ATTRIBUTES[target], **attributes}


def without(target, name):
    return {k: v for k, v in ATTRIBUTES[target].items() if k != name}


def swapped(target, a, b):
    names = [o.name for o in TARGETS[target].operands]
    i, j = names.index(a), names.index(b)
    order = list(range(len(names)))
    order[i], order[j] = j, i
    return order


@pytest.mark.parametrize("target", sorted(OPERANDS))
def test_a_call_by_the_contract_has_no_difference(target):
    assert check_lowering(lower(target), required=(target,)) == []


PREFILL_ID = PREFILL.contract_id
DIFFERENT = [
    # A Python float is an f64 attribute; the handler reads f32.
    ({"attributes": changed("PagedPrefillJA", scale=1.0)}, "attribute scale is f64, the contract has f32"),
    ({"attributes": changed("PagedPrefillJA", scale=np.float64(1))}, "attribute scale is f64"),
    ({"attributes": changed("PagedPrefillJA", max_seqlen_k=np.int32(6))}, "max_seqlen_k is i32, the contract has i64"),
    ({"attributes": changed("PagedPrefillJA", causal=1)}, "attribute causal is i64, the contract has i1"),
    ({"attributes": changed("PagedPrefillJA", max_seqlen_q=np.ones(1, np.int64))}, "attribute max_seqlen_q is"),
    ({"attributes": without("PagedPrefillJA", "window_size_left")}, "attribute window_size_left (i64) is missing"),
    ({"attributes": changed("PagedPrefillJA", sink=np.float32(0))}, "attribute sink is not in the contract"),
    ({"order": swapped("PagedPrefillJA", "kv_indptr", "kv_last_page_lens")}, "operand 4 (kv_indptr) has B+1 = 3"),
    ({"order": swapped("PagedPrefillJA", "query", "k_pool")}, "operand 0 (query) has 4 axes"),
    ({"order": swapped("PagedPrefillJA", "kv_page_indices", "kv_last_page_lens")}, "(kv_last_page_lens) has B = 9"),
    ({"operands": OPERANDS["PagedPrefillJA"][:6]}, "6 operands, the contract has 7"),
    ({"operands": (*OPERANDS["PagedPrefillJA"][:6], ints(B, dtype=jnp.int8))}, "(kv_last_page_lens) holds i8"),
    ({"operands": (struct(T, HQ, D, dtype=jnp.float16), *OPERANDS["PagedPrefillJA"][1:])}, "query holds f16"),
    ({"aliases": {0: 0}}, "operand 0 is aliased to result 0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), DIFFERENT)
def test_every_difference_of_a_prefill_call_is_named(change, said):
    found = check_lowering(lower("PagedPrefillJA", **change))
    assert any(said in line for line in found), found
    assert all(line.startswith("PagedPrefillJA: ") for line in found)


def test_another_abi_is_told_by_both_contract_ids():
    found = check_lowering(lower("PagedPrefillJA", attributes=changed("PagedPrefillJA", scale=1.0)))
    ids = next(line for line in found if "contract id" in line)
    assert PREFILL_ID in ids
    assert ids.count("PagedPrefillJA:") == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"aliases": {}}, "operand 5 (k_pool) is not aliased to result 0: the pool would be copied"),
        ({"aliases": {5: 0}}, "operand 6 (v_pool) is not aliased to result 1"),
        ({"aliases": {5: 1, 6: 0}}, "operand 5 is aliased to result 1"),
        ({"attributes": {"kv_cache_dtype": np.int64(0)}}, "attribute kv_cache_dtype is i64, the contract has string"),
        ({"attributes": {}}, "attribute kv_cache_dtype (string) is missing"),
        ({"order": swapped("AppendKvJA", "v_new", "slot_mapping")}, "operand 1 (v_new) holds i32"),
    ],
)
def test_every_difference_of_an_append_is_named(change, said):
    found = check_lowering(lower("AppendKvJA", **change))
    assert any(said in line for line in found), found


@pytest.mark.parametrize(("a", "b"), [("k_new", "v_new"), ("k_pool", "v_pool")])
def test_operands_of_one_type_are_told_apart_by_what_they_are_made_from(a, b):
    """K for V has the right types; only where the arrays come from tells."""
    arguments = {"k_new": (0,), "v_new": (1,), "k_pool": (5,), "v_pool": (6,)}
    assert check_lowering(lower("AppendKvJA"), arguments=arguments) == []
    module = lower("AppendKvJA", order=swapped("AppendKvJA", a, b))
    assert check_lowering(module) == []
    found = check_lowering(module, arguments=arguments)
    assert f"({a}) is made from {b}" in found[0]
    assert f"({b}) is made from {a}" in found[1]
    assert "is not made from argument [3]" in check_lowering(lower("AppendKvJA"), arguments={"k_new": (3,)})[0]


def test_what_is_not_there_and_what_is_not_typed_is_said():
    found = check_lowering(lower("AppendKvJA"), required=("AppendKvJA", "PagedAttentionJA"))
    assert found == ["PagedAttentionJA: the module has no call of it"]
    call = jax.ffi.ffi_call("AppendKvJA", POOLS, custom_call_api_version=2, input_output_aliases={5: 0, 6: 1})
    module = jax.jit(call).trace(*OPERANDS["AppendKvJA"]).lower(lowering_platforms=("rocm",)).compiler_ir("stablehlo")
    assert "AppendKvJA: the call is not one of XLA's typed FFI: it has no attribute dictionary" in check_lowering(
        module
    )


@pytest.mark.parametrize("kernel", sorted(RUNGS))
@pytest.mark.parametrize("layout", ["per_layer", "stacked"])
def test_a_whole_step_over_eight_devices_is_by_the_contract(kernel, layout):
    backend = AiterBackend(lower_only=True, pool_layout=layout)
    step = make_step(backend, RUNGS[kernel], tensor8())
    module = step.lower()
    assert check_lowering(module, required=("AppendKvJA", kernel), arguments=step.arguments) == []
    assert lowered.donation_fault(module, step) is None
    assert lowered.sharding_fault(module, tensor8()) is None
    assert lowered.collective_ops(module) == []
    assert len(lowered.calls_of(module, "AppendKvJA")) == len(lowered.calls_of(module, kernel)) == lowered.LAYERS


def test_a_value_swapped_for_a_key_in_a_step_is_found():
    def swap(backend, plan, pool, query, key, value, **more):
        return attention_step(backend, plan, pool, query, value, key, **more)

    step = make_step(BACKEND, RUNGS["PagedAttentionJA"], tensor8(), run=swap)
    found = check_lowering(step.lower(), arguments=step.arguments)
    assert found[0] == "AppendKvJA: operand 0 (k_new) is made from v_new"


def test_pools_swapped_between_append_and_attention_are_found(monkeypatch):
    decode = ops.decode

    def swap(query, pool, *rest, **more):
        return decode(query, KvArrays(pool.values, pool.keys), *rest, **more)

    monkeypatch.setattr(ops, "decode", swap)
    step = make_step(BACKEND, RUNGS["PagedAttentionJA"], None)
    found = check_lowering(step.lower(), arguments=step.arguments)
    assert "PagedAttentionJA: operand 1 (k_pool) is made from v_pool" in found


def test_a_pool_that_is_copied_or_not_donated_is_found(monkeypatch):
    step = make_step(BACKEND, RUNGS["PagedAttentionJA"], tensor8())
    kept = lowered.Step(jax.jit(step.program.__wrapped__), step.shapes, step.arguments)
    assert lowered.donation_fault(kept.lower(), kept) == "pool argument 0 of the program is not donated"

    append = ops.append

    def converted(pool, *rest):
        twice = KvArrays(pool.keys * jnp.bfloat16(2), pool.values)
        return append(twice, *rest)

    monkeypatch.setattr(ops, "append", converted)
    step = make_step(BACKEND, RUNGS["PagedAttentionJA"], tensor8())
    assert "takes or makes an array as large as the pool" in str(lowered.donation_fault(step.lower(), step))


def test_wrong_sharding_and_collectives_are_found():
    def outside(backend, plan, pool, *rest, sharding, **more):
        return attention_step(backend, plan, pool, *rest, sharding=None, **more)

    step = make_step(BACKEND, RUNGS["PagedAttentionJA"], tensor8(), run=outside)
    assert "called outside the manual computation" in str(lowered.sharding_fault(step.lower(), tensor8()))

    wide = lowered.sharding_over({"tensor": 4, "fsdp": 2}, ("tensor",))
    step = make_step(BACKEND, RUNGS["PagedPrefillJA"], wide)
    assert "gets 2 KV heads, a device's share is 1" in str(lowered.sharding_fault(step.lower(), tensor8()))

    def summed(x):
        return jax.lax.psum(x, "tensor")

    where = tensor8()
    spec = jax.sharding.PartitionSpec("tensor")
    program = jax.jit(jax.shard_map(summed, mesh=where.mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()))
    module = program.trace(struct(8)).lower(lowering_platforms=("rocm",)).compiler_ir("stablehlo")
    assert lowered.collective_ops(module) == ["stablehlo.all_reduce"]


def test_our_calls_give_every_attribute_the_contract_s_type():
    with pytest.raises(TypeError, match="PagedAttentionJA has the attributes"):
        ops.call(DECODE, (POOLS[0],), (), scale=1.0)
    assert {kind for t in TARGETS.values() for _, kind in t.attributes} <= set(ops._COERCE)


def test_the_contract_is_frozen():
    """A new id is another ABI: decide it, never let it slip."""
    assert {t.contract_id for t in TARGETS.values()} == {
        "AppendKvJA:79865c2fc78e4218",
        "PagedAttentionJA:3fb9807ea87e4ce5",
        "PagedPrefillJA:2278455b8f2f12bf",
        "KvAliasProbeJA:a823a212ce097fd2",
    }
    assert APPEND.aliases == ((5, 0), (6, 1))
    assert contract.contract_id("X", 1, 1, {"a": "f32", "b": "i64"}) == contract.contract_id(
        "X", 1, 1, {"b": "i64", "a": "f32"}
    )
    kinds = ({}, {"a": "f32"}, {"a": "f64"})
    ids = {contract.contract_id("X", a, r, kind) for a in (1, 2) for r in (1, 2) for kind in kinds}
    assert len(ids) == 12


SOURCE = """
// .Arg<ffi::AnyBuffer>() in a comment is nothing
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PagedPrefillJA, jax_aiter::PagedPrefill_Bridge,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<hipStream_t>>()
        .Arg<ffi::AnyBuffer>() // query (a, b)
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>() /* .Ret<ffi::AnyBuffer>() */
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Attr<float>("scale").Attr<float>("logits_soft_cap").Attr<int64_t>("max_seqlen_q")
        .Attr<int64_t>("max_seqlen_k").Attr<bool>("causal").Attr<int64_t>("window_size_left")
        .Attr<int64_t>("window_size_right"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(SomethingElseJA, f, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>());
"""


def test_declarations_are_read_from_sources():
    (found,) = read_source(SOURCE, "a.cu")
    assert found.matches
    assert found.contract_id == PREFILL_ID
    (other,) = read_source(SOURCE.replace('<float>("scale")', '<double>("scale")'), "a.cu")
    assert not other.matches
    assert ("scale", "f64") in other.attributes
    (fewer,) = read_source(SOURCE.replace(".Ret<ffi::AnyBuffer>()\n", "\n"), "a.cu")
    assert not fewer.matches
