"""What the tests of this room share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from paged.backends import moves
from paged.backends.sharding import KvSharding
from paged.common import AttentionSpec, Capabilities, Range, StorageLayout
from paged.engine import Runtime
from paged.models import DecoderConfig, random_decoder
from paged.models.checkpoint import load_model


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


def tiny_config(**changes) -> DecoderConfig:
    """Three layers, eight query and eight KV heads: divides over 2, 4 and 8 devices."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 3, "head_dim": 8}
    options = {"rms_eps": 1e-5, "rope_theta": 1e4, "max_positions": 96, "tied_embeddings": False, "eos": (0,)}
    block = (AttentionSpec(scale=8**-0.5),)
    return DecoderConfig(**{**sizes, **options, "num_query_heads": 8, "num_kv_heads": 8, "block": block, **changes})


@pytest.fixture(scope="session")
def tiny():
    """A random decoder of `tiny_config(**changes)`; the same weights for the same changes."""

    @functools.lru_cache
    def make(**changes):
        return random_decoder(tiny_config(**changes), jax.random.key(7))

    return make


@pytest.fixture(scope="session")
def make_runtime(tiny):
    """A runtime on `tiny`: 4-token pages, steps of at most 16 tokens, freed pages filled with NaN."""

    def make(model=None, backend="xla", **options):
        base = {"num_pages": 41, "tokens_per_page": 4, "max_requests": 4, "max_step_tokens": 16, "poison_freed": True}
        return Runtime(tiny() if model is None else model, backend, **{**base, **options})

    return make


@pytest.fixture(scope="session")
def prompts():
    """Six prompts of 1 to 37 tokens: within a page, exactly a page, and over several."""
    rng = np.random.default_rng(3)
    return [rng.integers(1, 96, size=n).tolist() for n in (1, 4, 5, 11, 16, 37)]


@pytest.fixture(scope="session")
def run_greedy():
    """Prefill and decode one request after `add`: its generated tokens. The request stays open."""

    def run(runtime, handle, count):
        out = runtime.prefill([handle])
        while len(out) < count:
            out += runtime.decode([handle])
        return [t.id for t in out]

    return run


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32, loaded once for all tests of this room."""
    return load_model("smollm2")
