"""One layer's append and attention: the only caller of kernels, the only builder of their arguments.

Sharded and unsharded steps run one function over one argument object (requirement B3); sharding only wraps it in
`jax.shard_map`. So an argument cannot be passed on one path and forgotten on the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from paged.backends.moves import layer_slots
from paged.backends.protocol import (
    AttentionBackend,
    AttentionExtras,
    KvArrays,
    PackedHeads,
    Rung,
    StepPlan,
    TableArrays,
)
from paged.backends.sharding import KvSharding
from paged.common import AttentionSpec, StorageLayout
from paged.common.errors import InvalidInputError, UnsupportedError


class KernelArguments(eqx.Module):
    """Everything that a backend's `append` and `attend` get, for one layer."""

    pool: KvArrays
    query: Float[Array, "t h d"]
    key: Shaped[Array, "t k d"]
    value: Shaped[Array, "t k e"]
    slots: Int32[Array, " t"]
    page_base: Int32[Array, ""]
    arrays: Any
    extras: AttentionExtras
    static: Hashable = eqx.field(static=True)
    spec: AttentionSpec = eqx.field(static=True)


def plan_step(backend: AttentionBackend, table: TableArrays, rung: Rung, spec: AttentionSpec) -> StepPlan:
    """The step's plan, one for all layers that share `spec`; call it once, outside the layer scan. Traceable.

    Raises `UnsupportedError` if `spec` asks for more than the backend declares.
    """
    backend.capabilities.require_spec(backend.name, spec)
    static = backend.static_plan(rung, spec)
    try:
        hash(static)
    except TypeError:
        raise InvalidInputError(
            f"static_plan of backend {backend.name!r} returned a {type(static).__name__} that cannot be hashed; it is "
            "part of what a program is compiled for. Return a tuple or a frozen dataclass."
        ) from None
    arrays = backend.plan_arrays(static, table)
    return StepPlan(arrays=arrays, write_slots=table.write_slots, rung=rung, static=static, spec=spec)


def attention_step(
    backend: AttentionBackend,
    plan: StepPlan,
    pool: KvArrays,
    query: Float[Array, "t h d"],
    key: Float[Array, "t k d"],
    value: Float[Array, "t k e"],
    *,
    layer: Int32[Array, ""] | int,
    extras: AttentionExtras = AttentionExtras(),  # noqa: B008 (a pytree of None)
    sharding: KvSharding | None = None,
) -> tuple[Float[Array, "t h e"], Float[Array, "t h"] | None, KvArrays]:
    """Append one layer's keys and values, then attend to them: output, LSE and the pool to use from now on.

    - `query`, `key`, `value`: of the step's packed tokens, global shapes. Keys and values are converted to the pool's
      element type here, once: rounded, and for 8-bit types divided by their scale and clamped to the largest value.
    - `layer`: index into a stacked pool, traced or not; for a `per_layer` backend `pool` is that layer's own and the
      index is not used.
    - `sharding`: where KV heads are laid; the step then runs inside `jax.shard_map`, heads split over those axes,
      everything else replicated, with no collective in append, in attention or between them. None is one device.

    The output of padding tokens and of empty rows is +0, their LSE −∞. Raises `UnsupportedError` for an option that is
    not declared and `InvalidInputError` for shapes that do not fit the plan, both while tracing.
    """
    arguments = kernel_arguments(backend, plan, pool, query, key, value, layer=layer, extras=extras)
    return _on_shards(functools.partial(_append_attend, backend), arguments, sharding)


class PackedArguments(eqx.Module):
    """What a backend's `rotate_append` and then its `attend` get, for one layer."""

    pool: KvArrays
    heads: PackedHeads
    slots: Int32[Array, " t"]
    layer: Int32[Array, ""]
    arrays: Any
    static: Hashable = eqx.field(static=True)
    spec: AttentionSpec = eqx.field(static=True)
    num_pages: int = eqx.field(static=True)


def packed_attention_step(
    backend: AttentionBackend,
    plan: StepPlan,
    pool: KvArrays,
    heads: PackedHeads,
    *,
    layer: Int32[Array, ""] | int,
    sharding: KvSharding | None = None,
) -> tuple[Float[Array, "t h d"], Float[Array, "t h"] | None, KvArrays]:
    """`attention_step` of `heads.split()`, by one kernel for rotary positions and append where the backend has it.

    Query and key may then differ from those of `split` in the last place of their rounding; everything else is that of
    `attention_step`.
    """
    kv_heads, group, dim = heads.packed.shape[1], heads.packed.shape[2] - 2, heads.packed.shape[3]
    offered = getattr(backend, "rotate_append", None)
    plain = pool.words_of is None and pool.dtype == heads.packed.dtype
    if offered is None or not plain or backend.capabilities.pool_layout != "stacked":
        return attention_step(backend, plan, pool, *heads.split(), layer=layer, sharding=sharding)
    backend.capabilities.require_spec(backend.name, plan.spec)
    tokens = heads.packed.shape[0]
    query = jax.ShapeDtypeStruct((tokens, kv_heads * group, dim), heads.packed.dtype)
    new = jax.ShapeDtypeStruct((tokens, kv_heads, dim), heads.packed.dtype)
    _check_shapes(backend, plan.rung, pool, query, new, new)
    arguments = PackedArguments(
        pool=pool,
        heads=heads,
        slots=plan.write_slots,
        layer=jnp.asarray(layer, jnp.int32),
        arrays=plan.arrays,
        static=plan.static,
        spec=plan.spec,
        num_pages=plan.rung.num_pages,
    )
    return _on_shards(functools.partial(_rotate_attend, backend), arguments, sharding)


def _rotate_attend(
    backend: Any, a: PackedArguments
) -> tuple[Float[Array, "t h e"], Float[Array, "t h"] | None, KvArrays]:
    query, pool, arrays = backend.rotate_append(a.pool, a.heads, a.slots, a.layer, a.num_pages, a.static, a.arrays)
    out, lse = backend.attend(query, pool, 0, a.static, arrays, a.spec, AttentionExtras())
    return out, lse, pool


def _on_shards(run: Callable[[Any], Any], arguments: Any, sharding: KvSharding | None) -> Any:
    if sharding is None:
        return run(arguments)
    return jax.shard_map(
        run,
        mesh=sharding.mesh,
        in_specs=(_specs(arguments, sharding),),
        out_specs=(sharding.heads_spec, sharding.heads_spec, sharding.pool_spec),
        # Custom calls and loop carries made from constants say nothing about how they vary over axes.
        check_vma=False,
    )(arguments)


def kernel_arguments(
    backend: AttentionBackend,
    plan: StepPlan,
    pool: KvArrays,
    query: Float[Array, "t h d"],
    key: Float[Array, "t k d"],
    value: Float[Array, "t k e"],
    *,
    layer: Int32[Array, ""] | int,
    extras: AttentionExtras,
) -> KernelArguments:
    """The one place where kernel arguments are built, whether the step is sharded or not."""
    given = {"sinks": extras.sinks is not None}
    given["kv_scales"] = extras.key_scale is not None or extras.value_scale is not None
    backend.capabilities.require_spec(backend.name, plan.spec, **given)
    if value.shape[-1] != key.shape[-1]:
        backend.capabilities.require_features(backend.name, "value_head_dim")
    _check_shapes(backend, plan.rung, pool, query, key, value)
    per_layer = backend.capabilities.pool_layout == "per_layer"
    index = jnp.asarray(0 if per_layer else layer, jnp.int32)
    rung = plan.rung
    return KernelArguments(
        pool=pool,
        query=query,
        key=to_element(key, pool.dtype, extras.key_scale),
        value=to_element(value, pool.dtype, extras.value_scale),
        slots=layer_slots(plan.write_slots, index, num_pages=rung.num_pages, tokens_per_page=rung.tokens_per_page),
        page_base=index * rung.num_pages,
        arrays=plan.arrays,
        extras=extras,
        static=plan.static,
        spec=plan.spec,
    )


def _append_attend(
    backend: AttentionBackend, a: KernelArguments
) -> tuple[Float[Array, "t h e"], Float[Array, "t h"] | None, KvArrays]:
    pool = same_pool("append", a.pool, backend.append(a.pool, a.key, a.value, a.slots, a.static, a.arrays))
    found = backend.attend(a.query, pool, a.page_base, a.static, a.arrays, a.spec, a.extras)
    if not isinstance(found, tuple) or len(found) != 2:
        got = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        got = "one array" if isinstance(found, jax.Array) else got
        raise InvalidInputError(f"attend returned {got}, expected the pair (output, LSE); the LSE may be None.")
    out, lse = found
    for what, array in (("output", out), ("LSE", lse)):
        if not isinstance(array, jax.Array | np.ndarray) and not (array is None and what == "LSE"):
            raise InvalidInputError(f"attend returned a {type(array).__name__} as its {what}, expected an array.")
    return out, lse, pool


def same_pool(operation: str, given: KvArrays, returned: Any) -> KvArrays:
    """The pool that a backend's `operation` returned. Raises `InvalidInputError` unless it has the given one's form."""
    if not isinstance(returned, KvArrays):
        raise InvalidInputError(f"{operation} returned a {type(returned).__name__}, expected the pool, a KvArrays.")
    for name in ("keys", "values"):
        old, new = getattr(given, name), getattr(returned, name)
        if (getattr(new, "shape", None), getattr(new, "dtype", None)) != (old.shape, old.dtype):
            got = f"{new.dtype}{new.shape}" if isinstance(new, jax.Array | np.ndarray) else f"a {type(new).__name__}"
            raise InvalidInputError(f"{operation} returned {name} {got}, it was given {old.dtype}{old.shape}.")
    return returned


def _specs(arguments: Any, sharding: KvSharding) -> Any:
    """Which argument is split over heads; everything else is whole on every device."""
    heads = dict.fromkeys(("query", "key", "value", "packed"), sharding.heads_spec)
    split = {"pool": sharding.pool_spec, "sinks": PartitionSpec(sharding.kv_axes), **heads}

    def spec(path: tuple[Any, ...], _: Array) -> PartitionSpec:
        field = path[1].name if path[0].name in ("extras", "heads") else path[0].name
        return split.get(field, PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec, arguments)


def to_element(x: Float[Array, "*n"], dtype: jnp.dtype, scale: Float[Array, ""] | None = None) -> Shaped[Array, "*n"]:
    """`x` as the pool's element type: one rounding to nearest even, of clamp(x / scale, ±largest) for 8-bit types.

    Raises `InvalidInputError` for a scale on a type of 16 bits or more, which is stored as it is.
    """
    if dtype.itemsize > 1:
        if scale is not None:
            raise InvalidInputError(f"key_scale and value_scale belong to 8-bit pools; this pool holds {dtype.name}.")
        return x.astype(dtype)
    scaled = x.astype(jnp.float32) if scale is None else x.astype(jnp.float32) / scale
    if jnp.issubdtype(dtype, jnp.integer):
        largest = float(jnp.iinfo(dtype).max)
        return jnp.round(jnp.clip(scaled, -largest, largest)).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(scaled, -largest, largest).astype(dtype)


def _check_shapes(backend: AttentionBackend, rung: Rung, pool: KvArrays, query: Any, key: Any, value: Any) -> None:
    rows, size, heads, _ = pool.keys.shape
    if size != rung.tokens_per_page or rows % rung.num_pages:
        raise InvalidInputError(
            f"pool of {rows} pages of {size} tokens does not fit a plan for layers of {rung.num_pages} pages of "
            f"{rung.tokens_per_page} tokens."
        )
    for field, array in (("query", query), ("key", key), ("value", value)):
        if array.shape[0] != rung.tokens:
            raise InvalidInputError(f"{field} has {array.shape[0]} tokens; the plan is for {rung.tokens}.")
    for field, array, stored in (("key", key, pool.keys), ("value", value, pool.values)):
        if array.shape[1:] != stored.shape[2:]:
            raise InvalidInputError(
                f"{field} has (heads, head dim) {array.shape[1:]}; the pool stores {stored.shape[2:]}."
            )
    if query.shape[1] % heads or query.shape[2] != key.shape[2]:
        raise InvalidInputError(f"query (t, h, d) {query.shape} does not fit keys of {key.shape[1:]}.")
    found = {"group_size": query.shape[1] // heads, "head_dim": query.shape[2], "kv_dtype": pool.dtype.name}
    for field, value in found.items():
        if getattr(rung, field) not in (None, value):
            raise InvalidInputError(f"the plan was made for {field}={getattr(rung, field)}; these arrays have {value}.")
    words = backend.capabilities.pool_storage == "words"
    if words != (pool.words_of is not None):
        raise InvalidInputError(
            f"backend {backend.name!r} stores pools as {backend.capabilities.pool_storage}; this pool has "
            f"words_of={pool.words_of!r}. Build it with paged.backends.moves.pool_structs."
        )


def check_step(
    backend: AttentionBackend,
    layout: StorageLayout,
    specs: Iterable[AttentionSpec],
    *,
    num_query_heads: int,
    dtype: str,
    sharding: KvSharding | None = None,
    batches: Iterable[str] = (),
    sinks: bool = False,
    kv_scales: bool = False,
    lse: bool = False,
    platform: str | None = None,
) -> None:
    """Refuse, before anything is built, a model and a mesh that go beyond the backend's declaration (requirement B2).

    - `specs`: every `AttentionSpec` of the model's layers. `dtype`: of query and output.
    - `batches`: the kinds the engine will send, of `"prefill"`, `"decode"`, `"mixed"`.
    - `platform`: the jax platform; None takes it from the mesh, and is not looked at without one.

    Raises `UnsupportedError` naming the capability that falls short, `InvalidInputError` if the layout was made for
    another mesh or the head axis would be over-sharded (requirement S3).
    """
    if sharding is not None:
        sharding.require(layout)
        platform = platform or sharding.mesh.devices.flat[0].platform
    elif layout.kv_head_shards != 1:
        raise InvalidInputError(
            f"layout has kv_head_shards={layout.kv_head_shards}, but no sharding is given. Pass the KvSharding whose "
            f"axes shard the KV heads, or a layout with kv_head_shards=1."
        )
    declared = backend.capabilities
    declared.require_layout(backend.name, layout, num_query_heads=num_query_heads, dtype=dtype)
    for spec in specs:
        declared.require_spec(backend.name, spec, sinks=sinks, kv_scales=kv_scales)
    for feature in (*batches, *(["lse"] if lse else [])):
        if feature not in declared.features:
            raise UnsupportedError(
                f"backend {backend.name!r} does not declare {feature!r} (it has {sorted(declared.features)}).",
                capability=feature,
            )
    if platform is not None and platform not in declared.platforms:
        raise UnsupportedError(
            f"backend {backend.name!r} runs on {sorted(declared.platforms)}, not on {platform!r}.",
            capability="platforms",
        )
