"""What the tests of this room share."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from paged.backends import moves
from paged.backends.sharding import KvSharding
from paged.common import Capabilities, Range, StorageLayout


@dataclasses.dataclass(frozen=True)
class MovesBackend:
    """The moves that backends share, without attention: enough for a pool, in every layout and storage."""

    pool_layout: str = "stacked"
    pool_storage: str = "typed"
    poison: str = "any_bits"
    name = "moves"

    scrub = staticmethod(moves.scrub)
    copy_pages = staticmethod(moves.copy_pages)

    def static_plan(self, rung, spec):
        raise AssertionError("a pool never plans")

    plan_arrays = append = attend = static_plan

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=frozenset({"float32"}),
            kv_dtypes=frozenset({"float32", "bfloat16", "int8"}),
            page_sizes=Range(1, 64),
            head_dims=frozenset({4, 8}),
            group_sizes=Range(1, 8),
            features=frozenset(),
            numerics="N0",
            pool_layout=self.pool_layout,
            pool_storage=self.pool_storage,
            poison=self.poison,
        )


@pytest.fixture(scope="session")
def moves_backend():
    return MovesBackend


@pytest.fixture(scope="session")
def make_layout():
    def make(**changes) -> StorageLayout:
        counts = {"num_layers": 3, "num_pages": 11, "tokens_per_page": 4, "num_kv_heads": 2, "head_dim": 8}
        return StorageLayout(**{**counts, "dtype": "float32", **changes})

    return make


@pytest.fixture(scope="session")
def tensor_mesh():
    """`KvSharding` over the first `shards × replicas` of the eight virtual devices."""

    def make(shards: int, replicas: int = 1) -> KvSharding:
        devices = np.array(jax.devices()[: shards * replicas]).reshape(replicas, shards)
        return KvSharding(jax.sharding.Mesh(devices, ("fsdp", "tensor")), ("tensor",))

    return make
