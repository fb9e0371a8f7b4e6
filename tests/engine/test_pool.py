"""The pool: built in place, donated, and moved in one dispatch for all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.backends.moves import from_storage
from paged.backends.protocol import KvArrays
from paged.common import DonatedPoolError, InvalidInputError
from paged.engine import KvPool
from paged.engine import pool as pool_module


def filled(pool: KvPool, seed: int = 0) -> KvPool:
    """The pool with random finite words everywhere, in place."""
    key = jax.random.key(seed)

    def noise(x):
        values = jax.random.randint(key, x.shape, 1, 100).astype(x.dtype)
        return jax.device_put(values, x.sharding)

    return pool.holding(jax.tree.map(noise, pool.take()))


def rows(pool: KvPool) -> list[np.ndarray]:
    """K and V as (layers, pages, …) in words or elements, copied to the host."""
    arrays = pool.arrays
    if isinstance(arrays, KvArrays):
        shape = (pool.layout.num_layers, pool.layout.num_pages)
        return [np.array(x).reshape(*shape, *x.shape[1:]) for x in (arrays.keys, arrays.values)]
    return [np.stack([np.array(getattr(a, f)) for a in arrays]) for f in ("keys", "values")]


KINDS = [("stacked", "typed"), ("stacked", "words"), ("per_layer", "typed")]


@pytest.mark.parametrize(("pool_layout", "pool_storage"), KINDS)
def test_scrub_equals_a_loop_over_layers_element_by_element(make_layout, moves_backend, pool_layout, pool_storage):
    pool = filled(KvPool(make_layout(), moves_backend(pool_layout, pool_storage)))
    expected = rows(pool)
    for layer in range(pool.layout.num_layers):
        for page in (2, 9, 5):
            for array in expected:
                array[layer, page] = 0
    before = pool.addresses()
    pool = pool.scrub([2, 9, 5])
    assert pool.addresses() == before
    for got, want in zip(rows(pool), expected):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("pool_layout", "pool_storage"), KINDS)
def test_copy_reads_everything_before_it_writes(make_layout, moves_backend, pool_layout, pool_storage):
    pool = filled(KvPool(make_layout(), moves_backend(pool_layout, pool_storage)))
    expected = [array.copy() for array in rows(pool)]
    for new, old in zip(expected, rows(pool)):
        new[:, [3, 7, 1]] = old[:, [7, 3, 3]]
    pool = pool.copy([7, 3, 3], [3, 7, 1])
    for got, want in zip(rows(pool), expected):
        np.testing.assert_array_equal(got, want)


def test_scrub_of_all_layers_is_one_dispatch_and_few_programs(make_layout, moves_backend, monkeypatch):
    pool = KvPool(make_layout(num_pages=300), moves_backend())
    calls = []
    program = pool_module._scrub
    monkeypatch.setattr(pool_module, "_scrub", lambda *a: calls.append(a[-1].shape) or program(*a))
    for count in (1, 3, 8, 9, 60, 64, 65, 299):
        pool = pool.scrub(range(1, 1 + count))
    assert len(calls) == 8
    assert set(calls) == {(8,), (64,), (300,)}
    assert pool.scrub([]) is pool
    assert len(calls) == 8


def test_poison_fills_every_layer_of_the_named_pages_only(make_layout, moves_backend):
    cases = [("float32", "typed", "any_bits"), ("bfloat16", "words", "any_bits"), ("float32", "typed", "finite")]
    for dtype, storage, poison in [*cases, ("int8", "typed", "any_bits")]:
        pool = KvPool(make_layout(dtype=dtype), moves_backend("stacked", storage, poison)).poison([4])
        for array in (pool.arrays.keys, pool.arrays.values):
            x = np.array(from_storage(array, dtype).astype(jnp.float32)).reshape(3, 11, -1)
            assert (x[:, [p for p in range(11) if p != 4]] == 0).all()
            spoilt = x[:, 4]
            assert np.isnan(spoilt).all() if (poison == "any_bits" and dtype != "int8") else (spoilt >= 127).all()
            assert poison == "any_bits" or np.isfinite(spoilt).all()


@pytest.mark.parametrize("field", ["scrub", "poison"])
def test_sentinel_out_of_range_and_twice_named_pages_are_refused(make_layout, moves_backend, field):
    pool = KvPool(make_layout(), moves_backend())
    operation = getattr(pool, field)
    with pytest.raises(InvalidInputError, match=rf"{field}.pages must be in 1..10 .*entry 1 has 0"):
        operation([3, 0])
    with pytest.raises(InvalidInputError, match=rf"{field}.pages must be in 1..10 .*entry 0 has 11"):
        operation([11])
    with pytest.raises(InvalidInputError, match=r"names a page twice: \[3, 3\]"):
        operation([3, 3])
    with pytest.raises(InvalidInputError, match=r"1 sources for 2 targets"):
        pool.copy([3], [4, 5])
    pool.addresses()


def test_a_donated_handle_raises_our_error(make_layout, moves_backend):
    pool = KvPool(make_layout(), moves_backend())
    new = pool.scrub([1])
    for use in (lambda: pool.arrays, lambda: pool.scrub([2]), pool.addresses, lambda: pool.read(1), pool.take):
        with pytest.raises(DonatedPoolError, match="Use the pool that the step returned"):
            use()
    kept = KvPool(make_layout(), moves_backend())
    assert not kept.take().keys.is_deleted()  # dead from here on, whether or not the program used the donation
    with pytest.raises(DonatedPoolError):
        kept.take()
    jax.tree.map(lambda x: x.delete(), new.arrays)  # given away behind the handle's back
    with pytest.raises(DonatedPoolError):
        new.take()


def test_a_step_that_fails_before_donating_leaves_the_handle_alive(make_layout, moves_backend):
    pool = KvPool(make_layout(), moves_backend())

    def refused(arrays):
        raise ValueError("refused while tracing")

    with pytest.raises(ValueError, match="while tracing"):
        pool.step(refused)
    pool.scrub([1])

    def too_late(arrays):
        jax.tree.map(lambda x: x.delete(), arrays)
        raise ValueError("after donating")

    pool = KvPool(make_layout(), moves_backend())
    with pytest.raises(ValueError, match="after donating"):
        pool.step(too_late)
    with pytest.raises(DonatedPoolError):
        pool.take()


def test_read_gives_all_layers_of_a_page(make_layout, moves_backend):
    for pool_layout, pool_storage in KINDS:
        pool = filled(KvPool(make_layout(), moves_backend(pool_layout, pool_storage)))
        keys, values = pool.read(3)
        expected = [array[:, 3].view(np.float32) for array in rows(pool)]
        np.testing.assert_array_equal(keys, expected[0])
        np.testing.assert_array_equal(values, expected[1])


@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (4, 2), (8, 1)])
def test_the_pool_is_built_sharded_and_stays_so(make_layout, moves_backend, tensor_mesh, shards, replicas):
    sharding = tensor_mesh(shards, replicas)
    layout = make_layout(num_kv_heads=8, kv_head_shards=shards, pool_replicas=replicas)
    pool = KvPool(layout, moves_backend(), sharding)
    for array in (pool.arrays.keys, pool.arrays.values):
        shapes = {s.data.shape for s in array.addressable_shards}
        assert shapes == {(33, 4, 8 // shards, 8)}
        assert len(array.addressable_shards) == shards * replicas
    held = sum(s.data.nbytes for x in jax.tree.leaves(pool.arrays) for s in x.addressable_shards)
    assert held == layout.total_pool_bytes
    before = pool.addresses()
    assert len(set(before)) == 2 * shards * replicas
    alone = filled(KvPool(make_layout(num_kv_heads=8), moves_backend()))
    pool = filled(pool)
    before = pool.addresses()
    pool, alone = (p.scrub([2, 9]).copy([4], [5]).poison([7]) for p in (pool, alone))
    assert pool.addresses() == before
    for got, want in zip(rows(pool), rows(alone)):
        np.testing.assert_array_equal(got, want)


def test_the_building_program_never_holds_the_whole_pool(make_layout, moves_backend, tensor_mesh):
    layout = make_layout(num_kv_heads=8, kv_head_shards=8)
    geometry = pool_module._Geometry(layout, moves_backend(), tensor_mesh(8))
    compiled = pool_module._zeros_program(geometry).lower().compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= layout.bytes_per_device + 64
    whole = pool_module._zeros_program(pool_module._Geometry(make_layout(num_kv_heads=8), moves_backend(), None))
    assert whole.lower().compile().memory_analysis().output_size_in_bytes >= layout.unique_pool_bytes


def test_a_layout_for_another_mesh_is_refused(make_layout, moves_backend, tensor_mesh):
    with pytest.raises(InvalidInputError, match="no sharding was given"):
        KvPool(make_layout(kv_head_shards=2), moves_backend())
    with pytest.raises(InvalidInputError, match="kv_head_shards=1"):
        KvPool(make_layout(), moves_backend(), tensor_mesh(2))
    with pytest.raises(InvalidInputError, match="Put the surplus"):
        KvPool(make_layout(kv_head_shards=4), moves_backend(), tensor_mesh(4))
