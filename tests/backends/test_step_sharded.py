"""Three layers under `lax.scan` on a donated pool, on one device and on meshes: bits, untouched bytes, addresses, HLO.

Every mesh runs the same two steps, of eight rows and then of five in the same program, and must end with the bits of
one device (requirements S1 to S4, B7, M3; scenario N3).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from small_steps import expected_attention, random_table, words

from conformance.hlo import parse, problems
from paged.backends.metadata import pack_table, unpack_table
from paged.backends.moves import pool_structs
from paged.backends.protocol import AttentionExtras, KvArrays
from paged.backends.registry import get_backend
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, check_step, plan_step
from paged.common import AttentionSpec, StorageLayout

LAYERS, PAGES, SIZE, HEADS, WIDTH = 3, 160, 8, 8, 16
SPEC = AttentionSpec(scale=0.25)
XLA = get_backend("xla")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# Mesh shape, axis names, axes that shard KV heads, kind of axis. Names are given, not assumed.
MESHES = {
    "one": ((1,), ("tensor",), ("tensor",), AUTO),
    "two": ((2,), ("model",), ("model",), AUTO),
    "four": ((4,), ("tensor",), ("tensor",), EXPLICIT),
    "eight": ((8,), ("tensor",), ("tensor",), AUTO),
    "2-d": ((4, 2), ("tensor", "fsdp"), ("tensor",), EXPLICIT),
    "3-d": ((2, 2, 2), ("data", "model", "expert"), ("model", "expert"), AUTO),
    "3-d, one axis": ((2, 2, 2), ("data", "tensor", "fsdp"), ("tensor",), AUTO),
}
GROUP = {"two": 3, "3-d": 3}  # query heads per KV head, elsewhere 2


def steps(group):
    """Step A of eight rows and step B of five of them, a page further on, in one bucket."""
    rng = np.random.default_rng(5)
    lens = np.asarray([129, 8, 1, 17, 64, 30, 7, 100])
    pages = np.split(rng.permutation(np.arange(1, 1 + 8 * 18)), 8)
    made = []
    for rows, further in ((range(8), 0), ((6, 1, 3, 0, 4), 1)):
        kept = list(rows)
        table = random_table(
            rng,
            [1] * len(kept),
            (lens[kept] + further).tolist(),
            tokens_per_page=SIZE,
            num_pages=PAGES,
            pages=[pages[row] for row in kept],
        ).pad(rows=8, tokens=10, listed_pages=120, max_query_len=1, max_kv_len=160)
        shapes = [(10, HEADS * group, WIDTH), (LAYERS, 10, HEADS, WIDTH), (LAYERS, 10, HEADS, WIDTH)]
        made.append((table, [rng.standard_normal(shape).astype(np.float32) for shape in shapes]))
    return made


def initial_pool():
    """Random words, so that any write shows; finite, so that the expected attention is."""
    rng = np.random.default_rng(6)
    shape = (LAYERS * PAGES, SIZE, HEADS, WIDTH)
    return [words(rng.standard_normal(shape), "bfloat16") for _ in range(2)]


def mix(query, out):
    """A sum over heads, as an output projection is, so that a reduction follows attention; of counts, so that the
    number of shards does not move its bits."""
    return query + (out > 0).astype(np.float32).sum(1, keepdims=True) / 8


def compile_step(group, sharding, *, donate=True):
    layout = StorageLayout(
        num_layers=LAYERS,
        num_pages=PAGES,
        tokens_per_page=SIZE,
        num_kv_heads=HEADS,
        head_dim=WIDTH,
        dtype="bfloat16",
        kv_head_shards=sharding.kv_head_shards if sharding else 1,
        pool_replicas=sharding.pool_replicas if sharding else 1,
    )
    check_step(XLA, layout, [SPEC], num_query_heads=HEADS * group, dtype="float32", sharding=sharding)
    vector, rung = pack_table(steps(group)[0][0])

    def step(pool, query, keys, values, sinks, vector):
        plan = plan_step(XLA, unpack_table(vector, rung), rung, SPEC)

        def layer(carry, xs):
            pool, query = carry
            key, value, index = xs
            out, lse, pool = attention_step(
                XLA,
                plan,
                pool,
                query,
                key,
                value,
                layer=index,
                extras=AttentionExtras(sinks=sinks),
                sharding=sharding,
            )
            return (pool, mix(query, out)), (out, lse)

        xs = (keys, values, jnp.arange(LAYERS, dtype=jnp.int32))
        (pool, _), found = lax.scan(layer, (pool, query), xs)
        return pool, found

    whole = PartitionSpec()

    def place(array, spec=whole):
        where = sharding.named(spec) if sharding else None
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    heads = sharding.heads_spec if sharding else whole
    layered = PartitionSpec(None, *heads)
    structs = jax.tree.map(
        functools.partial(place, spec=sharding.pool_spec if sharding else heads), pool_structs(layout, XLA.capabilities)
    )
    query, keys, values = steps(group)[0][1]
    sinks = np.zeros(HEADS * group, np.float32)
    arguments = (
        structs,
        place(query, heads),
        place(keys, layered),
        place(values, layered),
        place(sinks),
        place(vector),
    )
    return layout, jax.jit(step, donate_argnums=0 if donate else ()).lower(*arguments).compile()


def pointers(pool):
    return [
        shard.data.unsafe_buffer_pointer() for array in (pool.keys, pool.values) for shard in array.addressable_shards
    ]


def run(group, compiled):
    """Both steps: pools after each, outputs and LSE of each, and whether every buffer stayed where it was."""
    shardings = compiled.input_shardings[0]
    where = (shardings[0].keys, shardings[0].values)
    arrays = (jax.device_put(jnp.copy(array), to) for array, to in zip(initial_pool(), where))
    pool = KvArrays(*arrays, words_of="bfloat16")
    sinks = np.linspace(-1, 1, HEADS * group).astype(np.float32)
    before, stayed = pointers(pool), True
    outputs, pools = [], []
    for table, arrays in steps(group):
        arguments = [
            jax.device_put(x, where) for x, where in zip((*arrays, sinks, pack_table(table)[0]), shardings[1:])
        ]
        pool, found = compiled(pool, *arguments)
        # After every step: two steps that each moved the pool may end where they began.
        stayed &= before == pointers(pool)
        outputs.append([np.asarray(x) for x in found])
        # Copied: a numpy view of a buffer on the host keeps it from being donated to the next step.
        pools.append([np.array(pool.keys), np.array(pool.values)])
    return pools, outputs, stayed, pool


@functools.cache
def on_one_device(group):
    _, compiled = compile_step(group, None)
    return run(group, compiled)


def test_scenario_n3_a_small_step_after_a_large_one_changes_nothing_it_does_not_own():
    pools, outputs, stayed, _ = on_one_device(2)
    assert stayed
    expected = [array.copy() for array in initial_pool()]
    for (table, (query, *new)), pool, (out, lse) in zip(steps(2), pools, outputs):
        written = table.write_slots >= 0
        assert written.sum() < len(written), "padding must be present"
        for array, tokens in zip(expected, new):
            for layer in range(LAYERS):
                page, offset = np.divmod(table.write_slots[written], SIZE)
                array[layer * PAGES + page, offset] = words(tokens[layer][written], "bfloat16")
        sentinel = np.arange(LAYERS * PAGES) % PAGES == 0
        for array, found in zip(expected, pool):
            np.testing.assert_array_equal(array[~sentinel], found[~sentinel])
        sinks = np.linspace(-1, 1, HEADS * 2).astype(np.float32)
        keys, values = (array.view(jnp.bfloat16).astype(np.float64) for array in expected)
        for layer in range(LAYERS):
            exact, exact_lse = expected_attention(
                query, keys, values, table, SPEC, page_base=layer * PAGES, sinks=sinks
            )
            np.testing.assert_allclose(out[layer], exact, atol=1e-5)
            np.testing.assert_allclose(lse[layer], exact_lse, atol=1e-4)
            query = mix(query, out[layer])
        assert (out[:, ~written] == 0).all(), "scenario N4: padded output rows are zero"


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_bits_of_one_device_and_keeps_the_pool(name):
    shape, names, axes, kind = MESHES[name]
    group = GROUP.get(name, 2)
    sharding = KvSharding(jax.make_mesh(shape, names, axis_types=(kind,) * len(shape)), axes)
    layout, compiled = compile_step(group, sharding)
    pools, outputs, stayed, pool = run(group, compiled)
    assert stayed, "a buffer moved"
    expected_pools, expected_outputs, _, _ = on_one_device(group)
    for found, expected in zip([*pools, *outputs], [*expected_pools, *expected_outputs]):
        for one, other in zip(found, expected):
            np.testing.assert_array_equal(one, other)
    shards = pool.keys.addressable_shards
    assert len(shards) == sharding.mesh.size
    assert {shard.data.shape[2] for shard in shards} == {HEADS // sharding.kv_head_shards}, "scenario S1"
    assert sum(x.nbytes for a in (pool.keys, pool.values) for x in (s.data for s in a.addressable_shards)) == (
        layout.total_pool_bytes
    )
    for array in (pool.keys, pool.values):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(array)[shard.index], err_msg="copies differ")
    text = compiled.as_text()
    device_elements = layout.bytes_per_device // 4  # K alone, of two bytes an element
    found = problems(
        text,
        pool_elements=device_elements,
        pool_bytes=layout.bytes_per_device,
        alias_bytes=compiled.memory_analysis().alias_size_in_bytes,
    )
    assert found == []
    if sharding.kv_head_shards > 1:
        reductions = [one for ones in parse(text).values() for one in ones if one.opcode.startswith("all-reduce")]
        assert reductions, "the step must hold a collective, or its absence before attention says nothing"


def test_an_undonated_step_moves_its_pool_and_is_found():
    layout, compiled = compile_step(2, None, donate=False)
    assert not run(2, compiled)[2]
    found = problems(
        compiled.as_text(),
        pool_elements=layout.bytes_per_device // 4,
        pool_bytes=layout.bytes_per_device,
        alias_bytes=compiled.memory_analysis().alias_size_in_bytes,
    )
    assert any("not donated" in problem for problem in found)
    assert any("as large as the pool" in problem for problem in found)
