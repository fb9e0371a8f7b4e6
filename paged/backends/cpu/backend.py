"""The backend object of this project's kernels for CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends import moves
from paged.backends.cpu import library, ops
from paged.backends.protocol import (
    AttentionExtras,
    KvArrays,
    LayerAt,
    LayerSizes,
    LayerWeights,
    Rung,
    StepPlan,
    TableArrays,
)
from paged.common import AttentionSpec, Capabilities, Range
from paged.common.capabilities import FEATURES
from paged.common.checks import check_choice

CAPABILITIES = Capabilities(
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    kv_dtypes=frozenset(ops.KINDS),
    page_sizes=Range(1, 256),
    head_dims=frozenset({4, *range(8, 513, 8)}),
    group_sizes=Range(1, 128),
    features=FEATURES,
    numerics="N0",
    promises=frozenset({"deterministic", "batch_invariant", "chunk_invariant", "shard_invariant", "masked_nan"}),
    pool_storage="words",  # XLA's CPU backend converts a whole bfloat16 or fp8 pool around a scatter, but not words
    platforms=frozenset({"cpu"}),
)


@dataclasses.dataclass(frozen=True)
class CpuLayers:
    """`paged.backends.protocol.LayerKernels` for float32 models, of steps of any kind."""

    sizes: LayerSizes

    def start(self, x: Float[Array, "t m"]) -> Float[Array, "s t m"]:
        """No parts: the kernels add to the residual stream themselves."""
        return jnp.zeros((0, *x.shape), jnp.float32)

    def layers(
        self,
        x: Float[Array, "t m"],
        parts: Float[Array, "s t m"],
        pool: KvArrays,
        weights: LayerWeights,
        counter: Int32[Array, ""],
        at: LayerAt,
        cos: Float[Array, "t half"],
        sin: Float[Array, "t half"],
        plan: StepPlan,
        eps: float,
    ) -> tuple[Float[Array, "t m"], Float[Array, "s t m"], KvArrays]:
        """See `LayerKernels`."""
        x, pool = ops.layers(x, pool, weights, counter, at, cos, sin, plan, self.sizes, eps)
        return x, parts, pool


@dataclasses.dataclass(frozen=True)
class CpuBackend:
    """C++ kernels through XLA's FFI, on XLA's threads; compiled on first use, see `paged.backends.cpu.library`.

    A token's bits depend on its own row alone: every product and every sum goes over its terms in one order, whatever
    the batch, the chunk, the page size or the number of threads.

    - `layers`: `"kernels"` runs whole decoder layers and the vocabulary's product of float32 models by these kernels
      too; `"xla"` leaves all but append and attention to XLA.
    """

    layers: str = "kernels"
    name: str = "cpu"

    def __post_init__(self) -> None:
        check_choice("CpuBackend", "layers", self.layers, ("kernels", "xla"))

    @property
    def capabilities(self) -> Capabilities:
        """See `CAPABILITIES`."""
        return CAPABILITIES

    def prepare(self) -> Mapping[str, Any]:
        """Compile the library if it has to be, and load it; what it is. See `paged.backends.cpu.library.prepare`."""
        return library.prepare()

    def static_plan(self, rung: Rung, spec: AttentionSpec) -> tuple[()]:
        """Nothing: work is cut up while a step runs."""
        return ()

    def plan_arrays(self, static: tuple[()], table: TableArrays) -> TableArrays:
        """The table as it is."""
        return table

    def append(
        self,
        pool: KvArrays,
        key: Shaped[Array, "t k d"],
        value: Shaped[Array, "t k e"],
        slots: Int32[Array, " t"],
        static: tuple[()],
        arrays: TableArrays,
    ) -> KvArrays:
        """Copied in place; padding is skipped, so not even the sentinel is written."""
        return ops.append(pool, key, value, slots)

    def attend(
        self,
        query: Float[Array, "t h d"],
        pool: KvArrays,
        page_base: Int32[Array, ""] | int,
        static: tuple[()],
        arrays: TableArrays,
        spec: AttentionSpec,
        extras: AttentionExtras,
    ) -> tuple[Float[Array, "t h e"], Float[Array, "t h"]]:
        """See csrc/attention.h."""
        return ops.attend(query, pool, page_base, arrays, spec, extras)

    def layer_kernels(self, plan: StepPlan, sizes: LayerSizes, dtype: str) -> CpuLayers | None:
        """Kernels for whole layers, or None where they do not fit the model."""
        return CpuLayers(sizes) if self.runs_layers(sizes, dtype, plan.rung.kv_dtype) else None

    def runs_layers(self, sizes: LayerSizes, dtype: str, kv_dtype: str | None) -> bool:
        """Whether `layer_kernels` offers kernels for every step of a model."""
        return self.layers == "kernels" and dtype == kv_dtype == "float32" and sizes.head_dim % 16 == 0

    def logits(
        self, x: Float[Array, "n m"], norm: Float[Array, " m"], head: Float[Array, "v m"], eps: float
    ) -> Float[Array, "n v"] | None:
        """Of float32 models; None for others, and with `layers="xla"`."""
        plain = x.dtype == norm.dtype == head.dtype == jnp.float32
        return ops.logits(x, norm, head, eps) if self.layers == "kernels" and plain else None

    def scrub(self, pool: KvArrays, pages: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.scrub`."""
        return moves.scrub(pool, pages)

    def copy_pages(self, pool: KvArrays, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.copy_pages`."""
        return moves.copy_pages(pool, source, target)


def make_backend(layers: str = "kernels") -> CpuBackend:
    """The factory of the entry point `cpu`; options are the fields of `CpuBackend`. Compiles and touches nothing."""
    return CpuBackend(layers=layers)
