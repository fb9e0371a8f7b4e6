"""Geometry of a page pool: counts, bytes, and who holds which KV head."""

from __future__ import annotations

import dataclasses

from paged.common import codec
from paged.common.checks import INT32_LIMIT, check_int, per_field
from paged.common.dtypes import check_dtype, element_bytes
from paged.common.errors import InvalidInputError

SENTINEL_PAGE = 0
"""Page 0 of every layer: never allocated, always finite, named by padding, counted in bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageLayout:
    """Pool geometry, free of strides, packing and vendor shapes (requirement K1).

    - `num_layers`, `num_pages`: pages of *one* layer, the sentinel page 0 included, so at least 2.
    - `tokens_per_page`: token slots in one page.
    - `num_kv_heads`: KV heads of the model, before sharding.
    - `head_dim`, `value_head_dim`: elements of one key and one value head; None means that they are equal.
    - `dtype`: name of the element type, see `paged.common.dtypes`.
    - `kv_head_shards`: devices over which the head axis is laid.
    - `pool_replicas`: copies of the pool on mesh axes that do not shard heads.

    Raises `InvalidInputError` if a count is out of range, if layers × pages × tokens per page reaches 2³¹ (slots are
    int32), or if neither of heads and shards divides the other.
    """

    num_layers: int
    num_pages: int
    tokens_per_page: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    dtype: str
    kv_head_shards: int = 1
    pool_replicas: int = 1

    def __post_init__(self) -> None:
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        counts = ("num_layers", "tokens_per_page", "num_kv_heads", "head_dim", "value_head_dim")
        per_field(check_int, self, *counts, "kv_head_shards", "pool_replicas", minimum=1)
        per_field(check_int, self, "num_pages", minimum=2)
        per_field(check_dtype, self, "dtype")
        slots = self.num_layers * self.num_pages * self.tokens_per_page
        if slots >= INT32_LIMIT:
            raise InvalidInputError(
                f"StorageLayout: num_layers × num_pages × tokens_per_page must be below 2^31 (slots are int32), got "
                f"{self.num_layers} × {self.num_pages} × {self.tokens_per_page} = {slots}."
            )
        _ = self.regime

    @property
    def regime(self) -> str:
        """`"partition"` or `"replicate"` (requirement K3); neither dividing the other is refused."""
        heads, shards = self.num_kv_heads, self.kv_head_shards
        if heads % shards == 0:
            return "partition"
        if shards % heads == 0:
            return "replicate"
        raise InvalidInputError(
            f"StorageLayout: num_kv_heads={heads} and kv_head_shards={shards}: neither divides the other. "
            f"Put the surplus devices on a mesh axis that does not shard KV heads."
        )

    @property
    def heads_per_shard(self) -> int:
        """KV heads that one shard stores: max(1, heads // shards)."""
        return max(1, self.num_kv_heads // self.kv_head_shards)

    @property
    def replication_factor(self) -> int:
        """Copies of each head on the head axis: 1 under partition, shards / heads under replicate."""
        return max(1, self.kv_head_shards // self.num_kv_heads)

    def first_head_of_rank(self, rank: int) -> int:
        """First KV head that shard `rank` holds; under replicate it is rank // replication_factor."""
        rank = check_int("StorageLayout.first_head_of_rank", "rank", rank, minimum=0, maximum=self.kv_head_shards - 1)
        return rank // self.replication_factor if self.regime == "replicate" else rank * self.heads_per_shard

    def group_size(self, num_query_heads: int) -> int:
        """Query heads that read one KV head; refuses counts that do not divide over heads or shards."""
        heads = check_int("StorageLayout.group_size", "num_query_heads", num_query_heads, minimum=1)
        if heads % self.num_kv_heads:
            raise InvalidInputError(
                f"StorageLayout.group_size: num_query_heads={heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if heads % self.kv_head_shards:
            raise InvalidInputError(
                f"StorageLayout.group_size: num_query_heads={heads} does not divide over "
                f"kv_head_shards={self.kv_head_shards}. "
                f"Put the surplus devices on a mesh axis that does not shard KV heads."
            )
        return heads // self.num_kv_heads

    @property
    def slots_per_layer(self) -> int:
        """Token slots of one layer, the sentinel's included."""
        return self.num_pages * self.tokens_per_page

    @property
    def usable_pages(self) -> int:
        """Pages of one layer that can be allocated: all but the sentinel."""
        return self.num_pages - 1

    @property
    def bytes_per_token(self) -> int:
        """Unique bytes of one token's K and V in all layers."""
        assert self.value_head_dim is not None
        width = self.head_dim + self.value_head_dim
        return self.num_layers * self.num_kv_heads * width * element_bytes(self.dtype)

    @property
    def bytes_per_page(self) -> int:
        """Unique bytes of one page id in all layers, K and V."""
        return self.tokens_per_page * self.bytes_per_token

    @property
    def unique_pool_bytes(self) -> int:
        """Bytes of one full copy of the pool, sentinel pages included."""
        return self.num_pages * self.bytes_per_page

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds."""
        return self.unique_pool_bytes // self.num_kv_heads * self.heads_per_shard

    @property
    def total_pool_bytes(self) -> int:
        """Physical bytes over all devices: unique bytes × replication_factor × pool_replicas (requirement K4)."""
        return self.unique_pool_bytes * self.replication_factor * self.pool_replicas

    def page_and_offset(self, slot: int) -> tuple[int, int]:
        """Page and offset within it of a layer-relative token slot (scenario A6)."""
        slot = check_int("StorageLayout.page_and_offset", "slot", slot, minimum=0, maximum=self.slots_per_layer - 1)
        return divmod(slot, self.tokens_per_page)

    def to_bytes(self) -> bytes:
        """Versioned encoding; `from_bytes` gives an equal layout."""
        return codec.encode("StorageLayout", 1, dataclasses.asdict(self), {})

    @classmethod
    def from_bytes(cls, data: bytes) -> StorageLayout:
        """Decode and validate what `to_bytes` wrote."""
        return codec.load(cls, 1, data)
