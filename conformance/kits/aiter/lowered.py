"""Whole steps lowered for ROCm on any machine: what calls what, with which types, aliases and shardings."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from conformance.environment import all_devices
from conformance.kits.run import Context, check
from paged.backends.aiter.contract import check_lowering
from paged.backends.metadata import unpack_table
from paged.backends.moves import pool_structs
from paged.backends.protocol import Rung
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, plan_step
from paged.common import AttentionSpec, StorageLayout

LAYERS, KV_HEADS, GROUP, HEAD_DIM, PAGES, PAGE = 2, 8, 4, 128, 12, 16
RUNGS = {
    "decode": Rung(
        rows=5, tokens=5, listed_pages=9, max_query_len=1, max_kv_len=300, tokens_per_page=PAGE, num_pages=PAGES
    ),
    "mixed": Rung(
        rows=5, tokens=24, listed_pages=9, max_query_len=16, max_kv_len=300, tokens_per_page=PAGE, num_pages=PAGES
    ),
}


def step_program(backend: Any, rung: Rung, spec: AttentionSpec, sharding: KvSharding | None) -> Any:
    """A step of `LAYERS` layers over a donated pool, and its arguments as shapes: `jax.jit`'s function and a tuple."""
    rung = rung.with_heads(group_size=GROUP, head_dim=HEAD_DIM, kv_dtype="bfloat16")
    shards = 1 if sharding is None else sharding.kv_head_shards
    replicas = 1 if sharding is None else sharding.pool_replicas
    layout = StorageLayout(
        num_layers=LAYERS, num_pages=PAGES, tokens_per_page=PAGE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        dtype="bfloat16", kv_head_shards=shards, pool_replicas=replicas,
    )  # fmt: skip
    stacked = backend.capabilities.pool_layout == "stacked"
    one = pool_structs(layout, backend.capabilities)
    pools: Any = one if stacked else (one,) * LAYERS

    def step(pools: Any, query: Any, key: Any, value: Any, packed: Any) -> Any:
        plan = plan_step(backend, unpack_table(packed, rung), rung, spec)
        out, held = query, [pools] * LAYERS if stacked else list(pools)
        for layer in range(LAYERS):
            pool = held[0] if stacked else held[layer]
            out, _, pool = attention_step(backend, plan, pool, out, key, value, layer=layer, sharding=sharding)
            held[0 if stacked else layer] = pool
        return out, held[0] if stacked else tuple(held)

    words = 2 * (rung.rows + 1) + 2 * rung.rows + rung.listed_pages + rung.tokens
    struct = functools.partial(jax.ShapeDtypeStruct)
    heads = None if sharding is None else sharding.named(sharding.heads_spec)
    whole = None if sharding is None else sharding.named(jax.sharding.PartitionSpec())
    pool_sharding = None if sharding is None else sharding.named(sharding.pool_spec)
    arguments = (
        jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=pool_sharding), pools),
        struct((rung.tokens, KV_HEADS * GROUP, HEAD_DIM), jnp.bfloat16, sharding=heads),
        struct((rung.tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16, sharding=heads),
        struct((rung.tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16, sharding=heads),
        struct((words,), jnp.int32, sharding=whole),
    )
    return jax.jit(step, donate_argnums=0), arguments


def lower(program: Any, arguments: Any) -> Any:
    """The program lowered for ROCm; no target has to be registered and no device has to be there."""
    return program.trace(*arguments).lower(lowering_platforms=("rocm",))


def sharding_over(sizes: dict[str, int], axes: tuple[str, ...]) -> KvSharding:
    """A mesh of this process's devices, heads over the named axes."""
    count = 1
    for size in sizes.values():
        count *= size
    return KvSharding(jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=all_devices()[:count]), axes)


@check("kit/lowering/step")
def lowering(context: Context) -> Any:
    """Both kernels, eight devices: every call is by the contract."""
    sharding = sharding_over({"tensor": 8}, ("tensor",))
    calls = 0
    for name, rung in RUNGS.items():
        module = lower(*step_program(context.backend, rung, AttentionSpec(scale=0.125), sharding)).compiler_ir(
            "stablehlo"
        )
        kernel = "PagedAttentionJA" if name == "decode" else "PagedPrefillJA"
        if found := check_lowering(module, required=("AppendKvJA", kernel)):
            return context.failed(f"{name}: {found[0]} ({len(found)} differences)", differences=found)
        calls += 2 * LAYERS
    return context.passed(calls)
