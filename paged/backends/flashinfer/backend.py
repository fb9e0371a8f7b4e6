"""FlashInfer as a backend: append, CUDA-core or tensor-core decode, and FA3 or FA2 prefill, through XLA's FFI."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends import moves
from paged.backends.flashinfer import modules, ops
from paged.backends.flashinfer.module_spec import ModuleSpec, own
from paged.backends.flashinfer.plan import (
    PlanArrays,
    StaticPlan,
    decode_info,
    plan_arrays,
    prefill_info,
    static_plan,
)
from paged.backends.flashinfer.step_kernels import StepKernels, decode_attributes
from paged.backends.protocol import AttentionExtras, KvArrays, LayerSizes, PackedHeads, Rung, StepPlan, TableArrays
from paged.common import AttentionSpec, Capabilities, Range
from paged.common.checks import check_choice, check_int
from paged.common.dtypes import FP8_DTYPES
from paged.common.errors import InvalidInputError, UnsupportedError

TIERS = ("exact", "fast")


def _capabilities(tier: str) -> Capabilities:
    return Capabilities(
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"bfloat16", "float16", "float8_e4m3fn"}),
        page_sizes=Range(1, 256),
        head_dims=frozenset({64, 128, 256}),
        # Group sizes that the CUDA-core decode kernel is instantiated for.
        group_sizes=frozenset({1, 2, 3, 4, 6, 8, 16}),
        features=frozenset(
            {"window", "soft_cap", "sinks", "lse", "non_causal", "kv_scales", "prefill", "decode", "mixed"}
        ),
        # Prefill rounds the softmax weights to the input's dtype in either tier, and FA3's soft cap goes through the
        # approximate tanh; the exact tier's decode does neither.
        numerics="N1+tanh",
        decode_numerics="N0" if tier == "exact" else "N1",
        promises=frozenset({"deterministic", "batch_invariant", "shard_invariant"}),
        platforms=frozenset({"gpu", "cuda"}),
    )


@dataclasses.dataclass(frozen=True)
class FlashInferBackend:
    """FlashInfer's kernels with plans of our own.

    - `tier`: `"exact"` decodes with float32 weights; `"fast"` with weights rounded to the input's dtype, as tensor-core
      kernels usually do. Prefill is the same in both.
    - `directory`: of the built modules; None is `modules.default_directory()`.
    - `split_tokens`: a row's length is cut into pieces of this many tokens in decode. It enters the bits, so it is
      pinned here and never follows the batch. None is 2048, or 512 on CUDA cores: measured best.
    - `decode`: `"paged"`, this project's kernel (Hopper; 16-bit pools, others take FlashInfer's), or `"flashinfer"`.
    - `prefill`: `"fa3"` (needs modules built for 9.0a; not for fp8 pools, which take fa2) or `"fa2"`.
    - `sm_count`: SMs of the device that will run the step; None asks the one at hand. It does not enter the bits, but a
      number that is not the device's would make FA3 read past its plan, so another one is refused where a GPU is.
    - `layers`: `"kernels"` runs what lies around attention in steps of few tokens by this project's kernels, which read
      weights nearer to the memory's bandwidth than cuBLAS does; `"xla"` leaves it to XLA. Attention is the same.
    - `overlap`: whether those kernels may fetch weights while the kernel before them still runs.
    """

    tier: str = "exact"
    directory: pathlib.Path | None = None
    split_tokens: int | None = None
    decode: str = "paged"
    prefill: str = "fa3"
    prefill_tile: int = 64
    sm_count: int | None = None
    layers: str = "kernels"
    overlap: bool = True
    name: str = "flashinfer"

    def __post_init__(self) -> None:
        check_choice("FlashInferBackend", "tier", self.tier, TIERS)
        check_choice("FlashInferBackend", "prefill", self.prefill, ("fa2", "fa3"))
        check_choice("FlashInferBackend", "decode", self.decode, ("paged", "flashinfer"))
        check_choice("FlashInferBackend", "layers", self.layers, ("kernels", "xla"))
        if self.split_tokens is not None:
            check_int("FlashInferBackend", "split_tokens", self.split_tokens, minimum=16)
        if self.prefill_tile not in (16, 64, 128):
            raise InvalidInputError(f"FlashInferBackend.prefill_tile must be 16, 64 or 128, got {self.prefill_tile!r}.")

    @property
    def capabilities(self) -> Capabilities:
        """The declaration of this tier."""
        return _capabilities(self.tier)

    def static_plan(self, rung: Rung, spec: AttentionSpec) -> StaticPlan:
        """One value per rung and spec. Needs the rung's `group_size`, `head_dim` and `kv_dtype`."""
        if rung.group_size is None or rung.head_dim is None or rung.kv_dtype is None:
            raise InvalidInputError(
                f"a FlashInfer plan depends on group_size, head_dim and kv_dtype; this rung has {rung.group_size}, "
                f"{rung.head_dim} and {rung.kv_dtype}. Give them to Rung.of."
            )
        prefill = "fa2" if rung.kv_dtype in FP8_DTYPES else self.prefill
        paged = self.decode == "paged" and rung.kv_dtype not in FP8_DTYPES
        # FlashInfer's split counts pieces differently under a window (spec of the kernel: from the window's start), so
        # tensor-core decode is not split there; a window bounds the work anyway.
        unsplit = self.tier == "fast" and spec.window is not None and not paged
        tensor_cores = self.tier == "fast" and rung.group_size <= 16
        return static_plan(
            rung,
            decode="paged" if paged else "tensor_cores" if tensor_cores else "cuda_cores",
            prefill=prefill,
            chunk=None if unsplit else self.split_tokens or (2048 if paged or self.tier == "fast" else 512),
            tile=self.prefill_tile if prefill == "fa2" else (192 if rung.head_dim == 64 else 128),
            ctas=self._sms() if prefill == "fa3" else 0,
            window=spec.window if paged else None,
            fa2_tile=self.prefill_tile,
        )

    def plan_arrays(self, static: StaticPlan, table: TableArrays) -> PlanArrays:
        """See `plan.plan_arrays`."""
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
        """Written in place by FlashInfer's kernel; padding tokens write zeros to the sentinel, which stays finite."""
        size = pool.keys.shape[1]
        written = (slots >= 0)[:, None, None]
        row, offset = (jnp.where(slots >= 0, x, 0) for x in (slots // size, slots % size))
        zero = jnp.zeros((), key.dtype)
        key, value = (jnp.where(written, x, zero) for x in (key, value))
        return ops.append(self._target(ModuleSpec("append")), pool, key, value, row, offset)

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
        """One-token rows by the decode kernel, longer ones by the prefill kernel, masked together."""
        kv = pool.dtype.name
        if kv not in FP8_DTYPES and pool.dtype != query.dtype:
            raise UnsupportedError(
                f"backend {self.name!r} takes 16-bit pools of the query's dtype; got {kv} and {query.dtype}.",
                capability="kv_dtypes",
            )
        lists = (arrays.page_offsets, arrays.page_ids + jnp.asarray(page_base, jnp.int32), arrays.last_page_len)
        scale = jnp.ones((), jnp.float32) if extras.key_scale is None else extras.key_scale
        call = functools.partial(
            self._attend, pool=pool, lists=lists, spec=spec, key_scale=scale.reshape(1), sinks=extras.sinks
        )
        out, lse = self._decode(call, query, static, arrays)
        if static.decode == "paged" and static.by_token:
            return out, lse  # the kernel wrote every token, those without attention too
        out, sinks = out.astype(jnp.float32), extras.sinks
        if sinks is not None and static.decode != "paged":
            out, lse = _with_sinks(out, lse, sinks)
        if arrays.prefill_words is not None:
            # FA2 writes float32, so one module serves decode, prefill and fp8; FA3 writes the query's dtype, and a sink
            # taken in afterwards would round twice.
            fa2 = static.prefill == "fa2" or sinks is not None
            long_out, long_lse = call(
                "prefill" if fa2 else "prefill_sm90",
                query,
                words=arrays.prefill_words if arrays.sink_words is None or not fa2 else arrays.sink_words,
                query_offsets=arrays.query_offsets,
                out_dtype="float32" if fa2 else query.dtype.name,
                plan=prefill_info(static.as_fa2() if fa2 else static),
                multiprocessors=None if fa2 else static.ctas,
            )
            if sinks is not None:
                long_out, long_lse = _with_sinks(long_out, long_lse, sinks)
            single = arrays.single[:, None]
            out = jnp.where(single[..., None], out, long_out.astype(jnp.float32))
            lse = jnp.where(single, lse, long_lse)
        if extras.value_scale is not None:
            out = out * extras.value_scale
        live = arrays.live[:, None]
        out = jnp.where(live[..., None], out, jnp.float32(0)).astype(query.dtype)
        return out, jnp.where(live, lse, -jnp.inf)

    def _decode(
        self, call: functools.partial, query: Float[Array, "t h d"], static: StaticPlan, arrays: PlanArrays
    ) -> tuple[Float[Array, "t h e"], Float[Array, "t h"]]:
        """Every row's first token through the decode kernel; only the results of one-token rows are used."""
        in_place = static.by_token
        if static.decode == "paged":
            out, lse = self._paged_decode(query, static, arrays, **call.keywords)
            return (out, lse) if in_place else (out[arrays.token_row], lse[arrays.token_row])
        cores = static.decode == "tensor_cores"
        offsets = arrays.query_offsets if in_place else jnp.arange(static.rung.rows + 1, dtype=jnp.int32)
        out, lse = call(
            "prefill" if cores else "decode",
            query if in_place else query[arrays.first_token],
            words=arrays.decode_words,
            query_offsets=offsets if cores else None,
            out_dtype="float32",
            plan=decode_info(static, query_heads=query.shape[1], head_dim=query.shape[2]),
            causal=True,
        )
        return (out, lse) if in_place else (out[arrays.token_row], lse[arrays.token_row])

    def _paged_decode(
        self,
        query: Float[Array, "t h d"],
        static: StaticPlan,
        arrays: PlanArrays,
        *,
        pool: KvArrays,
        lists: tuple[Array, Array, Array],
        spec: AttentionSpec,
        sinks: Float[Array, " h"] | None,
        **unused: Any,
    ) -> tuple[Float[Array, "n h d"], Float[Array, "n h"]]:
        _, float_bytes = decode_info(static, query_heads=query.shape[1], head_dim=query.shape[2])
        return ops.paged_decode(
            self._own_target(query.dtype.name, query.shape[2], "decode"),
            query,
            pool,
            lists[1],
            arrays.decode_words,
            sinks,
            items=static.rung.tokens if static.by_token else static.rung.rows,
            blocks=static.decode_blocks,
            float_bytes=float_bytes,
            attributes={"parts": np.int64(self._terms), **decode_attributes(static, spec)},
        )

    def _sms(self) -> int:
        if self.sm_count is None:
            return _sm_count()
        if jax.default_backend() == "gpu" and self.sm_count != _sm_count():
            raise InvalidInputError(
                f"FlashInferBackend.sm_count={self.sm_count}, but this device has {_sm_count()} SMs. Leave it out."
            )
        return self.sm_count

    @property
    def _terms(self) -> int:
        """Terms of 16 bits that a weight is cut into: three hold a float32, one rounds it."""
        return 3 if self.tier == "exact" else 1

    def rotate_append(
        self,
        pool: KvArrays,
        heads: PackedHeads,
        slots: Int32[Array, " t"],
        layer: Int32[Array, ""],
        num_pages: int,
        static: StaticPlan,
        arrays: PlanArrays,
    ) -> tuple[Float[Array, "t h d"], KvArrays, PlanArrays]:
        """Rotary positions, append and this layer's page ids in one kernel; `attend` then takes page base 0.

        `slots` are relative to a layer; a negative one is padding, of which nothing is written.
        """
        query, pool, pages = ops.rotate_append(
            self._own_target(pool.dtype.name, pool.keys.shape[3], "rotate_append"),
            pool,
            heads,
            slots,
            arrays.page_ids,
            layer,
            num_pages,
        )
        return query, pool, dataclasses.replace(arrays, page_ids=pages)

    def layer_kernels(self, plan: StepPlan, config: LayerSizes, dtype: str) -> StepKernels | None:
        """This project's kernels for whole layers of steps of few single tokens, bound by reading weights; None where
        they do not fit, and with `layers="xla"`."""
        decodes = plan.static.decode == "paged" and plan.static.by_token and plan.rung.kv_dtype == dtype
        if self.layers == "xla" or not decodes:
            return None
        target = functools.partial(self._own_target, dtype, config.head_dim, "layers")
        return StepKernels.fitting(target, plan.rung.tokens, config, dtype, self._terms, self.overlap)

    def _own_target(self, dtype: str, head_dim: int, name: str) -> str:
        return modules.ffi_target(own(dtype, head_dim), self.directory or modules.default_directory(), name)

    def _attend(
        self,
        kind: str,
        query: Float[Array, "n h d"],
        *,
        pool: KvArrays,
        lists: tuple[Array, Array, Array],
        spec: AttentionSpec,
        key_scale: Float[Array, " 1"],
        words: Int32[Array, " w"],
        query_offsets: Int32[Array, " r1"] | None,
        out_dtype: str,
        plan: tuple[tuple[int, ...], int],
        causal: bool | None = None,
        sinks: Float[Array, " h"] | None = None,
        multiprocessors: int | None = None,
    ) -> tuple[Float[Array, "n h e"], Float[Array, "n h"]]:
        module = ModuleSpec(
            kind,
            query=query.dtype.name,
            kv=pool.dtype.name,
            out=out_dtype,
            head_dim=query.shape[2],
            window=spec.window is not None,
            soft_cap=spec.soft_cap is not None,
        )
        attributes = {
            # Tokens before the query's own; the spec counts that one too.
            "window_left": np.int64(-1 if spec.window is None else spec.window - 1),
            "soft_cap": float(spec.soft_cap or 0.0),
            "scale": float(spec.scale),
        }
        if kind != "decode":
            attributes["causal"] = np.int64(spec.causal if causal is None else causal)
        if multiprocessors is not None:
            attributes["multiprocessors"] = np.int64(multiprocessors)  # the module refuses another device's
        offsets = () if query_offsets is None else (query_offsets,)
        return ops.attend(
            self._target(module), query, pool, (*offsets, *lists), words, key_scale, out_dtype, plan, attributes
        )

    def scrub(self, pool: KvArrays, pages: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.scrub`."""
        return moves.scrub(pool, pages)

    def copy_pages(self, pool: KvArrays, source: Int32[Array, " n"], target: Int32[Array, " n"]) -> KvArrays:
        """See `paged.backends.moves.copy_pages`."""
        return moves.copy_pages(pool, source, target)

    def _target(self, spec: ModuleSpec) -> str:
        return modules.ffi_target(spec, self.directory or modules.default_directory())


def _with_sinks(
    out: Float[Array, "n h d"], lse: Float[Array, "n h"], sinks: Float[Array, " h"]
) -> tuple[Float[Array, "n h d"], Float[Array, "n h"]]:
    """Attention whose denominator also has exp(sink), from float32 attention without."""
    top = jnp.maximum(lse, sinks[None])
    seen, sink = jnp.exp(lse - top), jnp.exp(sinks[None] - top)
    return out * (seen / (seen + sink))[..., None], top + jnp.log(seen + sink)


def _sm_count() -> int:
    """SMs of the first GPU."""
    return int(jax.devices("gpu")[0].core_count)


def make_backend(**options: Any) -> FlashInferBackend:
    """The factory of the entry point `flashinfer`; options are the fields of `FlashInferBackend`. Touches no device."""
    if "directory" in options and options["directory"] is not None:
        options["directory"] = pathlib.Path(options["directory"])
    return FlashInferBackend(**options)
