"""Runs the attention of an existing Equinox model, not one of ours, on pages (requirement M1).

The model's own code runs, from embedding to logits. Only its attention modules are exchanged, for one step, for ones
that append their keys and values to a pool and attend over pages. What such a module is made of is said by an object
with the three methods of `AttentionParts`; for `eqx.nn.MultiheadAttention` it is `MultiheadParts`.

    paged = page_attention(model, lambda m: [block.attention for block in m.blocks], MultiheadParts(...))
    layout = paged.storage_layout(num_pages=64, tokens_per_page=16, dtype="float32")
    logits, pool = paged(lambda m: m(tokens), positions, pool, plans, backend=backend)

The model sees one packed sequence: the tokens of all requests of the step, one after another. Everything outside its
attention must work on each token alone, and take positions, if it needs them, from the caller (scenario M7).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import equinox as eqx
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, Int32

from paged.backends.protocol import AttentionBackend, KvArrays, Rung, TableArrays
from paged.backends.sharding import KvSharding
from paged.backends.step import StepPlan, plan_step
from paged.common import AttentionSpec, InvalidInputError, StorageLayout
from paged.models.attention import paged_attention

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What one attention module computes: its options, and the sizes that the pool depends on."""

    spec: AttentionSpec
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int


@runtime_checkable
class AttentionParts(Protocol):
    """How a kind of attention module is taken apart. Implementations are hashable and hold no arrays.

    - `describe(module)`: its `AttentionShape`.
    - `project(module, positions, *args, **kwargs)`: query (t, h, d), key (t, k, d) and value (t, k, e) for the
      arguments that the model calls the module with. `positions` (t,) are absolute: rotary angles come from them.
    - `combine(module, heads)`: what the module returns, from attention's output (t, h, e).
    """

    def describe(self, module: Any) -> AttentionShape: ...

    def project(
        self, module: Any, positions: Int32[Array, " t"], *args: Any, **kwargs: Any
    ) -> tuple[Float[Array, "t h d"], Float[Array, "t k d"], Float[Array, "t k e"]]: ...

    def combine(self, module: Any, heads: Float[Array, "t h e"]) -> Any: ...


class PagedModel(eqx.Module):
    """A model whose attention runs on pages; made by `page_attention`.

    - `model`: the model, unchanged. `shapes[i]`: what attention module i computes; it owns layer i of the pool.
    """

    model: Any
    where: Callable[[Any], Any] = eqx.field(static=True)
    parts: AttentionParts = eqx.field(static=True)
    shapes: tuple[AttentionShape, ...] = eqx.field(static=True)

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The different attention options of the model, in order of first use: one plan a step for each."""
        return tuple(dict.fromkeys(shape.spec for shape in self.shapes))

    def storage_layout(
        self, *, num_pages: int, tokens_per_page: int, dtype: str, sharding: KvSharding | None = None
    ) -> StorageLayout:
        """Geometry of a pool for this model: one layer for each attention module."""
        shape = self.shapes[0]
        return StorageLayout(
            num_layers=len(self.shapes),
            num_pages=num_pages,
            tokens_per_page=tokens_per_page,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_head_dim=shape.value_head_dim,
            dtype=dtype,
            kv_head_shards=1 if sharding is None else sharding.kv_head_shards,
            pool_replicas=1 if sharding is None else sharding.pool_replicas,
        )

    def plan(self, backend: AttentionBackend, table: TableArrays, rung: Rung) -> tuple[StepPlan, ...]:
        """The plans of one step, one for each of `specs`; traceable."""
        return tuple(plan_step(backend, table, rung, spec) for spec in self.specs)

    def __call__(
        self,
        run: Callable[[Any], _Result],
        positions: Int32[Array, " t"],
        pool: KvArrays | tuple[KvArrays, ...],
        plans: tuple[StepPlan, ...],
        *,
        backend: AttentionBackend,
        sharding: KvSharding | None = None,
    ) -> tuple[_Result, KvArrays | tuple[KvArrays, ...]]:
        """`run(model)` with attention on pages, and the updated pool. Donate the pool; go on with the returned one.

        `run` calls the model once, on the packed tokens of the step, padding included. Every attention module must be
        called once, and in the trace of this call: not inside a scan, vmap, checkpoint or jit of the model's own.
        Raises `InvalidInputError` naming the module for which that does not hold.
        """
        step = _Step(self, positions, pool, plans, backend, sharding)
        modules = _modules(self.where, self.model)
        bound = [_Bound(step, layer, module) for layer, module in enumerate(modules)]
        # As many values as modules, in the structure that `where` returned them in.
        replaced = eqx.tree_at(lambda m: _modules(self.where, m), self.model, bound)
        result = run(replaced)
        return result, step.finish()


def page_attention(
    model: Any,
    where: Callable[[Any], Any],
    parts: AttentionParts,
    spec: AttentionSpec | Sequence[AttentionSpec] | None = None,
) -> PagedModel:
    """Let the attention modules that `where(model)` returns, one or a sequence, run on pages.

    - `parts`: how such a module is taken apart.
    - `spec`: options for all of them, or one for each; None takes what `parts.describe` says.

    Raises `InvalidInputError` if there is no module, if specs and modules differ in number, or if two modules differ in
    their heads or head dims: they share one pool.
    """
    modules = _modules(where, model)
    if not modules:
        raise InvalidInputError("page_attention: where(model) returned no attention module.")
    shapes = [parts.describe(module) for module in modules]
    if spec is not None:
        specs = [spec] * len(modules) if isinstance(spec, AttentionSpec) else list(spec)
        if len(specs) != len(modules):
            raise InvalidInputError(f"page_attention: {len(specs)} specs for {len(modules)} attention modules.")
        shapes = [dataclasses.replace(shape, spec=s) for shape, s in zip(shapes, specs)]
    for layer, shape in enumerate(shapes):
        if dataclasses.replace(shape, spec=shapes[0].spec) != shapes[0]:
            raise InvalidInputError(
                f"page_attention: attention module {layer} is {shape}, module 0 is {shapes[0]}; modules that share a "
                f"pool need equal heads and head dims. Page them in groups, each with its own pool."
            )
    return PagedModel(model, where, parts, tuple(shapes))


def _modules(where: Callable[[Any], Any], model: Any) -> list[Any]:
    found = where(model)
    return list(found) if isinstance(found, (list, tuple)) else [found]


class _Step:
    """The pool on its way through one step."""

    def __init__(
        self,
        paged: PagedModel,
        positions: Int32[Array, " t"],
        pool: KvArrays | tuple[KvArrays, ...],
        plans: tuple[StepPlan, ...],
        backend: AttentionBackend,
        sharding: KvSharding | None,
    ):
        if tuple(plan.spec for plan in plans) != paged.specs:
            raise InvalidInputError(
                f"PagedModel: plans must be for {paged.specs}, one each, in order; got "
                f"{tuple(plan.spec for plan in plans)}. Make them with `plan`."
            )
        self.paged, self.positions = paged, positions
        self.plans = dict(zip(paged.specs, plans))
        self.options = {"backend": backend, "sharding": sharding}
        self.stacked = isinstance(pool, KvArrays)
        self.pools = [pool] if isinstance(pool, KvArrays) else list(pool)
        self.called: list[int] = []
        self.trace = get_opaque_trace_state()
        if not self.stacked and len(self.pools) != len(paged.shapes):
            raise InvalidInputError(f"PagedModel: {len(self.pools)} pools for {len(paged.shapes)} attention modules.")

    def attend(self, layer: int, query: Array, key: Array, value: Array) -> Array:
        if layer in self.called:
            raise InvalidInputError(
                f"PagedModel: attention module {layer} was called twice in one step; it owns one layer of the pool."
            )
        self.called.append(layer)
        if get_opaque_trace_state() != self.trace:
            raise InvalidInputError(
                f"PagedModel: attention module {layer} was called inside a scan, vmap, grad, checkpoint or jit of the "
                f"model's own, from which the pool cannot return. Call the layers one after another, unrolled."
            )
        at = 0 if self.stacked else layer
        plan = self.plans[self.paged.shapes[layer].spec]
        out, self.pools[at] = paged_attention(query, key, value, self.pools[at], plan, layer=layer, **self.options)
        return out

    def finish(self) -> KvArrays | tuple[KvArrays, ...]:
        missing = sorted(set(range(len(self.paged.shapes))) - set(self.called))
        if missing:
            raise InvalidInputError(f"PagedModel: attention modules {missing} were not called; `run` skips them.")
        return self.pools[0] if self.stacked else tuple(self.pools)


class _Bound:
    """Stands in for one attention module during one step; every other attribute is the module's."""

    def __init__(self, step: _Step, layer: int, module: Any):
        self._step, self._layer, self._module = step, layer, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts = self._step.paged.parts
        heads = parts.project(self._module, self._step.positions, *args, **kwargs)
        return parts.combine(self._module, self._step.attend(self._layer, *heads))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
