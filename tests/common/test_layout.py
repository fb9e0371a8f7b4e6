"""Pool geometry: regimes, bytes, who holds which head (requirements K1 to K4)."""

import dataclasses
import itertools

import numpy as np
import pytest

from paged.common import InvalidInputError, StorageLayout

SIZES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
}


def layout(**changes) -> StorageLayout:
    counts = {"num_layers": 3, "num_pages": 5, "tokens_per_page": 4, "num_kv_heads": 4, "head_dim": 8}
    return StorageLayout(**{**counts, "dtype": "bfloat16", **changes})


def heads_by_rank(heads: int, shards: int) -> list[list[int]]:
    """Which heads each rank holds, laid out by hand: blocks of heads, or every head several times in a row."""
    if heads >= shards:
        block = heads // shards
        return [[rank * block + i for i in range(block)] for rank in range(shards)]
    return [[head] for head in range(heads) for _ in range(shards // heads)]


def stored_bytes(shape: StorageLayout, heads: list[int]) -> int:
    """Bytes of a shard that holds `heads`, counted head by head and page by page."""
    element = SIZES[shape.dtype]
    one_head_page = shape.tokens_per_page * (shape.head_dim + (shape.value_head_dim or shape.head_dim)) * element
    return sum(one_head_page for _ in heads for _ in range(shape.num_layers * shape.num_pages))


REGIMES = [
    (heads, shards, replicas, value_head_dim)
    for heads, shards in itertools.product((1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 6, 8, 16, 24))
    if heads % shards == 0 or shards % heads == 0
    for replicas, value_head_dim in ((1, None), (2, 5), (3, 16))
]


@pytest.mark.parametrize(("heads", "shards", "replicas", "value_head_dim"), REGIMES)
def test_bytes_summed_over_shards_are_the_total_in_every_regime(heads, shards, replicas, value_head_dim):
    for dtype in ("bfloat16", "float8_e5m2", "float32"):
        shape = layout(
            num_kv_heads=heads,
            kv_head_shards=shards,
            pool_replicas=replicas,
            value_head_dim=value_head_dim,
            dtype=dtype,
        )
        ranks = heads_by_rank(heads, shards)
        per_rank = [stored_bytes(shape, held) for held in ranks]
        assert shape.regime == ("partition" if heads >= shards else "replicate")
        assert [shape.first_head_of_rank(rank) for rank in range(shards)] == [held[0] for held in ranks]
        assert {len(held) for held in ranks} == {shape.heads_per_shard}
        assert set(per_rank) == {shape.bytes_per_device}
        assert replicas * sum(per_rank) == shape.total_pool_bytes
        assert stored_bytes(shape, list(range(heads))) == shape.unique_pool_bytes
        copies = [sum(held.count(head) for held in ranks) for head in range(heads)]
        assert set(copies) == {shape.replication_factor}


def test_four_heads_over_tensor_4_and_fsdp_2_take_twice_the_unique_bytes():
    shape = layout(num_kv_heads=4, kv_head_shards=4, pool_replicas=2)
    assert shape.total_pool_bytes == 2 * shape.unique_pool_bytes
    assert shape.total_pool_bytes == 8 * shape.bytes_per_device


def test_replication_and_replicas_multiply():
    shape = layout(num_kv_heads=2, kv_head_shards=8, pool_replicas=3)
    assert (shape.replication_factor, shape.pool_replicas) == (4, 3)
    assert shape.total_pool_bytes == 12 * shape.unique_pool_bytes


def test_scenario_s1_as_many_shards_as_heads_hold_one_head_each():
    shape = layout(num_kv_heads=8, kv_head_shards=8)
    assert shape.heads_per_shard == 1
    assert shape.regime == "partition"
    assert [shape.first_head_of_rank(rank) for rank in range(8)] == list(range(8))


def test_scenario_s2_two_heads_over_four_shards_are_two_heads_stored_twice():
    shape = layout(num_kv_heads=2, kv_head_shards=4)
    one_head = shape.num_layers * shape.num_pages * shape.tokens_per_page * 2 * shape.head_dim * 2
    assert shape.regime == "replicate"
    assert [shape.first_head_of_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert shape.unique_pool_bytes == 2 * one_head
    assert shape.total_pool_bytes == 4 * one_head


@pytest.mark.parametrize(("heads", "shards"), [(4, 3), (3, 4), (6, 4), (4, 6), (8, 12), (1000003, 2)])
def test_refused_regime_names_both_numbers(heads, shards):
    with pytest.raises(InvalidInputError) as caught:
        layout(num_kv_heads=heads, kv_head_shards=shards)
    assert str(caught.value) == (
        f"StorageLayout: num_kv_heads={heads} and kv_head_shards={shards}: neither divides the other. "
        f"Put the surplus devices on a mesh axis that does not shard KV heads."
    )


def test_query_heads_divide_over_heads_and_shards():
    assert layout(num_kv_heads=2, kv_head_shards=2).group_size(6) == 3
    assert layout(num_kv_heads=2, kv_head_shards=4).group_size(4) == 2
    with pytest.raises(InvalidInputError, match=r"num_query_heads=7 is not a multiple of num_kv_heads=2\."):
        layout(num_kv_heads=2).group_size(7)
    with pytest.raises(InvalidInputError, match=r"num_query_heads=6 does not divide over kv_head_shards=4\. Put the"):
        layout(num_kv_heads=2, kv_head_shards=4).group_size(6)


def test_slots_of_all_layers_stay_below_two_to_the_31():
    assert layout(num_layers=1, num_pages=2**31 - 1, tokens_per_page=1).slots_per_layer == 2**31 - 1
    with pytest.raises(InvalidInputError, match=r"must be below 2\^31 .* got 2 × 67108864 × 16 = 2147483648\."):
        layout(num_layers=2, num_pages=2**26, tokens_per_page=16)


def test_scenario_a1_offsets_of_a_large_pool_are_python_ints_that_never_wrap():
    numbers = {"num_layers": 1, "num_pages": 131073, "tokens_per_page": 16, "num_kv_heads": 8, "head_dim": 128}
    for cast in (int, np.int32, np.int64, np.uint32):  # numpy's own arithmetic would wrap at the width of its type
        shape = StorageLayout(**{name: cast(value) for name, value in numbers.items()}, dtype="bfloat16")
        assert all(type(getattr(shape, name)) is int for name in numbers)
        assert 131072 * 16 * 8 * 128 == 2**31  # the element offset that 32 bits cannot hold
        assert 131072 * shape.bytes_per_page == 2 * (2**31) * 2  # K and V, two bytes each
        assert shape.unique_pool_bytes == 131073 * shape.bytes_per_page
        assert shape.page_and_offset(131072 * 16 + 7) == (131072, 7)


@pytest.mark.parametrize("tokens_per_page", [1, 3, 16, 64, 4096])
@pytest.mark.parametrize("pages", [2, 1000, 2**17 + 1])
def test_scenario_a1_offset_arithmetic_agrees_with_counting_from_the_front(tokens_per_page, pages):
    shape = layout(num_layers=2, num_pages=pages, tokens_per_page=tokens_per_page, num_kv_heads=8, value_head_dim=256)
    per_token = 2 * 8 * (8 + 256) * 2
    assert shape.bytes_per_token == per_token
    assert shape.bytes_per_page == tokens_per_page * per_token
    assert shape.total_pool_bytes == pages * tokens_per_page * per_token
    last = pages * tokens_per_page - 1
    assert shape.page_and_offset(last) == (pages - 1, tokens_per_page - 1)


def test_scenario_a6_token_slots_are_split_into_page_and_offset():
    shape = layout(num_pages=4, tokens_per_page=64)
    assert shape.page_and_offset(134) == (2, 6)
    assert shape.page_and_offset(69) == (1, 5)
    with pytest.raises(InvalidInputError, match=r"page_and_offset\.slot must be in 0\.\.255, got 256\."):
        shape.page_and_offset(256)


def test_rank_outside_the_shards_is_refused():
    with pytest.raises(InvalidInputError, match=r"first_head_of_rank\.rank must be in 0\.\.1, got 2\."):
        layout(kv_head_shards=2).first_head_of_rank(2)


def test_the_sentinel_is_counted_in_bytes_and_not_in_usable_pages():
    shape = layout(num_pages=5)
    assert shape.usable_pages == 4
    assert shape.unique_pool_bytes == 5 * shape.bytes_per_page
    with pytest.raises(InvalidInputError, match=r"num_pages must be in 2\.\."):
        layout(num_pages=1)


def test_head_dims_of_keys_and_values_may_differ():
    assert layout(head_dim=8).value_head_dim == 8
    assert layout(head_dim=8, value_head_dim=4).bytes_per_token == 3 * 4 * 12 * 2


def test_layouts_are_values():
    assert layout() == layout() == dataclasses.replace(layout())
    assert hash(layout()) == hash(layout())
    assert layout() != layout(dtype="float16")
