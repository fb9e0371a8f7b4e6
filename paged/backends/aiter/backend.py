"""AITER as a backend: append in place, ragged decode where its configuration is compiled, batch prefill elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends import moves
from paged.backends.aiter import ops, plan
from paged.backends.aiter.plan import PlanArrays, StaticPlan
from paged.backends.protocol import AttentionExtras, KvArrays, Rung, TableArrays
from paged.common import AttentionSpec, Capabilities, Range
from paged.common.checks import INT32_LIMIT, check_bool, check_choice
from paged.common.errors import InvalidInputError, UnsupportedError

ROUTE = "paged-kv"
"""The route over jax-aiter's paged targets. There is no other: never jnp under this name."""
SAFE_PAGE_ID = 2**16 - 1
SAFE_POOL_BYTES = 2**31 - 1
"""What every AITER release was reported to take; the vendor's reports of silent truncation begin right above."""


@dataclasses.dataclass(frozen=True)
class AiterBackend:
    """AITER's kernels behind jax-aiter's FFI targets; made by `make_backend`, which sees that the targets are there.

    - `platform`: for which the targets are registered: `"rocm"`, or `"cpu"` where an executor stands in for them.
    - `pool_layout`: `"per_layer"`, so that page ids and pool bytes do not grow with depth, or `"stacked"`.
    - `large_pools`: lift the limits on page ids and pool bytes; for a machine on which that was certified.
    - `without`: features that known failures of this ROCm release and architecture take away.
    - `lower_only`: for lowering on a machine without the targets; a call cannot be executed.
    """

    platform: str = "rocm"
    pool_layout: str = "per_layer"
    large_pools: bool = False
    without: frozenset[str] = frozenset()
    lower_only: bool = False
    name: str = "aiter"

    def __post_init__(self) -> None:
        check_choice("AiterBackend", "platform", self.platform, ("rocm", "cpu"))
        check_choice("AiterBackend", "pool_layout", self.pool_layout, ("per_layer", "stacked"))
        check_bool("AiterBackend", "large_pools", self.large_pools)
        check_bool("AiterBackend", "lower_only", self.lower_only)

    @property
    def route(self) -> str:
        """Which of the vendor's ways is used."""
        return ROUTE

    @property
    def capabilities(self) -> Capabilities:
        """The declaration. No soft cap (the decode kernel ignores one), no sinks, no LSE, no 8-bit pools."""
        return Capabilities(
            dtypes=frozenset({"bfloat16", "float16"}),
            kv_dtypes=frozenset({"bfloat16", "float16"}),
            page_sizes=Range(16, 16),
            head_dims=frozenset({128}),
            # Any group goes through the prefill kernel; decode is compiled for 1, 4 and 8.
            group_sizes=Range(1, 64),
            features=frozenset({"window", "prefill", "decode", "mixed"}) - self.without,
            # Both kernels round the softmax weights to the input's dtype; decode also stores its partitions' results
            # in the output's.
            numerics="N1",
            decode_numerics="N2",
            promises=frozenset({"deterministic"}),
            max_page_id=INT32_LIMIT - 1 if self.large_pools else SAFE_PAGE_ID,
            max_pool_bytes=2**63 - 1 if self.large_pools else SAFE_POOL_BYTES,
            pool_layout=self.pool_layout,
            # Values in dead slots of a listed page are read and multiplied by zero.
            poison="finite",
            platforms=frozenset({"cpu"} if self.platform == "cpu" else {"gpu", "rocm"}),
        )

    def static_plan(self, rung: Rung, spec: AttentionSpec) -> StaticPlan:
        """One value per rung and spec. Needs the rung's `group_size`, `head_dim` and `kv_dtype`.

        Raises `UnsupportedError` for a soft cap, which the kernels would take and ignore, and for a rung that only a
        kernel could take which a known failure takes away.
        """
        if rung.group_size is None or rung.head_dim is None or rung.kv_dtype is None:
            raise InvalidInputError(
                f"an AITER plan depends on group_size, head_dim and kv_dtype; this rung has {rung.group_size}, "
                f"{rung.head_dim} and {rung.kv_dtype}. Give them to Rung.with_heads."
            )
        self._refuse(spec)
        found = plan.static_plan(rung, spec)
        if found.kernel == "prefill" and "prefill" in self.without:
            raise UnsupportedError(
                f"backend {self.name!r} would need its prefill kernel for {found.why}, and a known failure of this "
                f"ROCm release and architecture takes it away. See paged.backends.aiter.known.",
                capability="prefill",
            )
        return found

    def plan_arrays(self, static: StaticPlan, table: TableArrays) -> PlanArrays:
        """See `plan.plan_arrays`."""
        return plan.plan_arrays(static, table)

    def append(
        self,
        pool: KvArrays,
        key: Shaped[Array, "t k d"],
        value: Shaped[Array, "t k e"],
        slots: Int32[Array, " t"],
        static: StaticPlan,
        arrays: PlanArrays,
    ) -> KvArrays:
        """Written in place by the vendor's kernel, which skips negative slots and checks neither bounds nor values."""
        for name, array, stored in (("key", key, pool.keys), ("value", value, pool.values)):
            if array.dtype != stored.dtype or array.shape[1:] != stored.shape[2:]:
                raise InvalidInputError(
                    f"{name} is {array.dtype}{array.shape}; the pool stores {stored.dtype}{stored.shape}."
                )
        if pool.keys.shape != pool.values.shape:
            raise UnsupportedError(
                f"backend {self.name!r} takes K and V pools of one shape; got {pool.keys.shape}, {pool.values.shape}.",
                capability="head_dims",
            )
        # A slot past the pool would be written to, whatever lies there.
        inside = (slots >= 0) & (slots < pool.keys.shape[0] * pool.keys.shape[1])
        return ops.append(pool, key, value, jnp.where(inside, slots, -1))

    def attend(
        self,
        query: Float[Array, "t h d"],
        pool: KvArrays,
        page_base: Int32[Array, ""] | int,
        static: StaticPlan,
        arrays: PlanArrays,
        spec: AttentionSpec,
        extras: AttentionExtras,
    ) -> tuple[Float[Array, "t h e"], None]:
        """Every row by one kernel, the rung's; the output of padding tokens and of empty rows is +0."""
        self._refuse(spec)
        if pool.dtype != query.dtype:
            raise UnsupportedError(
                f"backend {self.name!r} takes pools of the query's dtype; got {pool.dtype} and {query.dtype}.",
                capability="kv_dtypes",
            )
        if static.kernel is None:
            return jnp.zeros_like(query), None
        lists = (arrays.page_offsets, arrays.page_ids + jnp.asarray(page_base, jnp.int32), arrays.last_page_len)
        rung = static.rung
        if static.kernel == "decode":
            rows = query[arrays.first_token]
            heads, dim = query.shape[1:]
            size = plan.workspace_bytes(rung.rows, heads, dim, static.partitions, query.dtype.itemsize)
            attributes = {
                "scale": spec.scale,
                "max_num_partitions": static.partitions,
                "func_name": static.func_name,
            }
            out = ops.decode(rows, pool, lists, workspace_bytes=size, attributes=attributes)[arrays.token_row]
        else:
            attributes = {"scale": spec.scale, "max_seqlen_q": rung.max_query_len, "max_seqlen_k": rung.max_kv_len}
            out = ops.prefill(query, pool, arrays.query_offsets, lists, window=spec.window, attributes=attributes)
        return jnp.where(arrays.live[:, None, None], out, jnp.zeros((), out.dtype)), None

    def _refuse(self, spec: AttentionSpec) -> None:
        if spec.soft_cap is not None:
            raise UnsupportedError(
                f"backend {self.name!r}: the decode kernel is compiled without a soft cap and would ignore "
                f"{spec.soft_cap}. Choose another backend.",
                capability="soft_cap",
            )
        if not spec.causal:
            raise UnsupportedError(f"backend {self.name!r} attends causally only.", capability="non_causal")

    def scrub(self, pool: KvArrays, pages: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.scrub`."""
        return moves.scrub(pool, pages)

    def copy_pages(self, pool: KvArrays, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.copy_pages`."""
        return moves.copy_pages(pool, source, target)


def make_backend(**options: Any) -> AiterBackend:
    """The factory of the entry point `aiter`; options are the fields of `AiterBackend`. Runs nothing on a device.

    Raises `BackendUnavailableError`, with the reason and the next step for each target, unless all targets of the route
    are there with the contract's ABI.
    """
    backend = AiterBackend(**options)
    if not backend.lower_only:
        from paged.backends.aiter.probe import probe

        report = probe(backend.platform)
        report.require()
        if report.without:
            backend = dataclasses.replace(backend, without=backend.without | report.without)
    return backend
