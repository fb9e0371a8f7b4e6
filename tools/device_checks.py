"""What only a GPU can show of the FlashInfer backend, as checks: `python tools/device_checks.py [--directory MODULES]`.

- large pool: more than 2³¹ elements and page ids past 65,536 after the layer's offset, written and read right;
- prefill's bits in any company, every page size, and the refusal of a plan for another device
  (`device_checks_attention.py`);
- rotary and append in one kernel against the two apart; whole layers by kernels against XLA's, and their bits in any
  company (`device_checks_layers.py`);
- the compiled step: no copy of the pool, none of a layer's weights, no collective;
- compile time flat from 4 to 80 layers;
- with two devices or more, a sharded step's bits are those of one device.

Exits with 0 only if every check ran and passed; a check that could not run says so and counts as not passed unless it
was left out by name (`--without sharded`). Nothing here runs on a CPU (requirement T6).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import Any

import device_checks_attention  # noqa: F401 (registers its checks)
import device_checks_layers  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from device_check import CHECKS, SPEC, attention, backend, check
from jax.sharding import AxisType, Mesh

from paged import build_page_table
from paged.backends.metadata import table_arrays
from paged.backends.protocol import KvArrays, PackedHeads, Rung
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, packed_attention_step, plan_step


@check
def large_pool(args: Any) -> str:
    """Four layers of 40,001 pages: 2.6 · 10⁹ elements, the last layer's pages are past 120,000."""
    layers, pages, size, kv_heads, group, dim = 4, 40_001, 16, 8, 4, 128
    lens, query_lens = [100, 33, 257], [1, 20, 1]
    ids = [[pages - 1 - 20 * r - i for i in range(-(-n // size))] for r, n in enumerate(lens)]
    table = build_page_table(
        query_lens=query_lens, kv_lens=lens, pages=ids, tokens_per_page=size, num_pages=pages
    )  # fmt: skip
    layer, tokens = layers - 1, sum(query_lens)
    draw = jax.jit(lambda i, shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16), static_argnums=1)
    new = draw(7, (tokens, kv_heads, group + 2, dim))
    heads = PackedHeads(new, jnp.ones((tokens, dim // 2)), jnp.zeros((tokens, dim // 2)))  # turned by nothing
    worst = 0.0
    for packed in (False, True):
        of = backend(args)
        shape = (layers * pages, size, kv_heads, dim)
        pool = KvArrays(draw(1, shape), draw(2, shape))
        assert pool.keys.size > 2**31
        assert layer * pages + pages - 1 > 65_536
        rung = Rung.of(table).with_heads(group_size=group, head_dim=dim, kv_dtype="bfloat16")
        rows = np.asarray([layer * pages + p for row in ids for p in row])
        before = [np.asarray(a[rows]) for a in (pool.keys, pool.values)]
        marks = [np.asarray(a[: 3 * pages : 997]).copy() for a in (pool.keys, pool.values)]

        def run(pool: KvArrays, heads: PackedHeads, arrays: Any) -> Any:
            plan = plan_step(of, arrays, rung, SPEC)  # noqa: B023
            if packed:  # noqa: B023
                return packed_attention_step(of, plan, pool, heads, layer=layer)  # noqa: B023
            return attention_step(of, plan, pool, *heads.split(), layer=layer)  # noqa: B023

        out, _, pool = jax.jit(run, donate_argnums=0)(pool, heads, table_arrays(table))
        slot = 0
        query, key, value = (np.asarray(x).astype(np.float64) for x in heads.split())
        after = [np.asarray(a[rows]).astype(np.float64) for a in (pool.keys, pool.values)]
        for row, (n, new_tokens) in enumerate(zip(lens, query_lens)):
            first = sum(len(r) for r in ids[:row])
            mine = [x[first : first + len(ids[row])].reshape(-1, kv_heads, dim) for x in (*after, *before)]
            assert (mine[0][n - new_tokens : n] == key[slot : slot + new_tokens]).all(), "keys written elsewhere"
            assert (mine[1][n - new_tokens : n] == value[slot : slot + new_tokens]).all(), "values written elsewhere"
            assert (mine[0][: n - new_tokens] == mine[2][: n - new_tokens].astype(np.float64)).all(), "old keys touched"
            for i in range(new_tokens):
                end = n - new_tokens + i + 1
                want = attention(query[slot + i], mine[0][:end], mine[1][:end])
                worst = max(worst, np.abs(np.asarray(out[slot + i]).astype(np.float64) - want).max())
            slot += new_tokens
        for a, mark in zip((pool.keys, pool.values), marks):
            assert (np.asarray(a[: 3 * pages : 997]).view(np.uint16) == mark.view(np.uint16)).all(), "other layers"
        del pool
    assert worst < 0.02, f"largest error {worst}"
    return f"{layers * pages * size * kv_heads * dim:.3g} elements, page ids to {layers * pages - 1}, error {worst:.1e}"


@check
def sharded(args: Any) -> str:
    """Two devices: no collective between append and attention, and the attention's bits are those of one device."""
    devices = jax.devices("gpu")
    assert len(devices) >= 2, f"only {len(devices)} device"
    mesh = KvSharding(Mesh(devices[:2], ("tensor",), axis_types=(AxisType.Auto,)), ("tensor",))
    rows, size, kv_heads, group, dim, pages, layers = 5, 16, 4, 4, 128, 200, 3
    lens, query_lens, count = [700, 40, 16, 2100, 5], [1, 40, 16, 1, 1], 0
    ids = np.random.default_rng(0).permutation(np.arange(1, pages))
    lists, at = [], 0
    for n in lens:
        lists.append(ids[at : at + -(-n // size)].tolist())
        at += -(-n // size)
    for tier in ("exact", "fast"):
        for only_decode in (False, True):
            query = [1] * rows if only_decode else query_lens
            table = build_page_table(
                query_lens=query, kv_lens=lens, pages=lists, tokens_per_page=size, num_pages=pages
            )  # fmt: skip
            rung = Rung.of(table).with_heads(group_size=group, head_dim=dim, kv_dtype="bfloat16")
            of, arrays, found = backend(args, tier=tier), table_arrays(table), []
            for packed in (False, True):
                for sharding in (None, mesh):
                    key = jax.random.key(0)
                    shape = (layers * pages, size, kv_heads, dim)
                    keys, values = jax.random.normal(key, (2, *shape), jnp.bfloat16)
                    pool = KvArrays(keys, values)
                    new = jax.random.normal(key, (sum(query), kv_heads, group + 2, dim), jnp.bfloat16)
                    angle = jax.random.normal(key, (sum(query), dim // 2))
                    heads = PackedHeads(new, jnp.cos(angle), jnp.sin(angle))
                    if sharding is not None:
                        pool = jax.device_put(pool, sharding.named(sharding.pool_spec))

                    def run(pool: Any, heads: Any, arrays: Any) -> Any:
                        plan = plan_step(of, arrays, rung, SPEC)  # noqa: B023
                        if packed:  # noqa: B023
                            return packed_attention_step(of, plan, pool, heads, layer=1, sharding=sharding)  # noqa: B023
                        return attention_step(of, plan, pool, *heads.split(), layer=1, sharding=sharding)  # noqa: B023

                    compiled: Any = jax.jit(run, donate_argnums=0).lower(pool, heads, arrays).compile()
                    assert not re.search(r"all-gather|all-reduce|all-to-all|permute", compiled.as_text()), (
                        "a collective"
                    )
                    out, lse, pool = compiled(pool, heads, arrays)
                    bits = [np.asarray(out).view(np.uint16), np.asarray(lse).view(np.uint32)]
                    found.append(
                        [*bits, np.asarray(pool.keys).view(np.uint16), np.asarray(pool.values).view(np.uint16)]
                    )
                    count += 1
            for one, two in ((0, 1), (2, 3)):
                assert all((a == b).all() for a, b in zip(found[one], found[two])), f"{tier}: two devices, other bits"
    return f"{count} programs, bits equal"


def main() -> int:
    """Run the checks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory")
    parser.add_argument("--without", action="append", default=[], choices=sorted(CHECKS))
    parser.add_argument("--only", action="append", default=[], choices=sorted(CHECKS))
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"no GPU here (jax runs on {jax.default_backend()}): nothing was checked", file=sys.stderr)
        return 2
    failed, lines = 0, []
    chosen = [n for n in CHECKS if n not in args.without and (not args.only or n in args.only)]
    for name in chosen:
        start = time.perf_counter()
        try:
            text = CHECKS[name](args)
        except Exception as error:
            failed += 1
            text = f"FAILED {type(error).__name__}: {str(error)[:600]}"
        lines.append(f"{name:30} {time.perf_counter() - start:6.1f} s  {text}")
    print(f"{jax.devices()[0].device_kind}, {len(jax.devices())} devices")
    print("\n".join(lines))
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
