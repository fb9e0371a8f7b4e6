"""What only a GPU can show of the FlashInfer backend, as checks: `python tools/device_checks.py [--directory MODULES]`.

- large pool: more than 2³¹ elements and page ids past 65,536 after the layer's offset, written and read right;
- prefill's bits in any company, every page size, and the refusal of a plan for another device
  (`device_checks_attention.py`);
- rotary and append in one kernel against the two apart; whole layers by kernels against XLA's;
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
import jax
import jax.numpy as jnp
import numpy as np
from device_check import CHECKS, SPEC, attention, backend, check
from jax.sharding import AxisType, Mesh

from conformance import hlo
from paged import AttentionSpec, build_page_table
from paged.backends.metadata import table_arrays
from paged.backends.protocol import KvArrays, PackedHeads, Rung
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, packed_attention_step, plan_step
from paged.engine.compile_options import compiler_options
from paged.engine.pool import KvPool
from paged.models import DecoderConfig, random_decoder


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


def decoder(layers: int, **sizes: Any) -> DecoderConfig:
    """A small decoder whose sizes the layer kernels take."""
    fields: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_layers": layers,
        "num_query_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "rms_eps": 1e-5,
        "rope_theta": 1e4,
        "max_positions": 4096,
        "tied_embeddings": False,
        "eos": (2,),
        "block": (SPEC,),
    }
    return DecoderConfig(**(fields | sizes))


def step_of(
    of: Any,
    config: DecoderConfig,
    rows: int,
    context: int,
    *,
    query_len: int = 1,
    pages: int = 0,
    dtype: str = "bfloat16",
) -> Any:
    """(jitted step, its arguments after pool and model, layout of the pool)."""
    each = -(-context // 16)
    pages = max(pages, rows * each + 1)
    ids = np.random.default_rng(0).permutation(np.arange(1, pages))[: rows * each].reshape(rows, each).tolist()
    table = build_page_table(
        query_lens=[query_len] * rows, kv_lens=[context] * rows, pages=ids, tokens_per_page=16, num_pages=pages
    )  # fmt: skip
    layout = config.storage_layout(num_pages=pages, tokens_per_page=16, dtype=dtype)
    group = config.num_query_heads // config.num_kv_heads
    rung = Rung.of(table).with_heads(group_size=group, head_dim=config.head_dim, kv_dtype=dtype)
    arrays, tokens = table_arrays(table), jnp.arange(rows * query_len, dtype=jnp.int32) * 7 % config.vocab_size
    offsets = jnp.tile(jnp.arange(context - query_len, context, dtype=jnp.int32), rows)

    def step(pool: Any, model: Any, arrays: Any, tokens: Any) -> Any:
        plans = tuple(plan_step(of, arrays, rung, spec) for spec in config.block)
        samples = arrays.query_offsets[1:] - 1
        logits, pool = model(tokens, offsets, samples, pool, plans, backend=of)
        return pool, logits

    options = compiler_options("gpu")
    return jax.jit(step, donate_argnums=0, compiler_options=options), (arrays, tokens), layout


@check
def layer_kernels_are_the_layers(args: Any) -> str:
    """Logits and pool of decode steps by the layer kernels and by XLA, from equal pools."""
    seen = []
    two = {"block": (SPEC, AttentionSpec(scale=128**-0.5, window=40))}
    for name, dtype, more in (("one", "bfloat16", {}), ("two", "bfloat16", two), ("one", "float16", {})):
        config = decoder(4, **more)
        model = random_decoder(config, jax.random.key(0), dtype)
        for rows in (1, 9, 16):
            found = []
            for layers in ("xla", "kernels"):
                of = backend(args, layers=layers)
                step, arguments, layout = step_of(of, config, rows, 100, dtype=dtype)
                pool: Any = KvPool(layout, of).arrays
                for _ in range(2):
                    pool, _ = step(pool, model, *arguments)
                pool, logits = step(pool, model, *arguments)
                found.append((np.asarray(logits), np.asarray(pool.keys).astype(np.float32)))
            (a, pool_a), (b, pool_b) = found
            error = float(np.linalg.norm(a - b) / np.linalg.norm(a))
            moved = float(np.linalg.norm(pool_a - pool_b) / np.linalg.norm(pool_a))
            assert max(error, moved) < 0.03, f"block {name}, {rows} rows: logits {error}, pool {moved}"
            seen.append(error)
    return f"largest relative difference of logits {max(seen):.1e}"


@check
def compiled_step(args: Any) -> str:
    """No copy of the pool or of a layer's weights, no collective, in decode and in prefill, by kernels and by XLA."""
    config, count = decoder(8), 0
    model = random_decoder(config, jax.random.key(0), "bfloat16")
    weight = config.hidden_size * config.num_query_heads * config.head_dim
    for layers in ("kernels", "xla"):
        for rows, query_len in ((4, 1), (2, 8)):
            of = backend(args, layers=layers)
            step, arguments, layout = step_of(of, config, rows, 64, query_len=query_len, pages=4000)
            pool: Any = KvPool(layout, of).arrays
            compiled: Any = step.lower(pool, model, *arguments).compile()
            text, memory = compiled.as_text(), compiled.memory_analysis()
            assert memory.alias_size_in_bytes >= pool.keys.nbytes + pool.values.nbytes, "the pool is not donated"
            for computation in hlo.parse(text).values():
                for op in computation:
                    made = op.opcode not in hlo.FREE and op.opcode not in ("custom-call", "dynamic-slice", "constant")
                    own = not op.aliases_operand
                    assert not (made and own and op.elements >= pool.keys.size), (
                        f"{layers}: {op} is as large as the pool"
                    )
                    assert not (op.opcode in ("copy", "concatenate") and op.elements >= weight), f"{layers}: {op}"
            assert not re.search(r"= \S+ (all-|reduce-scatter|collective-)", text), f"{layers}: a collective"
            address = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pool)]
            for _ in range(2):
                pool, _ = compiled(pool, model, *arguments)
                assert address == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pool)], "the pool moved"
            count += 1
    return f"{count} programs"


@check
def compile_time_is_flat(args: Any) -> str:
    """Seconds to compile a decode step of 4 and of 80 layers; the modules are loaded before."""
    took = {}
    for layers in (4, 4, 80):
        config = decoder(layers)
        model = random_decoder(config, jax.random.key(0), "bfloat16")
        for kind in ("kernels", "xla"):
            of = backend(args, layers=kind)
            step, arguments, layout = step_of(of, config, 4, 64)
            lowered = step.lower(KvPool(layout, of).arrays, model, *arguments)
            start = time.perf_counter()
            lowered.compile()
            took[layers, kind] = time.perf_counter() - start
    ratio = {kind: took[80, kind] / took[4, kind] for kind in ("kernels", "xla")}
    assert max(ratio.values()) < 1.5, took
    return ", ".join(f"{kind}: {took[80, kind]:.2f} s, ratio {ratio[kind]:.2f}" for kind in ratio)


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
