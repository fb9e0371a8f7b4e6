"""What the step compiles to (requirements M1, M3): no copy of the pool, no dense cache, no growth with depth."""

import re

import jax
import pytest
from jax.sharding import AxisType, Mesh
from model_steps import Rows, drawn_decoder, run_step, tiny_config

from conformance import hlo
from paged.backends.sharding import KvSharding
from paged.models import shard_decoder

PAGES_PER_ROW = 128


def lowered(num_layers, *, donate=True, scan=True, sharding=None, **sizes):
    config = tiny_config(num_layers=num_layers, **sizes)
    model = drawn_decoder(config, 0)
    model = model if sharding is None else shard_decoder(model, sharding)
    rows = Rows(model, pages_per_row=PAGES_PER_ROW, sharding=sharding, scan=scan)
    arrays, static = rows.arguments([(0, 0, [5, 6, 7])])
    step = run_step if donate else jax.jit(run_step.__wrapped__, static_argnames=tuple(static))
    return step.lower(rows.pool.arrays, model, *arrays, **static), rows.pool.arrays


def compiled(num_layers, **options):
    program, pool = lowered(num_layers, **options)
    return program.compile(), pool


def problems(program, pool, *, devices=1):
    return hlo.problems(
        program.as_text(),
        pool_elements=pool.keys.size // devices,
        pool_bytes=(pool.keys.nbytes + pool.values.nbytes) // devices,
        alias_bytes=program.memory_analysis().alias_size_in_bytes,
    )


@pytest.fixture(scope="module")
def scanned():
    return compiled(4)


def test_the_scan_keeps_the_pool_in_place_and_makes_nothing_of_its_size(scanned):
    assert problems(*scanned) == []


def test_the_check_sees_a_pool_that_is_not_donated():
    found = problems(*compiled(4, donate=False))
    assert any("is not donated" in problem for problem in found)
    assert any("copy" in problem for problem in found)


def test_a_sharded_scan_keeps_each_share_in_place_and_lets_no_collective_between_append_and_attention():
    mesh = Mesh(jax.devices(), ("tensor",), axis_types=(AxisType.Auto,))
    sizes = {"num_query_heads": 16, "num_kv_heads": 8, "head_dim": 8, "intermediate_size": 64}
    program, pool = compiled(4, sharding=KvSharding(mesh, ("tensor",)), **sizes)
    assert problems(program, pool, devices=8) == []
    # Two sums in the body of the scan, one for the embedding: weights and activations are never gathered.
    collectives = re.findall(r"(all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", program.as_text())
    assert collectives == ["all-reduce"] * 3


def test_no_dense_cache_is_allocated(scanned):
    """Temporaries of the whole step stay below what one layer's dense cache for these rows would take."""
    program, pool = scanned
    one_layer = (pool.keys.nbytes + pool.values.nbytes) // 4
    assert program.memory_analysis().temp_size_in_bytes < one_layer


def program_lines(num_layers, **options):
    return len(lowered(num_layers, **options)[0].as_text().splitlines())


def test_the_program_of_a_scan_does_not_grow_with_depth():
    assert program_lines(4) == program_lines(12)


def test_unrolled_it_does():
    assert program_lines(4, scan=False) > 1.5 * program_lines(2, scan=False)
