"""Whole steps lowered for ROCm on any machine: what calls what, with which types, aliases and shardings.

Nothing is executed and no target has to be registered, so these checks are the same on every executor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from conformance.environment import all_devices
from conformance.kits.run import Context, check
from paged.backends.aiter.contract import TARGETS, check_lowering
from paged.backends.aiter.lowering import Call, donated, read_calls, split_axes, walk
from paged.backends.metadata import unpack_table
from paged.backends.moves import pool_structs
from paged.backends.protocol import Rung
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, plan_step
from paged.common import AttentionSpec, StorageLayout

LAYERS, KV_HEADS, GROUP, HEAD_DIM, PAGES, PAGE = 2, 8, 4, 128, 12, 16
_ROWS: dict[str, Any] = {"rows": 5, "listed_pages": 9, "max_kv_len": 300, "tokens_per_page": PAGE, "num_pages": PAGES}
RUNGS = {
    "PagedAttentionJA": Rung(tokens=5, max_query_len=1, **_ROWS),
    "PagedPrefillJA": Rung(tokens=24, max_query_len=16, **_ROWS),
}
"""The kernel that a step's attention goes to -> a rung that sends it there."""
MESHES = (({"tensor": 8}, ("tensor",)), ({"tensor": 4, "fsdp": 2}, ("tensor",)), (
    {"data": 2, "expert": 2, "model": 2}, ("model", "expert"),
))  # fmt: skip
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of `LAYERS` layers over a donated pool.

    - `program`: jitted, of (pools, query, key, value, packed table). `shapes`: its arguments.
    - `arguments`: operand name -> indices of the flat arguments that it must be made from.
    """

    program: Any
    shapes: tuple[Any, ...]
    arguments: dict[str, tuple[int, ...]]

    def lower(self) -> Any:
        """The MLIR module of the step, lowered for ROCm."""
        return self.program.trace(*self.shapes).lower(lowering_platforms=("rocm",)).compiler_ir("stablehlo")


def make_step(
    backend: Any,
    rung: Rung,
    sharding: KvSharding | None,
    *,
    dtype: str = "bfloat16",
    window: int | None = None,
    group: int = GROUP,
    run: Any = attention_step,
) -> Step:
    """The step of a model without the rest of the model: each layer's output is the next one's query.

    `run` is called as `attention_step`; the tests give wrong ones.
    """
    rung = rung.with_heads(group_size=group, head_dim=HEAD_DIM, kv_dtype=dtype)
    spec = AttentionSpec(scale=0.125, window=window)
    layout = StorageLayout(
        num_layers=LAYERS, num_pages=PAGES, tokens_per_page=PAGE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype,
        kv_head_shards=1 if sharding is None else sharding.kv_head_shards,
        pool_replicas=1 if sharding is None else sharding.pool_replicas,
    )  # fmt: skip
    stacked = backend.capabilities.pool_layout == "stacked"
    one = pool_structs(layout, backend.capabilities)
    pools = [one] if stacked else [one] * LAYERS

    def step(pools: Any, query: Any, key: Any, value: Any, packed: Any) -> Any:
        plan = plan_step(backend, unpack_table(packed, rung), rung, spec)
        out, held = query, list(pools)
        for layer in range(LAYERS):
            at = 0 if stacked else layer
            out, _, held[at] = run(backend, plan, held[at], out, key, value, layer=layer, sharding=sharding)
        return out, held

    def struct(shape: tuple[int, ...], kind: Any, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
        where = None if sharding is None else sharding.named(spec or PartitionSpec())
        return jax.ShapeDtypeStruct(shape, kind, sharding=where)

    heads = None if sharding is None else sharding.heads_spec
    words = 4 * rung.rows + 2 + rung.listed_pages + rung.tokens
    new = struct((rung.tokens, KV_HEADS, HEAD_DIM), jnp.dtype(dtype), heads)
    shapes = (
        jax.tree.map(lambda x: struct(x.shape, x.dtype, None if sharding is None else sharding.pool_spec), pools),
        struct((rung.tokens, KV_HEADS * group, HEAD_DIM), jnp.dtype(dtype), heads),
        new,
        new,
        struct((words,), jnp.int32),
    )
    count = 2 * len(pools)
    keys, values = tuple(range(0, count, 2)), tuple(range(1, count, 2))
    flat = {"k_pool": keys, "v_pool": values, "k_new": (count + 1,), "v_new": (count + 2,)}
    return Step(jax.jit(step, donate_argnums=0), shapes, flat)


def sharding_over(sizes: dict[str, int], axes: tuple[str, ...]) -> KvSharding:
    """A mesh of this process's devices, heads over the named axes."""
    count = 1
    for size in sizes.values():
        count *= size
    return KvSharding(jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=all_devices()[:count]), axes)


def tensor8() -> KvSharding:
    """Eight devices on one axis."""
    return sharding_over(*MESHES[0])


@check("kit/lowering/contract")
def contract(context: Context) -> Any:
    """Every call of a step is by the contract, for both kernels, both element types, with a window and without."""
    calls = 0
    for kernel, rung in RUNGS.items():
        for dtype in ("bfloat16", "float16"):
            for window in (None, 19):
                wanted = kernel if window is None else "PagedPrefillJA"
                step = make_step(context.backend, rung, tensor8(), dtype=dtype, window=window)
                module = step.lower()
                found = check_lowering(module, required=("AppendKvJA", wanted), arguments=step.arguments)
                if found:
                    where = f"{dtype}, window {window}, rows of up to {rung.max_query_len} tokens"
                    return context.failed(f"{where}: {found[0]} ({len(found)} differences)", differences=found[:20])
                calls += len(read_calls(module))
    return context.passed(calls, contracts={t.name: t.contract_id for t in TARGETS.values()})


@check("kit/lowering/donation")
def donation(context: Context) -> Any:
    """The pool goes in donated, through one aliased append a layer, and out, with nothing in between."""
    seen = 0
    for rung in RUNGS.values():
        step = make_step(context.backend, rung, tensor8())
        if fault := donation_fault(step.lower(), step):
            return context.failed(fault)
        seen += len(step.arguments["k_pool"]) * 2
    return context.passed(seen)


def donation_fault(module: Any, step: Step) -> str | None:
    """How the lowered step mistreats its pool, or None."""
    pools = sorted((*step.arguments["k_pool"], *step.arguments["v_pool"]))
    given = donated(module)
    for at in pools:
        if not given[at]:
            return f"pool argument {at} of the program is not donated"
    appends = [c for c in read_calls(module) if c.target == "AppendKvJA"]
    if len(appends) != LAYERS:
        return f"{len(appends)} appends in a step of {LAYERS} layers"
    for call in appends:
        if call.aliases != TARGETS["AppendKvJA"].aliases:
            return f"an append has the aliases {list(call.aliases)}: XLA would copy the pool first"
    size = _elements(appends[0].operands[5][0])
    for operation, place in walk(module):
        if "sdy.manual_computation" not in place or operation.name in ("stablehlo.custom_call", "sdy.return"):
            continue
        for value in (*operation.operands, *operation.results):
            if hasattr(value.type, "shape") and _elements(value.type.shape) >= size and _ranked(value.type) == 4:
                return f"{operation.name} takes or makes an array as large as the pool"
    return None


@check("kit/lowering/sharding")
def sharding(context: Context) -> Any:
    """On meshes of one, two and three axes: heads are split, everything else is whole, no call outside."""
    seen = 0
    for sizes, axes in MESHES:
        for rung in RUNGS.values():
            where = sharding_over(sizes, axes)
            step = make_step(context.backend, rung, where)
            if fault := sharding_fault(step.lower(), where):
                return context.failed(f"mesh {sizes}, heads over {axes}: {fault}")
            seen += 1
    return context.passed(seen, meshes=[sizes for sizes, _ in MESHES])


def sharding_fault(module: Any, where: KvSharding) -> str | None:
    """How the lowered step's calls are not what one device's share should be, or None."""
    heads = KV_HEADS // where.kv_head_shards
    for call in read_calls(module):
        if call.target not in TARGETS:
            continue
        if "sdy.manual_computation" not in call.place:
            return f"{call.target} is called outside the manual computation, where nothing can partition it"
        pool = call.operands[TARGETS[call.target].index("k_pool")][0]
        if pool[2] != heads:
            return f"{call.target} gets {pool[2]} KV heads, a device's share is {heads}"
    for operation, _ in walk(module):
        if operation.name != "sdy.manual_computation":
            continue
        for at, (value, axes) in enumerate(zip(operation.operands, split_axes(operation))):
            what = f"operand {at} of the manual computation, {value.type},"
            if _ranked(value.type) < 3 and axes:
                return f"{what} is a plan array and split over {axes}"
            if _ranked(value.type) >= 3 and set(axes) != set(where.kv_axes):
                return f"{what} has heads and is split over {axes or 'nothing'}, heads lie over {where.kv_axes}"
    return None


@check("kit/lowering/collectives")
def collectives(context: Context) -> Any:
    """No collective operation is anywhere in the step."""
    seen = 0
    for sizes, axes in MESHES:
        for rung in RUNGS.values():
            module = make_step(context.backend, rung, sharding_over(sizes, axes)).lower()
            if found := collective_ops(module):
                return context.failed(f"mesh {sizes}: {found[0]} in the step ({len(found)} collectives)")
            seen += 1
    return context.passed(seen)


def collective_ops(module: Any) -> list[str]:
    """Names of the collective operations of a module."""
    return [o.name for o, _ in walk(module) if o.name.removeprefix("stablehlo.") in COLLECTIVES]


def calls_of(module: Any, target: str) -> list[Call]:
    """The calls of one target."""
    return [call for call in read_calls(module) if call.target == target]


def _ranked(kind: Any) -> int:
    return len(kind.shape) if hasattr(kind, "shape") else 0


def _elements(shape: Any) -> int:
    out = 1
    for size in shape:
        out *= int(size)
    return out
