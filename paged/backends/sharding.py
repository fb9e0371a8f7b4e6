"""Which mesh axes shard KV heads."""

from __future__ import annotations

import dataclasses
import math

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paged.common.errors import InvalidInputError
from paged.common.layout import StorageLayout


@dataclasses.dataclass(frozen=True)
class KvSharding:
    """A mesh and the names of its axes over which KV heads are laid; the pool is replicated over every other axis.

    Axis names are given, not assumed. Raises `InvalidInputError` if none is named, if one is not an axis of the mesh (a
    pool that is silently unsharded would be the alternative: scenario S4), or if one is named twice. Explicit axes
    become Auto here, once (an ordinary model fails on Explicit axes at its first gather).
    """

    mesh: Mesh
    kv_axes: tuple[str, ...]

    def __post_init__(self) -> None:
        axes = (self.kv_axes,) if isinstance(self.kv_axes, str) else tuple(self.kv_axes)
        names = tuple(self.mesh.axis_names)
        if not axes:
            raise InvalidInputError(f"KvSharding.kv_axes names no axis; the mesh has {names}.")
        for axis in axes:
            if axis not in names:
                raise InvalidInputError(f"KvSharding.kv_axes names {axis!r}, which is not an axis of the mesh {names}.")
        if len(set(axes)) != len(axes):
            raise InvalidInputError(f"KvSharding.kv_axes names an axis twice: {axes}.")
        object.__setattr__(self, "kv_axes", axes)
        auto = Mesh(self.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        object.__setattr__(self, "mesh", auto)

    @property
    def kv_head_shards(self) -> int:
        """Devices over which the head axis is laid."""
        return math.prod(self.mesh.shape[axis] for axis in self.kv_axes)

    @property
    def pool_replicas(self) -> int:
        """Copies of the pool on the other axes."""
        return self.mesh.size // self.kv_head_shards

    @property
    def pool_spec(self) -> PartitionSpec:
        """Spec of the pool's arrays (pages, slots, KV heads, head dim)."""
        return PartitionSpec(None, None, self.kv_axes)

    @property
    def heads_spec(self) -> PartitionSpec:
        """Spec of (tokens, heads, head dim), and of (tokens, heads)."""
        return PartitionSpec(None, self.kv_axes)

    def named(self, spec: PartitionSpec) -> NamedSharding:
        """`spec` on this mesh."""
        return NamedSharding(self.mesh, spec)

    def require(self, layout: StorageLayout) -> None:
        """Refuse a layout that was made for another mesh, or that would need copies of heads (requirement S3)."""
        if layout.kv_head_shards != self.kv_head_shards or layout.pool_replicas != self.pool_replicas:
            raise InvalidInputError(
                f"layout has kv_head_shards={layout.kv_head_shards}, pool_replicas={layout.pool_replicas}; axes "
                f"{self.kv_axes} of mesh {dict(self.mesh.shape)} give {self.kv_head_shards} and {self.pool_replicas}."
            )
        if layout.regime != "partition":
            raise InvalidInputError(
                f"num_kv_heads={layout.num_kv_heads} over {self.kv_head_shards} shards would store every head "
                f"{layout.replication_factor} times. Put the surplus on an axis that does not shard KV heads, e.g. a "
                f"mesh of {layout.num_kv_heads} × {self.kv_head_shards // layout.num_kv_heads} with kv_axes naming the "
                f"first."
            )
