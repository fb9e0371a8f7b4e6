"""The backend object of plain float32 attention."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float, Int32, Shaped

from paged.backends import moves
from paged.backends.protocol import AttentionExtras, KvArrays, Rung, TableArrays
from paged.backends.xla import attend as kernel
from paged.backends.xla.plan import PlanArrays, StaticPlan, plan_arrays, static_plan
from paged.common import AttentionSpec, Capabilities, Range
from paged.common.capabilities import FEATURES
from paged.common.dtypes import ELEMENT_BYTES

CAPABILITIES = Capabilities(
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    kv_dtypes=frozenset(ELEMENT_BYTES),
    page_sizes=Range(1, 256),
    head_dims=frozenset({4, *range(8, 513, 8)}),
    group_sizes=Range(1, 128),
    features=FEATURES,
    numerics="N0+xla",
    promises=frozenset({"deterministic", "batch_invariant", "chunk_invariant", "shard_invariant"}),
    # XLA's CPU backend converts a whole bfloat16 or fp8 pool around every scatter and gather, but not one of words.
    pool_storage="words",
    platforms=frozenset({"cpu", "cuda", "gpu", "rocm", "tpu"}),
)


@dataclasses.dataclass(frozen=True)
class XlaBackend:
    """Plain `jax.numpy` in float32, precision HIGHEST, softmax weights unnormalised and unrounded."""

    name: str = "xla"

    @property
    def capabilities(self) -> Capabilities:
        """See `CAPABILITIES`."""
        return CAPABILITIES

    def static_plan(self, rung: Rung, spec: AttentionSpec) -> StaticPlan:
        """Bounds on the number of work items, and their sizes."""
        return static_plan(rung)

    def plan_arrays(self, static: StaticPlan, table: TableArrays) -> PlanArrays:
        """Work items of the step, and the page lists they read."""
        return plan_arrays(static, table)

    def append(
        self,
        pool: KvArrays,
        key: Shaped[Array, "t k d"],
        value: Shaped[Array, "t k e"],
        slots: Int32[Array, " t"],
        static: StaticPlan,
        arrays: PlanArrays,
    ) -> KvArrays:
        """Scatter in place; padding is dropped, so not even the sentinel is written."""
        return moves.scatter_append(pool, key, value, slots)

    def attend(
        self,
        query: Float[Array, "t h d"],
        pool: KvArrays,
        page_base: Int32[Array, ""] | int,
        static: StaticPlan,
        arrays: PlanArrays,
        spec: AttentionSpec,
        extras: AttentionExtras,
    ) -> tuple[Float[Array, "t h e"], Float[Array, "t h"]]:
        """See `paged.backends.xla.attend`."""
        return kernel.attend(query, pool, page_base, static, arrays, spec, extras)

    def scrub(self, pool: KvArrays, pages: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.scrub`."""
        return moves.scrub(pool, pages)

    def copy_pages(self, pool: KvArrays, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.copy_pages`."""
        return moves.copy_pages(pool, source, target)


def make_backend() -> XlaBackend:
    """The factory of the entry point `xla`; it takes no options and touches no device."""
    return XlaBackend()
