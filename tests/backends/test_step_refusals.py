"""Refusal before anything is built (requirements B2 and S3, clause refuse.1)."""

import dataclasses

import jax
import pytest

from paged.backends.moves import pool_structs
from paged.backends.registry import get_backend
from paged.backends.sharding import KvSharding
from paged.backends.step import check_step
from paged.backends.xla import XlaBackend
from paged.common import AttentionSpec, Capabilities, StorageLayout
from paged.common.errors import InvalidInputError, UnsupportedError

LAYOUT = StorageLayout(num_layers=3, num_pages=10, tokens_per_page=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")
SPEC = AttentionSpec(scale=0.125)
XLA = get_backend("xla")


@dataclasses.dataclass(frozen=True)
class Limited(XlaBackend):
    """The xla backend with another declaration."""

    name: str = "limited"
    declared: Capabilities = XLA.capabilities

    @property
    def capabilities(self):
        return self.declared


def limited(**changes):
    return Limited(declared=dataclasses.replace(XLA.capabilities, **changes))


def check(backend=XLA, layout=LAYOUT, specs=(SPEC,), **options):
    check_step(backend, layout, specs, **({"num_query_heads": 8, "dtype": "bfloat16", "platform": "cpu"} | options))


def without(feature):
    return limited(features=XLA.capabilities.features - {feature})


def larger(**changes):
    return {"layout": dataclasses.replace(LAYOUT, **changes)}


ASKED = {
    "window": ({}, {"specs": [SPEC, AttentionSpec(scale=1.0, window=8)]}),
    "soft_cap": ({}, {"specs": [AttentionSpec(scale=1.0, soft_cap=8.0)]}),
    "non_causal": ({}, {"specs": [AttentionSpec(scale=1.0, causal=False)]}),
    "sinks": ({}, {"sinks": True}),
    "kv_scales": ({}, {"kv_scales": True}),
    "lse": ({}, {"lse": True}),
    "prefill": ({}, {"batches": ("prefill", "decode")}),
    "decode": ({}, {"batches": ("decode",)}),
    "mixed": ({}, {"batches": ("mixed",)}),
    "dtypes": ({"dtypes": frozenset({"float16"})}, {}),
    "kv_dtypes": ({"kv_dtypes": frozenset({"float16"})}, {}),
    "page_sizes": ({"page_sizes": dataclasses.replace(XLA.capabilities.page_sizes, high=8)}, {}),
    "head_dims": ({"head_dims": frozenset({128})}, {}),
    "group_sizes": ({"group_sizes": frozenset({1, 4})}, {}),
    "regimes": ({"regimes": frozenset({"replicate"})}, {}),
    "max_page_id": ({"max_page_id": 28}, {}),
    "max_pool_bytes": ({"max_pool_bytes": 3 * 10 * 16 * 4 * 64 * 2 - 1}, {}),
    "platforms": ({"platforms": frozenset({"cuda"})}, {}),
}


@pytest.mark.parametrize("capability", ASKED)
def test_scenario_m17_every_capability_is_refused_by_name_where_it_is_missing(capability):
    changes, options = ASKED[capability]
    backend = limited(**changes) if changes else without(capability)
    with pytest.raises(UnsupportedError, match="backend 'limited'") as caught:
        check(backend, **options)
    assert caught.value.capability == capability
    check(limited(), **options)


def test_scenario_l7_large_pages_are_declared_or_refused():
    check(**larger(tokens_per_page=256))
    with pytest.raises(UnsupportedError, match=r"page_sizes 1\.\.128; asked for 256"):
        check(
            limited(page_sizes=dataclasses.replace(XLA.capabilities.page_sizes, high=128)),
            **larger(tokens_per_page=256),
        )


def test_scenario_l8_a_kernel_that_packs_does_not_declare_page_size_one():
    check(**larger(tokens_per_page=1))
    with pytest.raises(UnsupportedError, match=r"page_sizes 2\.\.256; asked for 1"):
        check(limited(page_sizes=dataclasses.replace(XLA.capabilities.page_sizes, low=2)), **larger(tokens_per_page=1))


def test_scenario_a3_a_pool_above_the_byte_limit_is_refused():
    huge = larger(num_layers=1, tokens_per_page=1, num_pages=8_400_000)
    check(**huge)
    with pytest.raises(UnsupportedError, match=r"max_pool_bytes 4294967295; this pool needs 4300800000"):
        check(limited(max_pool_bytes=2**32 - 1), **huge)


def test_a_stacked_pool_counts_pages_of_all_layers_and_a_per_layer_pool_does_not():
    check(limited(max_page_id=29))
    check(limited(max_page_id=9, pool_layout="per_layer"))


def test_an_over_sharded_head_axis_is_refused_with_the_way_out():
    mesh = jax.make_mesh((8,), ("tensor",))
    sharding = KvSharding(mesh, ("tensor",))
    layout = dataclasses.replace(LAYOUT, kv_head_shards=8)
    with pytest.raises(InvalidInputError, match=r"Put the surplus on an axis that does not shard KV heads.* 4 × 2"):
        check(layout=layout, sharding=sharding)
    way_out = KvSharding(jax.make_mesh((4, 2), ("tensor", "fsdp")), ("tensor",))
    check(layout=dataclasses.replace(LAYOUT, kv_head_shards=4, pool_replicas=2), sharding=way_out)


def test_a_layout_of_another_mesh_is_refused():
    sharding = KvSharding(jax.make_mesh((4, 2), ("tensor", "fsdp")), ("tensor",))
    with pytest.raises(InvalidInputError, match="give 4 and 2"):
        check(sharding=sharding)
    with pytest.raises(InvalidInputError, match="kv_head_shards=4, but no sharding is given"):
        check(layout=dataclasses.replace(LAYOUT, kv_head_shards=4))


@pytest.mark.parametrize("axes", [("tensor",), ()])
def test_scenario_s4_a_mesh_without_a_named_axis_is_an_error(axes):
    with pytest.raises(InvalidInputError, match="kv_axes names"):
        KvSharding(jax.make_mesh((8,), ("model",)), axes)
    assert KvSharding(jax.make_mesh((8,), ("model",)), ("model",)).kv_head_shards == 8


def test_scenario_s1_and_s2_pool_shapes_follow_the_regime():
    one_head_each = dataclasses.replace(LAYOUT, num_kv_heads=8, kv_head_shards=8)
    assert one_head_each.heads_per_shard == 1
    assert pool_structs(one_head_each, XLA.capabilities).keys.shape == (30, 16, 8, 64)
    copied = dataclasses.replace(LAYOUT, num_kv_heads=2, kv_head_shards=4)
    assert pool_structs(copied, XLA.capabilities).keys.shape == (30, 16, 4, 64)
    assert [copied.first_head_of_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_the_platform_is_taken_from_the_mesh():
    sharding = KvSharding(jax.make_mesh((4, 2), ("tensor", "fsdp")), ("tensor",))
    layout = dataclasses.replace(LAYOUT, kv_head_shards=4, pool_replicas=2)
    with pytest.raises(UnsupportedError, match=r"runs on \['cuda'\], not on 'cpu'"):
        check(limited(platforms=frozenset({"cuda"})), layout, platform=None, sharding=sharding)
