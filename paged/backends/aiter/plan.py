"""The metadata that jax-aiter's kernels take, built on the device inside the jitted step, and which kernel a step uses.

Both kernels derive a row's length from the number of pages that its list holds and the last page's occupancy, so the
counts here follow from ceil(length / page size) and never from pages held. They have no notion of an empty row: the
decode kernel's reduction would read outside its workspace. So a row without tokens is given the sentinel page and
length 1, and its output is masked. The page list is longer than what is used and padded with the sentinel, because
the prefill kernel fetches ahead of its end.
"""

from __future__ import annotations

import dataclasses
import hashlib

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from paged.backends.moves import rows_of
from paged.backends.protocol import Rung, TableArrays
from paged.common import pages_for
from paged.common.spec import AttentionSpec

PARTITION_TOKENS = 256
"""Tokens that one partition of the decode kernel takes."""
PARTITIONS_PER_LOOP = 64
PREFETCH_TOKENS = 256
"""Tokens' worth of pages that a page list is longer than what is used."""
SENTINEL_PAGE = 0

DECODE_GROUPS = frozenset({1, 4, 8})
DECODE_HEAD_DIM = 128
DECODE_PAGE = 16
DECODE_MAX_CONTEXT = PARTITION_TOKENS * PARTITIONS_PER_LOOP
"""The configurations that jax-aiter compiles its decode kernel for: 16,384 tokens at most, in one loop."""

_SPELLED = {"bfloat16": "__hip_bfloat16", "float16": "_Float16"}


@dataclasses.dataclass(frozen=True)
class StaticPlan:
    """What is constant per rung and spec; the same for every number of shards.

    - `kernel`: `"decode"`, `"prefill"`, or None where there is nothing to compute.
    - `why`: why a rung of single tokens goes through the prefill kernel; empty where it does not.
    - `partitions`, `func_name`: of the decode kernel. `listed`: length of the page list that is built.
    """

    rung: Rung
    kernel: str | None
    why: str
    partitions: int
    func_name: str
    listed: int


class PlanArrays(eqx.Module):
    """What depends on lengths; page ids are layer-relative.

    - `query_offsets` (r + 1,), `page_offsets` (r + 1,), `page_ids` (l,), `last_page_len` (r,): no row is empty.
    - `first_token` (r,): each row's first token; `token_row` (t,): each token's row; both clipped into range.
    - `live` (t,): tokens whose output is attention; the others get +0.
    """

    query_offsets: Int32[Array, " r1"]
    page_offsets: Int32[Array, " r1"]
    page_ids: Int32[Array, " l"]
    last_page_len: Int32[Array, " r"]
    first_token: Int32[Array, " r"]
    token_row: Int32[Array, " t"]
    live: Bool[Array, " t"]


def static_plan(rung: Rung, spec: AttentionSpec) -> StaticPlan:
    """The kernel of a rung: decode where every row has one token and its configuration is compiled, else prefill.

    Needs the rung's `group_size`, `head_dim` and `kv_dtype`. That every row has one token is a property of the rung
    (`max_query_len`), never guessed from a batch: as many tokens as rows may be rows of two and of none.
    """
    why = _not_decode(rung, spec)
    kernel = None if not rung.rows or not rung.tokens else "prefill" if why else "decode"
    partitions = max(1, pages_for(rung.max_kv_len, PARTITION_TOKENS))
    return StaticPlan(
        rung=rung,
        kernel=kernel,
        why=why,
        partitions=partitions,
        func_name="" if kernel != "decode" else func_name(rung, partitions),
        listed=rung.listed_pages + rung.rows + pages_for(PREFETCH_TOKENS, rung.tokens_per_page),
    )


def _not_decode(rung: Rung, spec: AttentionSpec) -> str:
    """Why the decode kernel cannot take a rung; empty if it can."""
    if rung.max_query_len > 1:
        return f"rows of up to {rung.max_query_len} query tokens"
    if spec.window is not None:
        return f"a window of {spec.window}"
    if rung.group_size not in DECODE_GROUPS:
        return f"{rung.group_size} query heads per KV head"
    if rung.head_dim != DECODE_HEAD_DIM or rung.tokens_per_page != DECODE_PAGE:
        return f"head dim {rung.head_dim} and pages of {rung.tokens_per_page} tokens"
    if rung.max_kv_len > DECODE_MAX_CONTEXT:
        return f"rows of up to {rung.max_kv_len} tokens"
    return ""


def func_name(rung: Rung, partitions: int) -> str:
    """Name of the compiled decode kernel: a hash of its configuration, spelled as the vendor's build spells it."""
    dtype = _SPELLED[rung.kv_dtype or ""]
    loops = pages_for(partitions, PARTITIONS_PER_LOOP)
    fields = (rung.group_size, rung.head_dim, loops, dtype, dtype, "auto", dtype, rung.tokens_per_page, "false")
    text = "_".join(str(field).lower() for field in fields)
    # Not a matter of security: it is the file name that the vendor's build gives the kernel.
    return "pa_ragged_" + hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def workspace_bytes(rows: int, query_heads: int, head_dim: int, partitions: int, element_bytes: int) -> int:
    """Scratch of the decode kernel: a maximum and a sum in float32, and a partial output, for each partition."""
    return rows * query_heads * partitions * (8 + element_bytes * head_dim)


def plan_arrays(static: StaticPlan, table: TableArrays) -> PlanArrays:
    """Metadata and masks of one step. Traceable."""
    rung, lens, offsets = static.rung, table.kv_lens, table.query_offsets
    size = rung.tokens_per_page
    filled = lens > 0
    counts = jnp.where(filled, (lens + size - 1) // size, 1)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    token = jnp.arange(rung.tokens, dtype=jnp.int32)
    row = jnp.minimum(rows_of(offsets, rung.tokens), max(rung.rows - 1, 0))
    return PlanArrays(
        query_offsets=offsets,
        page_offsets=starts,
        page_ids=_page_ids(static, table, starts, filled),
        last_page_len=jnp.where(filled, (lens - 1) % size + 1, 1),
        first_token=jnp.clip(offsets[:-1], 0, max(rung.tokens - 1, 0)),
        token_row=row,
        live=(token < offsets[-1]) & filled[row] if rung.rows else jnp.zeros(rung.tokens, bool),
    )


def _page_ids(
    static: StaticPlan, table: TableArrays, starts: Int32[Array, " r1"], filled: Bool[Array, " r"]
) -> Int32[Array, " l"]:
    """The list that `starts` cuts into rows: each row's pages in its order, the sentinel wherever there is none."""
    rung = static.rung
    if not rung.rows or not rung.listed_pages:
        return jnp.full(static.listed, SENTINEL_PAGE, jnp.int32)
    entry = jnp.arange(static.listed, dtype=jnp.int32)
    rows = rows_of(starts, static.listed)
    row = jnp.minimum(rows, rung.rows - 1)
    used = (rows < rung.rows) & filled[row]
    source = jnp.clip(table.page_offsets[row] + entry - starts[row], 0, rung.listed_pages - 1)
    page = jnp.where(used, table.page_ids[source], SENTINEL_PAGE)
    return jnp.clip(page, 0, rung.num_pages - 1)
