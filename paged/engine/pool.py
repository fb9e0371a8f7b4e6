"""The pool on the device: built in place, donated to every step, cleaned in one dispatch for all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from paged.backends.moves import from_storage, pool_structs, to_storage
from paged.backends.protocol import AttentionBackend, KvArrays
from paged.backends.sharding import KvSharding
from paged.common.checks import check_int32_vector, refuse_rows
from paged.common.errors import DonatedPoolError, InvalidInputError
from paged.common.layout import SENTINEL_PAGE, StorageLayout

PoolArrays = KvArrays | tuple[KvArrays, ...]
"""One `KvArrays` for all layers (a `stacked` backend), or one for each layer (`per_layer`)."""

PageIds = Iterable[int] | np.ndarray

_SMALLEST_BATCH = 8
"""Page lists are padded to 8, 64, 512 …, at most the pages of a layer: few programs, whatever the counts."""

_Result = TypeVar("_Result")


class KvPool:
    """A handle on the pool's device arrays. Each step consumes the handle and returns the next one.

    - `layout`, `backend`, `sharding`: geometry, how it is stored, and the mesh it lives on.
    - `device`: the jax device where it lives without a mesh; by default the first one.
    - The arrays are made by a program whose output is sharded, so no device ever holds more than its share.
    - Every operation that writes donates the buffers: they keep their addresses, and the old handle is dead. Using a
      dead handle raises `DonatedPoolError`.

    Raises `InvalidInputError` if the layout was made for another mesh, or for several shards and no mesh is given.
    """

    def __init__(
        self,
        layout: StorageLayout,
        backend: AttentionBackend,
        sharding: KvSharding | None = None,
        *,
        device: Any = None,
    ):
        if sharding is not None:
            sharding.require(layout)
        elif layout.kv_head_shards != 1 or layout.pool_replicas != 1:
            raise InvalidInputError(
                f"layout has kv_head_shards={layout.kv_head_shards}, pool_replicas={layout.pool_replicas}, but no "
                f"sharding was given: the pool would silently live whole on one device. Pass KvSharding(mesh, kv_axes)."
            )
        self._geometry = _Geometry(layout, backend, sharding)
        self._arrays: PoolArrays | None = _zeros_program(self._geometry, device)()
        self._lost = ""

    @property
    def layout(self) -> StorageLayout:
        """Geometry of the pool."""
        return self._geometry.layout

    @property
    def sharding(self) -> KvSharding | None:
        """Mesh and KV-head axes, or None."""
        return self._geometry.sharding

    @property
    def arrays(self) -> PoolArrays:
        """The live arrays, to be read. Raises `DonatedPoolError` once they were donated, by whomever, or lost."""
        if self._lost:
            raise DonatedPoolError(
                f"a step that had been given the pool failed on the device, and what the pool held is lost: "
                f"{self._lost} Build a new Runtime or engine."
            )
        if self._arrays is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._arrays)):
            raise DonatedPoolError(
                "this pool handle was donated: a step took its buffers. Use the pool that the step returned."
            )
        return self._arrays

    def take(self) -> PoolArrays:
        """The arrays, to be donated; from here on this handle is dead."""
        arrays = self.arrays
        self._arrays = None
        return arrays

    def lose(self, error: BaseException) -> None:
        """A step that writes these arrays failed: from here on this handle is dead, and says why."""
        self._arrays, self._lost = None, self._lost or f"{str(error).strip().removesuffix('.')}."

    @property
    def lost(self) -> bool:
        """Whether a step that writes these arrays failed."""
        return bool(self._lost)

    def holding(self, arrays: PoolArrays) -> KvPool:
        """A live handle of the same geometry on `arrays`, which a step returned."""
        pool = object.__new__(KvPool)
        pool._geometry = self._geometry
        pool._arrays, pool._lost = arrays, ""
        return pool

    def step(self, donating: Callable[[PoolArrays], tuple[PoolArrays, _Result]]) -> tuple[KvPool, _Result]:
        """Run `donating` on the arrays; the next handle and what else it returned.

        If it raises before the buffers were given away (a refusal while tracing), this handle stays alive.
        """
        arrays = self.take()
        try:
            new, result = donating(arrays)
        except BaseException:
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(arrays)):
                self._arrays = arrays
            raise
        return self.holding(new), result

    def scrub(self, pages: PageIds) -> KvPool:
        """Zero the named pages in every layer: one dispatch. Without pages nothing runs and this handle stays alive."""
        ids = self._page_list("scrub.pages", pages)
        return self._moved(_scrub, ids) if len(ids) else self

    def copy(self, source: PageIds, target: PageIds) -> KvPool:
        """Copy pages `source` to pages `target` in every layer, all read before any is written: one dispatch."""
        to = self._page_list("copy.target", target)
        of = self._page_list("copy.source", source, distinct=False)
        if len(of) != len(to):
            raise InvalidInputError(f"KvPool.copy: {len(of)} sources for {len(to)} targets; give one for each.")
        return self._moved(_copy, of, to) if len(to) else self

    def poison(self, pages: PageIds) -> KvPool:
        """Debugging: fill pages with NaN in every layer, so that whatever still reads them shows it.

        Where the dtype has no NaN, or the backend's `poison` capability allows only finite bits, the fill is the
        largest finite value.
        """
        ids = self._page_list("poison.pages", pages)
        return self._moved(_poison, ids) if len(ids) else self

    def read(self, page: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one page, (layers, tokens per page, heads, head dim), on the host; for inspection."""
        page = int(check_int32_vector("KvPool", "read.page", [page])[0])
        rows = page + self.layout.num_pages * np.arange(self.layout.num_layers)
        arrays = self.arrays
        if isinstance(arrays, KvArrays):
            picked = jax.tree.map(lambda x: x[rows], arrays)
        else:
            picked = jax.tree.map(lambda *xs: jnp.stack([x[page] for x in xs]), *arrays)
        keys, values = (np.asarray(from_storage(x, self.layout.dtype)) for x in (picked.keys, picked.values))
        return keys, values

    def batch_size(self, count: int) -> int:
        """Entries that a list of `count` pages is padded to: 8, 64, 512 …, at most the pages of a layer."""
        size = _SMALLEST_BATCH
        while size < count:
            size *= _SMALLEST_BATCH
        return max(count, min(size, self.layout.num_pages))

    def addresses(self) -> tuple[int, ...]:
        """Address of every buffer on every device of this process; equal before and after each step."""
        leaves = jax.tree.leaves(self.arrays)
        return tuple(s.data.unsafe_buffer_pointer() for leaf in leaves for s in leaf.addressable_shards)

    def _page_list(self, field: str, pages: PageIds, *, distinct: bool = True) -> np.ndarray:
        ids = check_int32_vector("KvPool", field, pages if isinstance(pages, np.ndarray) else list(pages))
        limit = self.layout.num_pages
        bad = (ids <= SENTINEL_PAGE) | (ids >= limit)
        refuse_rows("KvPool", field, ids, bad, f"must be in 1..{limit - 1} (page 0 is the sentinel)", "entry")
        if distinct and len(np.unique(ids)) != len(ids):
            raise InvalidInputError(f"KvPool.{field} names a page twice: {ids.tolist()}.")
        return ids

    def _moved(self, program: Callable[..., PoolArrays], *ids: np.ndarray) -> KvPool:
        size = self.batch_size(len(ids[0]))
        padded = [np.pad(x, (0, size - len(x)), constant_values=-1) for x in ids]
        pool, _ = self.step(lambda arrays: (program(self._geometry, arrays, *padded), None))
        return pool


class _Geometry:
    """What is static in every program on the pool. Equal by value, so that equal pools share compiled programs."""

    def __init__(self, layout: StorageLayout, backend: AttentionBackend, sharding: KvSharding | None):
        self.layout = layout
        self.backend = backend
        self.sharding = sharding

    def _key(self) -> tuple[Any, ...]:
        return self.layout, self.backend, self.sharding

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Geometry) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def on_shards(self, move: Callable[..., PoolArrays], arrays: PoolArrays, *ids: jax.Array) -> PoolArrays:
        """`move` on each device's share of the pool; page lists are the same on all."""
        if self.sharding is None:
            return move(arrays, *ids)
        pool_spec, all_of_it = self.sharding.pool_spec, jax.sharding.PartitionSpec()
        specs = (pool_spec, *(all_of_it,) * len(ids))
        return jax.shard_map(
            move, mesh=self.sharding.mesh, in_specs=specs, out_specs=pool_spec, check_vma=False
        )(arrays, *ids)  # fmt: skip

    def rows(self, pages: jax.Array) -> jax.Array:
        """Page ids of one layer as rows of all layers; padding stays negative."""
        layers = jnp.arange(self.layout.num_layers, dtype=jnp.int32)[:, None] * jnp.int32(self.layout.num_pages)
        return jnp.where(pages[None, :] >= 0, pages[None, :] + layers, jnp.int32(-1)).reshape(-1)

    def each(self, move: Callable[..., KvArrays], arrays: PoolArrays, *ids: jax.Array) -> PoolArrays:
        """`move` on the array of all layers with the rows of all layers, or on each layer's with its own."""
        if isinstance(arrays, KvArrays):
            return move(arrays, *(self.rows(x) for x in ids))
        return tuple(move(layer, *ids) for layer in arrays)


def _zeros_program(geometry: _Geometry, device: Any = None) -> Callable[[], PoolArrays]:
    """The program that makes an empty pool, each device its own share."""
    capabilities = geometry.backend.capabilities
    structs = pool_structs(geometry.layout, capabilities)
    if geometry.sharding is None:
        placed = SingleDeviceSharding(jax.devices()[0] if device is None else device)
    else:
        placed = geometry.sharding.named(geometry.sharding.pool_spec)

    def build() -> PoolArrays:
        def one() -> KvArrays:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)

        return (
            one() if capabilities.pool_layout == "stacked" else tuple(one() for _ in range(geometry.layout.num_layers))
        )

    return jax.jit(build, out_shardings=placed)


_program = functools.partial(jax.jit, static_argnums=0, donate_argnums=1)


@_program
def _scrub(geometry: _Geometry, arrays: PoolArrays, pages: jax.Array) -> PoolArrays:
    clear = functools.partial(geometry.each, geometry.backend.scrub)
    return geometry.on_shards(clear, arrays, pages)


@_program
def _copy(geometry: _Geometry, arrays: PoolArrays, source: jax.Array, target: jax.Array) -> PoolArrays:
    move = functools.partial(geometry.each, geometry.backend.copy_pages)
    return geometry.on_shards(move, arrays, source, target)


@_program
def _poison(geometry: _Geometry, arrays: PoolArrays, pages: jax.Array) -> PoolArrays:
    fill = _poison_value(geometry.layout.dtype, geometry.backend.capabilities.poison)

    def spoil(pool: KvArrays, rows: jax.Array) -> KvArrays:
        at = jnp.where(rows >= 0, rows, pool.keys.shape[0])
        return jax.tree.map(lambda x: x.at[at].set(to_storage(fill, x.dtype), mode="drop"), pool)

    return geometry.on_shards(functools.partial(geometry.each, spoil), arrays, pages)


def _poison_value(dtype: str, poison: str) -> jax.Array:
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        return jnp.asarray(jnp.iinfo(dtype).max, dtype)
    return jnp.asarray(np.nan if poison == "any_bits" else jnp.finfo(dtype).max, dtype)
