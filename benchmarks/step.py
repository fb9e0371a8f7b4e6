"""A whole decode step of an 8B-geometry model on a GPU, beside the byte floor measured in the same run.

    python benchmarks/step.py [--directory MODULES] [--tier exact|fast] [--json FILE]

Llama-3.1-8B sizes, random bf16 weights. The floor is (weights + KV read) / copy bandwidth. A step's tokens stay on the
device and steps are queued, as the engine would with its host work hidden: 12 steps, three passes, median and spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel import ceilings

from paged import AttentionSpec, StorageLayout, build_page_table, get_backend
from paged.backends.metadata import table_arrays
from paged.backends.moves import pool_structs
from paged.backends.protocol import KvArrays, Rung
from paged.backends.step import plan_step
from paged.engine.compile_options import compiler_options
from paged.models import DecoderConfig, random_decoder

STEPS, PASSES = 12, 3
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_query_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "max_positions": 131072,
    "rms_eps": 1e-5,
    "tied_embeddings": False,
    "eos": (128001,),
}


def config(num_layers: int = 32, **sizes: Any) -> DecoderConfig:
    """The geometry, with another depth or other sizes."""
    fields = {**LLAMA_8B, **sizes, "num_layers": num_layers}
    block = (AttentionSpec(scale=fields["head_dim"] ** -0.5),)
    return DecoderConfig(**fields, block=block)


@dataclasses.dataclass
class Case:
    """One compiled decode step with what it runs on; every step runs at the same lengths, what changes is tokens."""

    compiled: Any
    model: Any
    pool: KvArrays
    tokens: jax.Array
    table: Any
    rows: int
    context: int
    compile_s: float

    def step(self) -> jax.Array:
        """Queue one step; its tokens."""
        self.pool, self.tokens = self.compiled(self.pool, self.model, self.tokens, self.table)
        return self.tokens

    def time(self) -> tuple[float, float]:
        """Seconds of one step, queued `STEPS` at a time: median over passes, and (largest − smallest) / median."""
        times = []
        for _ in range(PASSES + 1):
            jax.block_until_ready(self.step())
            start = time.perf_counter()
            for _ in range(STEPS):
                self.step()
            jax.block_until_ready(self.tokens)
            times.append((time.perf_counter() - start) / STEPS)
        times = sorted(times[1:])
        middle = statistics.median(times)
        return middle, (times[-1] - times[0]) / middle

    def addresses(self) -> list[int]:
        """Of the pool's buffers."""
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(self.pool)]


def prepare(model, backend, rows: int, context: int, options: dict) -> Case:
    """Compile one decode step of `rows` requests of `context` tokens."""
    c, size = model.config, 16
    each = -(-context // size)
    pages = rows * each + 1
    layout = StorageLayout(
        num_layers=c.num_layers,
        num_pages=pages,
        tokens_per_page=size,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        dtype="bfloat16",
    )
    structs = pool_structs(layout, backend.capabilities)
    draw = jax.jit(lambda: jax.tree.map(lambda s: jax.random.normal(jax.random.key(2), s.shape, s.dtype), structs))
    pool = draw()
    ids = np.random.default_rng(0).permutation(np.arange(1, pages)).reshape(rows, each)

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def step(pool: KvArrays, model, tokens, table):
        rung = base.with_heads(
            group_size=c.num_query_heads // c.num_kv_heads, head_dim=c.head_dim, kv_dtype=pool.dtype.name
        )
        plans = tuple(plan_step(backend, table, rung, spec) for spec in c.block)
        samples = jnp.arange(rows, dtype=jnp.int32)
        logits, pool = model(tokens, table.kv_lens - 1, samples, pool, plans, backend=backend)
        return pool, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    table = build_page_table(
        query_lens=[1] * rows,
        kv_lens=[context] * rows,
        pages=ids.tolist(),
        tokens_per_page=size,
        num_pages=pages,
    ).pad(rows=rows, tokens=rows, listed_pages=rows * each, max_query_len=1, max_kv_len=each * size)
    base, tokens = Rung.of(table), jnp.arange(rows, dtype=jnp.int32)
    arrays = table_arrays(table)
    start = time.perf_counter()
    compiled = step.lower(pool, model, tokens, arrays).compile()
    took = time.perf_counter() - start
    return Case(compiled, model, pool, tokens, arrays, rows, context, took)


def measure(model, backend, rows: int, context: int, options: dict) -> dict[str, object]:
    """Compile one decode step and time it queued."""
    case, c = prepare(model, backend, rows, context, options), model.config
    address = case.addresses()
    took, spread = case.time()
    weights = sum(x.nbytes for x in jax.tree.leaves(model)) - model.embedding.nbytes
    kv = 2 * c.num_layers * rows * context * c.num_kv_heads * c.head_dim * 2
    return {
        "rows": rows,
        "context": context,
        "layers": c.num_layers,
        "compile_s": case.compile_s,
        "step_ms": took * 1e3,
        "spread": spread,
        "floor_bytes": weights + kv,
        "temp_bytes": case.compiled.memory_analysis().temp_size_in_bytes,
        "in_place": address == case.addresses(),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory")
    parser.add_argument("--json")
    args = parser.parse_args()
    top = ceilings()
    bandwidth, rows = top["copy_bytes_per_s"], []
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    options = compiler_options("gpu")
    small = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_query_heads": 8,
        "num_kv_heads": 2,
        "vocab_size": 32000,
        "eos": (2,),
    }

    def show(label, found):
        floor = found["floor_bytes"] / bandwidth * 1e3
        rows.append({"label": label, "floor_ms": floor, **found})
        print(
            f"{label:28} {found['layers']:3} layers {found['rows']:3} × {found['context']:5}: compile "
            f"{found['compile_s']:5.1f} s, step {found['step_ms']:7.3f} ms ±{found['spread']:.2f}, floor {floor:6.3f}, "
            f"ratio {found['step_ms'] / floor:.2f}, temp {found['temp_bytes'] / 1e6:.0f} MB, in place "
            f"{found['in_place']}",
            flush=True,
        )

    for layers in (4, 80):
        model = random_decoder(config(layers, **small), jax.random.key(0), "bfloat16")
        show("small", measure(model, get_backend("flashinfer", directory=args.directory), 16, 1024, options))
    model = random_decoder(config(), jax.random.key(0), "bfloat16")
    for tier in ("fast", "exact"):
        backend = get_backend("flashinfer", tier=tier, directory=args.directory)
        for count, context in ((2, 1024), (16, 1024), (64, 2048)):
            show(f"8B {tier}", measure(model, backend, count, context, options))
    show(
        "8B fast, default flags",
        measure(model, get_backend("flashinfer", tier="fast", directory=args.directory), 16, 1024, {}),
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"ceilings": top, "rows": rows, "device": jax.devices()[0].device_kind}, file, indent=1)


if __name__ == "__main__":
    main()
