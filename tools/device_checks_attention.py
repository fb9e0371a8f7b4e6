"""Checks of `device_checks.py` that look at attention alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_check import SPEC, attention, backend, check

from paged import AttentionSpec, build_page_table
from paged.backends.metadata import table_arrays
from paged.backends.protocol import AttentionExtras, KvArrays, Rung
from paged.backends.step import plan_step


@check
def prefill_in_any_company(args: Any) -> str:
    """Prefill of many tiles, whose work is dealt KV head by KV head, and each of its rows alone: the same bits.

    The rows alone are dealt all heads together. A few tokens of each are compared with float64, too.
    """
    worst, count = 0.0, 0
    for dtype, kv_heads, group, window, lens, query_lens in (
        ("bfloat16", 8, 4, None, [4096, 3000, 4096, 129, 5000, 4096, 64], [4096, 3000, 4000, 100, 2500, 4096, 64]),
        ("bfloat16", 2, 8, 700, [4096, 2047, 4100], [4096, 2047, 4100]),
        ("bfloat16", 3, 1, None, [30_000, 20_001, 25_000], [30_000, 20_001, 25_000]),
        ("float16", 1, 16, None, [4096, 1500], [4096, 1500]),
    ):
        spec = AttentionSpec(scale=128**-0.5, window=window)
        each = [-(-n // 16) for n in lens]
        ids = np.random.default_rng(1).permutation(np.arange(1, sum(each) + 1))
        lists = [x.tolist() for x in np.split(ids, np.cumsum(each)[:-1])]
        draw = jax.jit(lambda i, shape: jax.random.normal(jax.random.key(i), shape, dtype), static_argnums=1)  # noqa: B023
        pool = KvArrays(*(draw(i, (sum(each) + 1, 16, kv_heads, 128)) for i in (1, 2)))
        query = draw(3, (sum(query_lens), kv_heads * group, 128))

        def attend(rows: list[int], query: Any) -> Any:
            table = build_page_table(
                query_lens=[query_lens[r] for r in rows],  # noqa: B023
                kv_lens=[lens[r] for r in rows],  # noqa: B023
                pages=[lists[r] for r in rows],  # noqa: B023
                tokens_per_page=16,
                num_pages=sum(each) + 1,  # noqa: B023
            )
            rung = Rung.of(table).with_heads(group_size=group, head_dim=128, kv_dtype=dtype)  # noqa: B023
            of = backend(args)

            def run(query: Any, pool: Any, arrays: Any) -> Any:
                plan = plan_step(of, arrays, rung, spec)  # noqa: B023
                return of.attend(query, pool, 0, plan.static, plan.arrays, spec, AttentionExtras())  # noqa: B023

            return [np.asarray(x) for x in jax.jit(run)(query, pool, table_arrays(table))]  # noqa: B023

        out, lse = attend(list(range(len(lens))), query)
        tiles = sum(-(-n // 128) for n in query_lens)
        assert tiles * group >= 4 * jax.devices()[0].core_count, f"{tiles} tiles × {group} are too few to be many"
        ends = np.cumsum(query_lens)
        keys, values = (np.asarray(x).astype(np.float64).reshape(-1, kv_heads, 128) for x in (pool.keys, pool.values))
        for row, end in enumerate(ends.tolist()):
            mine = slice(end - query_lens[row], end)
            alone, alone_lse = attend([row], query[mine])
            assert (alone.view(np.uint16) == out[mine].view(np.uint16)).all(), f"row {row}: other bits alone"
            assert (alone_lse.view(np.uint32) == lse[mine].view(np.uint32)).all(), f"row {row}: another LSE alone"
            slots = (np.asarray(lists[row])[:, None] * 16 + np.arange(16)).reshape(-1)
            for i in sorted({0, query_lens[row] // 2, query_lens[row] - 1}):
                stop = lens[row] - query_lens[row] + i + 1
                seen = slots[max(0, stop - window) if window else 0 : stop]
                want = attention(np.asarray(query[mine][i]).astype(np.float64), keys[seen], values[seen])
                worst = max(worst, np.abs(out[mine][i].astype(np.float64) - want).max())
            count += 1
    assert worst < 0.05, f"largest error {worst}"
    return f"{count} rows, largest error of those looked at {worst:.1e}"


PAGE_SIZES = (16, 1, 2, 3, 24, 64, 100, 128, 256)


@check
def every_page_size(args: Any) -> str:
    """Tokens laid out in pages of 1 to 256, in decode and in mixed steps, by every kernel: one page size, one answer.

    The same bits as in pages of 16, whose outputs are compared with float64.
    """
    lens, query_lens, kv_heads, group = [700, 257, 64, 1, 130], [1, 257, 3, 1, 130], 2, 4
    worst, count = 0.0, 0
    for head_dim, kv_dtype, tier, decode in (
        (128, "bfloat16", "exact", "paged"),
        (64, "bfloat16", "fast", "paged"),
        (256, "bfloat16", "exact", "paged"),
        (128, "float8_e4m3fn", "exact", "flashinfer"),
        (128, "float8_e4m3fn", "fast", "flashinfer"),
    ):
        of = backend(args, tier=tier, decode=decode)
        spec = AttentionSpec(scale=128**-0.5)
        draw = [jax.random.normal(jax.random.key(i), (sum(lens), kv_heads, head_dim)) for i in (1, 2)]
        keys, values = (np.asarray(x.astype(kv_dtype)) for x in draw)
        query = jax.random.normal(jax.random.key(3), (sum(query_lens), kv_heads * group, head_dim), jnp.bfloat16)
        for only_decode in (False, True):
            new = [1] * len(lens) if only_decode else query_lens
            asked, first = query[: sum(new)], None
            for size in PAGE_SIZES:
                out, lse = _in_pages(of, spec, size, lens, new, asked, keys, values)
                first = first or (out, lse)
                same = (out.view(np.uint16) == first[0].view(np.uint16)).all() and (lse == first[1]).all()
                name = f"head dim {head_dim}, {kv_dtype}, {tier}, {'decode' if only_decode else 'mixed'}"
                assert same, f"{name}: other bits in pages of {size}"
                count += 1
            assert first is not None
            starts, ends = np.cumsum([0, *lens]), np.cumsum(new)
            for row, n in enumerate(lens):
                mine = slice(starts[row], starts[row] + n)
                want = attention(
                    np.asarray(asked[ends[row] - 1]).astype(np.float64),
                    keys[mine].astype(np.float64),
                    values[mine].astype(np.float64),
                )
                worst = max(worst, np.abs(first[0][ends[row] - 1].astype(np.float64) - want).max())
    assert worst < 0.05, f"largest error {worst}"
    return f"{count} programs, pages of {min(PAGE_SIZES)} to {max(PAGE_SIZES)}, error {worst:.1e}"


def _in_pages(
    of: Any, spec: AttentionSpec, size: int, lens: list[int], new: list[int], query: Any, keys: Any, values: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over rows of `lens` tokens, laid out one after the other in `keys`, in scattered pages of `size`."""
    each = [-(-n // size) for n in lens]
    ids = np.random.default_rng(size).permutation(np.arange(1, sum(each) + 1))
    lists = np.split(ids, np.cumsum(each)[:-1])
    pools = []
    for stored in (keys, values):
        pool = np.full((sum(each) + 1, size, *stored.shape[1:]), np.nan, stored.dtype)
        for pages, row in zip(lists, np.split(stored, np.cumsum(lens)[:-1])):
            for i, page in enumerate(pages):
                part = row[i * size : (i + 1) * size]
                pool[page, : len(part)] = part
        pools.append(jnp.asarray(pool))
    table = build_page_table(
        query_lens=new,
        kv_lens=lens,
        pages=[x.tolist() for x in lists],
        tokens_per_page=size,
        num_pages=sum(each) + 1,
    )
    group = query.shape[1] // keys.shape[1]
    rung = Rung.of(table).with_heads(group_size=group, head_dim=keys.shape[2], kv_dtype=keys.dtype.name)

    def run(query: Any, pool: Any, arrays: Any) -> Any:
        plan = plan_step(of, arrays, rung, spec)
        return of.attend(query, pool, 0, plan.static, plan.arrays, spec, AttentionExtras())

    out, lse = jax.jit(run)(query, KvArrays(*pools), table_arrays(table))
    return np.asarray(out), np.asarray(lse)


@check
def plan_for_another_device(args: Any) -> str:
    """A number of multiprocessors that is not the device's: refused where it is given, and again by the module."""
    here = jax.devices()[0].core_count
    table = build_page_table(query_lens=[40], kv_lens=[40], pages=[[1, 2, 3]], tokens_per_page=16, num_pages=4)
    rung = Rung.of(table).with_heads(group_size=4, head_dim=128, kv_dtype="bfloat16")
    arrays, pool = table_arrays(table), KvArrays(*jnp.zeros((2, 4, 16, 2, 128), jnp.bfloat16))
    query = jnp.ones((40, 8, 128), jnp.bfloat16)
    of = backend(args)

    @functools.partial(jax.jit, static_argnums=0)
    def run(ctas: int, query: Any, pool: Any, arrays: Any) -> Any:
        static = dataclasses.replace(of.static_plan(rung, SPEC), ctas=ctas)
        return of.attend(query, pool, 0, static, of.plan_arrays(static, arrays), SPEC, AttentionExtras())

    jax.block_until_ready(run(here, query, pool, arrays))
    wrong = (here - 1, here + 1, 2 * here)
    for count in wrong:
        text = _refusal(lambda n=count: plan_step(backend(args, sm_count=n), arrays, rung, SPEC))
        assert f"sm_count={count}" in text, text
        assert f"{here} SMs" in text, text
        text = _refusal(lambda n=count: jax.block_until_ready(run(n, query, pool, arrays)))
        assert f"of {count} multiprocessors" in text, text
    right = backend(args, sm_count=here)
    assert plan_step(right, arrays, rung, SPEC).static.ctas == here
    return f"{here} multiprocessors; refused {', '.join(map(str, wrong))}"


def _refusal(call: Callable[[], Any]) -> str:
    """What the error says that `call` raises."""
    try:
        call()
    except Exception as error:  # the FFI's errors have no type of their own
        return str(error)
    raise AssertionError("it was accepted")
