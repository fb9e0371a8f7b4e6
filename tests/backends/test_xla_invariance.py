"""What the xla backend promises, on random bits: neighbours, padding, chunks, pages and shards move none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_steps import words

from paged.backends.metadata import pack_table, unpack_table
from paged.backends.protocol import AttentionExtras, KvArrays
from paged.backends.registry import get_backend
from paged.backends.step import plan_step
from paged.common import AttentionSpec, build_page_table

XLA = get_backend("xla")
LENS = [170, 33, 1, 129, 64]
TOKENS = sum(LENS)
FIRST = np.cumsum([0, *LENS])
# Options, heads (query, KV, width, value width), the pool's element type, page size. Outputs are float32, so that no
# rounding hides a bit. A group of one makes products of one row, one of three products of as many rows as there may be;
# a width of 80 is one for which their number matters in every version tried.
CASES = {
    "grouped": (AttentionSpec(scale=0.3), (9, 3, 64, 80), "bfloat16", 16),
    "one-a-head": (AttentionSpec(scale=0.3, window=50, soft_cap=2.0), (3, 3, 24, 80), "float32", 5),
}


@functools.partial(jax.jit, static_argnums=(4, 5))
def attend(query, pool, vector, sinks, rung, spec):
    plan = plan_step(XLA, unpack_table(vector, rung), rung, spec)
    extras = AttentionExtras(sinks=sinks)
    return XLA.attend(query, pool, jnp.int32(0), plan.static, plan.arrays, spec, extras)


@pytest.mark.parametrize("name", CASES)
def test_bits_depend_on_nothing_but_a_token_and_its_row(name):
    spec, (heads, kv_heads, width, value_width), dtype, size = CASES[name]
    rng = np.random.default_rng(3)
    counts = [-(-n // size) for n in LENS]
    num_pages = sum(counts) + 1
    order = rng.permutation(np.arange(1, num_pages))
    pages = np.split(order, np.cumsum(counts)[:-1])
    stored = [words(rng.standard_normal((num_pages, size, kv_heads, w)), dtype) for w in (width, value_width)]
    query = rng.standard_normal((TOKENS, heads, width))
    sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32)

    def run(slices, *, rung=None, pool=stored, heads=slice(None), relabel=None):
        """Slices (row, start, count) -> output and LSE words of their tokens, in one step padded to `rung`."""
        rung = rung or {"rows": 6, "tokens": TOKENS, "max_query_len": TOKENS, "max_kv_len": 256}
        table = build_page_table(
            query_lens=[count for _, _, count in slices],
            kv_lens=[start + count for _, start, count in slices],
            pages=[(pages if relabel is None else relabel)[row] for row, _, _ in slices],
            tokens_per_page=size,
            num_pages=num_pages,
        ).pad(listed_pages=num_pages + 2, **rung)
        vector, made = pack_table(table)
        tokens = np.concatenate([np.arange(FIRST[row] + start, FIRST[row] + start + n) for row, start, n in slices])
        q = np.zeros((rung["tokens"], *query[:, heads].shape[1:]))
        q[: len(tokens)] = query[tokens][:, heads]
        arrays = KvArrays(*(jnp.asarray(array) for array in pool), words_of=dtype)
        found = attend(jnp.asarray(q, jnp.float32), arrays, jnp.asarray(vector), sinks[heads], made, spec)
        return tokens, [words(np.asarray(x)[: len(tokens)], x.dtype.name) for x in found]

    _, whole = run([(row, 0, n) for row, n in enumerate(LENS)])

    def check(what, slices, heads=slice(None), **options):
        tokens, found = run(slices, heads=heads, **options)
        for one, other in zip(found, whole):
            np.testing.assert_array_equal(one, other[tokens][:, heads], err_msg=what)

    last = [(row, n - 1, 1) for row, n in enumerate(LENS)]
    check("alone", [(3, 0, 129)])
    check("in another order", [(row, 0, LENS[row]) for row in (4, 2, 0, 3, 1)])
    check("chunks, one of them of one token", [(0, 90, 37), (1, 0, 32), (3, 128, 1)])
    check("decode, alone and together", last)
    check("decode beside prefill", [(3, 128, 1), (0, 0, 170)])
    small = {"rows": 5, "tokens": 5, "max_query_len": 1, "max_kv_len": 4096}
    check("scenario B1: another rung and another bound on lengths", last, rung=small)

    where = np.concatenate([[0], 1 + rng.permutation(num_pages - 1)])
    moved = [np.empty_like(array) for array in stored]
    for array, source in zip(moved, stored):
        array[where] = source
    check("pages relabelled", last, pool=moved, relabel=[where[p] for p in pages])

    group = heads // kv_heads
    one_head = slice(group, 2 * group)
    shard = [array[:, :, 1:2] for array in stored]
    check("one KV head of three", [(row, 0, n) for row, n in enumerate(LENS)], heads=one_head, pool=shard)
    check("one KV head of three, decode", last, heads=one_head, pool=shard)
