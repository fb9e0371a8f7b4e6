"""Steps that run: the same bits on any number of devices, pools that stay where they are, pools of many gigabytes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance import hlo
from conformance.case import Case
from conformance.environment import all_devices
from conformance.execute import AttendOutput, attend
from conformance.kits.aiter.lowered import HEAD_DIM, KV_HEADS, LAYERS, RUNGS, make_step, sharding_over
from conformance.kits.run import Context, check
from conformance.runner import NoDeviceError
from conformance.structure import addresses
from conformance.vectors import generate
from paged.backends.metadata import pack_table
from paged.backends.protocol import AttentionExtras, KvArrays, Rung
from paged.backends.sharding import KvSharding
from paged.common import AttentionSpec, build_page_table

MESHES = (
    ({"tensor": 2}, ("tensor",)),
    ({"tensor": 4}, ("tensor",)),
    ({"tensor": 8}, ("tensor",)),
    ({"tensor": 4, "fsdp": 2}, ("tensor",)),
    ({"data": 2, "expert": 2, "model": 2}, ("model", "expert")),
)
"""Tensor-parallel 2, 4 and 8, and with pools replicated over other axes."""
ROWS = {
    "decode": ([1, 1, 1, 1], [37, 65, 300, 2]),
    "prefill": ([5, 1, 16, 2], [37, 65, 300, 2]),
}
LARGE_PAGES = 2**16 + 8
PAGE_LIMIT = 2**16
LARGE_BYTES = 2**32 + 2**28


def problem(kind: str) -> Any:
    """Random values over eight KV heads."""
    query_lens, kv_lens = ROWS[kind]
    params = {
        "dtype": "bfloat16", "page": 16, "num_pages": 40, "kv_heads": KV_HEADS, "q_heads": 4 * KV_HEADS,
        "head_dim": HEAD_DIM, "scale": 1 / math.sqrt(HEAD_DIM), "query_lens": query_lens, "kv_lens": kv_lens,
    }  # fmt: skip
    case = Case(id=f"kit/sharded/{kind}", tier=4, level="kit", generator="generic", params=params, clause=("kit",))
    return generate(case, "finite").problem


@check("kit/sharded/decode", "kit/sharded/prefill")
def sharded(context: Context) -> Any:
    """Outputs and pools over 2, 4 and 8 devices have the bits of one device; meshes with replicas as well.

    For prefill that is a hypothesis (its dispatch may look at the pool's size): other bits are recorded there as not
    claimed, with their number; pools must be equal everywhere.
    """
    kind = context.id.rpartition("/")[2]
    devices = len(all_devices())
    fitting = [m for m in MESHES if math.prod(m[0].values()) <= devices]
    if not fitting:
        raise NoDeviceError(f"no device: the smallest mesh has 2 devices, this process sees {devices}.")
    given = problem(kind)
    whole = attend(context.backend, given)
    moved: dict[str, int] = {}
    for sizes, axes in fitting:
        split = attend(context.backend, given, sharding=sharding_over(sizes, axes))
        name = " × ".join(f"{axis}={size}" for axis, size in sizes.items())
        if fault := _pools_differ(whole, split):
            return context.failed(f"{name}: {fault}")
        if count := int((whole.out != split.out).sum()):
            moved[name] = count
    facts = {"meshes": len(fitting), "devices": devices}
    if moved and kind == "prefill":
        return context.not_claimed(f"sharded prefill has other bits: {moved} of {whole.out.size} elements", **facts)
    if moved:
        return context.failed(f"sharded decode has other bits than one device: {moved} of {whole.out.size}", **facts)
    return context.passed(whole.out.size * len(fitting), **facts)


def _pools_differ(whole: AttendOutput, split: AttendOutput) -> str | None:
    for what, a, b in (("K", whole.keys, split.keys), ("V", whole.values, split.values)):
        if (a != b).any():
            return f"{int((a != b).sum())} words of the {what} pool differ after the append"
    return None


@check("kit/donation/decode", "kit/donation/mixed")
def donation(context: Context) -> Any:
    """A compiled step of two layers copies no pool: buffers keep their addresses over steps, on every device."""
    rung = RUNGS["PagedAttentionJA" if context.id.endswith("decode") else "PagedPrefillJA"]
    devices = max(n for n in (1, 2, 4, 8) if n <= len(all_devices()))
    sharding = sharding_over({"tensor": devices}, ("tensor",)) if devices > 1 else None
    step = make_step(context.backend, rung, sharding)
    compiled = step.program.lower(*step.shapes).compile()
    share = math.prod(step.shapes[0][0].keys.shape) // devices
    facts = {
        "pool_elements": share,
        "pool_bytes": 2 * share * 2 * len(step.shapes[0]),
        "alias_bytes": int(compiled.memory_analysis().alias_size_in_bytes),
    }
    if found := hlo.problems(compiled.as_text() or "", **facts):
        return context.failed(found[0], problems=found[:10])
    pools = [KvArrays(*(_zeros(x) for x in (p.keys, p.values))) for p in step.shapes[0]]
    query, key, value = (_zeros(x) for x in step.shapes[1:4])
    packed = jnp.asarray(_packed(rung))
    before = addresses(pools)
    for at in range(3):
        out, pools = step.program(pools, query, key, value, packed)
        jax.block_until_ready(out)
        if (after := addresses(pools)) != before:
            moved = sum(a != b for a, b in zip(before, after))
            return context.failed(f"{moved} of {len(before)} pool buffers moved in step {at}: the step copies its pool")
    return context.passed(len(before), devices=devices, layers=LAYERS, **facts)


def _zeros(struct: Any) -> Any:
    return jax.device_put(jnp.zeros(struct.shape, struct.dtype), struct.sharding, may_alias=False)


def _packed(rung: Rung) -> np.ndarray:
    """A step that fills the rung in part: three rows."""
    query = [min(rung.max_query_len, 3), 1, 1]
    table = build_page_table(
        query_lens=query,
        kv_lens=[20, 17, 5],
        pages=[[1, 2], [3, 4], [5]],
        tokens_per_page=rung.tokens_per_page,
        num_pages=rung.num_pages,
    )
    padded = table.pad(
        rows=rung.rows,
        tokens=rung.tokens,
        listed_pages=rung.listed_pages,
        max_query_len=rung.max_query_len,
        max_kv_len=rung.max_kv_len,
    )
    return pack_table(padded)[0]


@check("kit/large/page-ids", "kit/large/bytes")
def large(context: Context) -> Any:
    """Rows in the last pages of a large pool read and write their own pages, not what lies 2¹⁶ pages or 4 GiB lower."""
    by_bytes = context.id.endswith("bytes")
    heads = KV_HEADS if by_bytes else 1
    row_bytes = 16 * heads * HEAD_DIM * 2
    pages = max(LARGE_PAGES, LARGE_BYTES // row_bytes if by_bytes else 0)
    limit = 2**32 // row_bytes if by_bytes else PAGE_LIMIT
    sharding = None
    faults = []
    for kernel, rows in (("decode", 1), ("prefill", 2)):
        if fault := _large_step(context.backend, kernel, rows, pages, heads, limit, sharding):
            faults.append(f"{kernel}: {fault}")
    if faults:
        return context.failed(faults[0], faults=faults)
    return context.passed(2, pages=pages, array_bytes=pages * row_bytes)


def _large_step(
    backend: Any, kernel: str, queries: int, pages: int, heads: int, limit: int, sharding: KvSharding | None
) -> str | None:
    """Append and attend in page `pages` − 1, whose alias `limit` pages lower holds other values."""
    top = pages - 1
    group, spec = 4, AttentionSpec(scale=1.0)
    table = build_page_table(
        query_lens=[queries], kv_lens=[queries + 3], pages=[[top]], tokens_per_page=16, num_pages=pages
    )
    vector, rung = pack_table(table)
    rung = rung.with_heads(group_size=group, head_dim=HEAD_DIM, kv_dtype="bfloat16")

    def step(pool: KvArrays, query: Any, key: Any, packed: Any) -> Any:
        from paged.backends.metadata import unpack_table
        from paged.backends.step import attention_step, plan_step

        plan = plan_step(backend, unpack_table(packed, rung), rung, spec)
        return attention_step(
            backend, plan, pool, query, key, key, layer=0, extras=AttentionExtras(), sharding=sharding
        )

    def fresh() -> KvArrays:
        filled = jnp.zeros((pages, 16, heads, HEAD_DIM), jnp.bfloat16)
        return KvArrays(filled, filled.at[top].set(3.0).at[top - limit].set(7.0))

    pool = jax.jit(fresh)()
    query = jnp.zeros((queries, heads * group, HEAD_DIM), jnp.bfloat16)
    key = jnp.full((queries, heads, HEAD_DIM), 3.0, jnp.bfloat16)
    out, _, pool = jax.jit(step, donate_argnums=0)(pool, query, key, jnp.asarray(vector))
    if not (np.asarray(out, np.float32) == 3.0).all():
        return f"page {top} read as {sorted(set(np.asarray(out, np.float32).flat))[:4]}, it holds 3"
    other = np.asarray(pool.values[top - limit], np.float32)
    if not (other == 7.0).all():
        return f"the append for page {top} changed page {top - limit}"
    if not (np.asarray(pool.keys[top, 3 : 3 + queries], np.float32) == 3.0).all():
        return f"the append did not reach page {top}"
    return None
