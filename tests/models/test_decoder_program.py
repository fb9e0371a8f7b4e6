"""What the step compiles to (requirements M1, M3): no copy of the pool, no dense cache, no growth with depth."""

import functools

import jax
import pytest
from jax.sharding import AxisType, Mesh
from model_steps import XLA, Rows, run_step, tiny_config

from conformance import hlo
from paged.backends.sharding import KvSharding
from paged.models import random_decoder

PAGES_PER_ROW = 128


def compiled(num_layers, *, donate=True, sharding=None, **sizes):
    config = tiny_config(num_layers=num_layers, **sizes)
    model = random_decoder(config, jax.random.key(0), sharding=sharding)
    rows = Rows(model, pages_per_row=PAGES_PER_ROW, sharding=sharding)
    arrays, static = rows.arguments([(0, 0, [5, 6, 7])])
    step = run_step if donate else jax.jit(run_step.__wrapped__, static_argnames=tuple(static))
    return step.lower(rows.pool.arrays, model, *arrays, **static).compile(), rows.pool.arrays


def problems(program, pool, *, devices=1):
    return hlo.problems(
        program.as_text(),
        pool_elements=pool.keys.size // devices,
        pool_bytes=(pool.keys.nbytes + pool.values.nbytes) // devices,
        alias_bytes=program.memory_analysis().alias_size_in_bytes,
    )


@functools.cache
def scanned(num_layers):
    return compiled(num_layers)


def test_the_scan_keeps_the_pool_in_place_and_makes_nothing_of_its_size():
    assert problems(*scanned(4)) == []


def test_the_check_sees_a_pool_that_is_not_donated():
    found = problems(*compiled(4, donate=False))
    assert any("is not donated" in problem for problem in found)
    assert any("copy" in problem for problem in found)


def test_a_sharded_scan_keeps_each_share_in_place_and_lets_no_collective_between_append_and_attention():
    mesh = Mesh(jax.devices(), ("tensor",), axis_types=(AxisType.Auto,))
    sizes = {"num_query_heads": 16, "num_kv_heads": 8, "head_dim": 8, "intermediate_size": 64}
    program, pool = compiled(4, sharding=KvSharding(mesh, ("tensor",)), **sizes)
    assert problems(program, pool, devices=8) == []
    assert "all-reduce" in program.as_text()


def test_no_dense_cache_is_allocated():
    """Temporaries stay below what one layer's dense cache for these rows would take, and do not grow with layers."""
    program, pool = scanned(12)
    one_layer = (pool.keys.nbytes + pool.values.nbytes) // 12
    assert program.memory_analysis().temp_size_in_bytes < one_layer
    assert program.memory_analysis().temp_size_in_bytes == scanned(4)[0].memory_analysis().temp_size_in_bytes


def test_the_program_of_a_scan_does_not_grow_with_depth():
    lines = [len(scanned(layers)[0].as_text().splitlines()) for layers in (4, 12)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("scan", [True, False])
def test_the_traced_program_grows_only_when_unrolled(scan):
    sizes = []
    for layers in (2, 4):
        model = random_decoder(tiny_config(num_layers=layers), jax.random.key(0))
        rows = Rows(model, scan=scan, backend=XLA)
        arrays, static = rows.arguments([(0, 0, [5])])
        sizes.append(len(run_step.lower(rows.pool.arrays, model, *arrays, **static).as_text().splitlines()))
    assert (sizes[0] == sizes[1]) == scan
