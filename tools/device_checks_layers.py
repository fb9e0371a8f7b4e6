"""Checks of `device_checks.py` of steps through whole layers: kernels against XLA, bits, the program, compile time."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_check import SPEC, backend, check

from conformance import hlo
from paged import AttentionSpec, build_page_table
from paged.backends.metadata import table_arrays
from paged.backends.protocol import Rung
from paged.backends.step import plan_step
from paged.engine.compile_options import compiler_options
from paged.engine.pool import KvPool
from paged.models import DecoderConfig, random_decoder


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
        for rows in (1, 9, 16, 17, 44, 64):
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
def layer_kernels_in_any_company(args: Any) -> str:
    """A row of a decode step by the layer kernels among two sets of others, and in another place: the same bits."""
    count, context = 0, 100
    config = decoder(4)
    model = random_decoder(config, jax.random.key(0), "bfloat16")
    for rows in (9, 16, 17, 44, 64):
        of = backend(args)
        step, (arrays, _), layout = step_of(of, config, rows, context)
        each, mine, found = -(-context // 16), 3, []
        for place, seed in ((mine, 0), (mine, 1), (rows - 1, 1)):
            # Row `mine`, and its pages, exchanged with row `place`; the others' tokens and caches by `seed`.
            order = np.arange(rows)
            order[[mine, place]] = order[[place, mine]]
            ids = np.asarray(arrays.page_ids).reshape(rows, each)
            own = ids[mine]
            slots = np.asarray(arrays.write_slots)[order]
            moved = dataclasses.replace(
                arrays, page_ids=jnp.asarray(ids[order].reshape(-1)), write_slots=jnp.asarray(slots)
            )
            fed = np.random.default_rng(seed).integers(0, config.vocab_size, rows).astype(np.int32)
            fed[place] = 5
            pool: Any = KvPool(layout, of).arrays

            def filled(a: Any, salt: int, own: Any = own, seed: int = seed) -> Any:
                pages = a.shape[0] // config.num_layers
                keys = jax.random.key(7 + salt), jax.random.key(20 + seed)
                common, other = (jax.random.normal(key, a.shape, jnp.bfloat16).view(a.dtype) for key in keys)
                keep = np.isin(np.arange(a.shape[0]) % pages, own)
                return jnp.where(jnp.asarray(keep)[:, None, None, None], common, other)

            pool = dataclasses.replace(pool, keys=filled(pool.keys, 0), values=filled(pool.values, 1))
            pool, logits = step(pool, model, moved, jnp.asarray(fed))
            pages = pool.keys.shape[0] // config.num_layers
            wanted = (np.arange(config.num_layers)[:, None] * pages + own[None]).reshape(-1)
            bits = [np.asarray(a[wanted]).view(np.uint16) for a in (pool.keys, pool.values)]
            found.append([np.asarray(logits[place]).view(np.uint32), *bits])
        for other in found[1:]:
            for a, b, what in zip(found[0], other, ("logits", "keys", "values")):
                assert (a == b).all(), f"{rows} rows: other {what} in other company"
        count += len(found)
    return f"{count} steps, bits equal"


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
