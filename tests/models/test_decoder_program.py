"""What the step compiles to (requirements M1, M3): no copy of the pool, no dense cache, no growth with depth."""

import functools
import math
import re
from collections import Counter

import jax
import pytest
from model_steps import XLA, Rows, run_step, tiny_config

from paged.models import random_decoder

PAGES_PER_ROW = 128
OP = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]*)\]\S* ([\w\-]+)\(")
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}


def compiled(num_layers, *, donate=True, **options):
    model = random_decoder(tiny_config(num_layers=num_layers), jax.random.key(0))
    rows = Rows(model, pages_per_row=PAGES_PER_ROW, **options)
    arrays, static = rows.arguments([(0, 0, [5, 6, 7])])
    step = run_step if donate else jax.jit(run_step.__wrapped__, static_argnames=tuple(static))
    return step.lower(rows.pool.arrays, model, *arrays, **static).compile(), rows.pool.arrays


def pool_sized(program, elements):
    """Operations anywhere in the program, fusions included, whose result has as many elements as the pool's keys."""
    found = Counter()
    for line in program.as_text().splitlines():
        if (op := OP.match(line)) and op[2] not in FREE:
            found[op[2]] += math.prod(int(n) for n in op[1].split(",") if n) >= elements
    return +found


@functools.cache
def scanned(num_layers):
    return compiled(num_layers)


def test_the_scan_holds_no_pool_sized_operation_but_the_two_scatters():
    program, pool = scanned(4)
    found = pool_sized(program, pool.keys.size)
    # One fusion around each scatter, which is the scatter.
    assert found == {"scatter": 2, "fusion": 2}


def test_the_pool_is_updated_in_place():
    program, pool = scanned(4)
    assert program.memory_analysis().alias_size_in_bytes >= pool.keys.nbytes + pool.values.nbytes


def test_both_checks_see_a_pool_that_is_not_donated():
    program, pool = compiled(4, donate=False)
    assert pool_sized(program, pool.keys.size)["copy"] >= 2
    assert program.memory_analysis().alias_size_in_bytes == 0


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
