"""One compiled decode step of a model, on one device or over a mesh, that the GPU benchmarks time."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from paged import AttentionSpec, KvSharding, build_page_table
from paged.backends.metadata import table_arrays
from paged.backends.protocol import Rung
from paged.backends.step import plan_step
from paged.engine import KvPool
from paged.engine.compile_options import compiler_options
from paged.models import Decoder, DecoderConfig

STEPS, PASSES = 12, 3
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_query_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_positions": 131072,
    "eos": (128001,),
}
"""Sizes of Llama-3.1-8B."""


def llama_config(sizes: dict[str, Any], **other: Any) -> DecoderConfig:
    """Sizes as a Llama with random weights in mind: no tied embeddings, no rotary scaling. `other` sizes replace."""
    fields = {"rope_theta": 500000.0, "rms_eps": 1e-5, "tied_embeddings": False, **sizes, **other}
    return DecoderConfig(**fields, block=(AttentionSpec(scale=fields["head_dim"] ** -0.5),))


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """Median, and (largest − smallest) / median."""
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def queued(run: Callable[[Any], Any], carry: Any, repeat: int, passes: int = PASSES) -> tuple[float, float]:
    """Seconds of one call of `carry = run(carry)` in a queue of `repeat`: median over passes, and the spread."""
    times = []
    for _ in range(passes):
        carry = jax.block_until_ready(run(carry))
        start = time.perf_counter()
        for _ in range(repeat):
            carry = run(carry)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - start) / repeat)
    return median_and_spread(times)


class DecodeStep:
    """A decode step of `rows` requests at `context` tokens, in place over a pool of random keys and values.

    Every call runs at the same lengths; what changes is tokens, which stay on the device. `options`: XLA's; None is
    what the engine takes. `logits` are those of the last call. `compile_s`: seconds that compiling took.
    """

    def __init__(
        self,
        model: Decoder,
        backend: Any,
        rows: int,
        context: int,
        *,
        dtype: str = "bfloat16",
        sharding: KvSharding | None = None,
        options: dict | None = None,
    ):
        c, size = model.config, 16
        each = -(-context // size)
        pages = rows * each + 1
        layout = c.storage_layout(num_pages=pages, tokens_per_page=size, dtype=dtype, sharding=sharding)
        self.model, self.rows, self.context, self.sharding = model, rows, context, sharding
        # A copy of zeros, and attention over them, can run faster than over what a cache really holds.
        self.pool, _ = KvPool(layout, backend, sharding).step(lambda arrays: (_filled(arrays), None))
        ids = np.random.default_rng(0).permutation(np.arange(1, pages)).reshape(rows, each)
        table = build_page_table(
            query_lens=[1] * rows,
            kv_lens=[context] * rows,
            pages=ids.tolist(),
            tokens_per_page=size,
            num_pages=pages,
        ).pad(rows=rows, tokens=rows, listed_pages=rows * each, max_query_len=1, max_kv_len=each * size)
        group, scan = c.num_query_heads // c.num_kv_heads, backend.capabilities.pool_layout == "stacked"
        rung = Rung.of(table)
        options = compiler_options(jax.default_backend()) if options is None else options
        where = {} if sharding is None else {"sharding": sharding}

        def everywhere(x: Any) -> Any:
            return x if sharding is None else jax.device_put(x, sharding.named(PartitionSpec()))

        @functools.partial(jax.jit, donate_argnums=0, compiler_options=options or None)
        def step(pool, model, tokens, table):
            stored = (pool[0] if isinstance(pool, tuple) else pool).dtype.name
            heads = rung.with_heads(group_size=group, head_dim=c.head_dim, kv_dtype=stored)
            plans = tuple(plan_step(backend, table, heads, spec) for spec in c.block)
            samples = jnp.arange(rows, dtype=jnp.int32)
            logits, pool = model(
                tokens, table.kv_lens - 1, samples, pool, plans, backend=backend, scan=scan, **where
            )  # fmt: skip
            tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            if sharding is not None:
                tokens = jax.lax.with_sharding_constraint(tokens, sharding.named(PartitionSpec()))
            return pool, tokens, logits

        self.tokens = everywhere(jnp.arange(rows, dtype=jnp.int32))
        self.table = everywhere(table_arrays(table))
        start = time.perf_counter()
        self.compiled: Any = step.lower(self.pool.arrays, model, self.tokens, self.table).compile()
        self.compile_s = time.perf_counter() - start

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Queue one step; the next tokens."""

        def donating(arrays: Any) -> Any:
            arrays, tokens_, logits = self.compiled(arrays, self.model, tokens, self.table)
            return arrays, (tokens_, logits)

        self.pool, (self.tokens, self.logits) = self.pool.step(donating)
        return self.tokens

    def step(self) -> jax.Array:
        """Queue one step on the last one's tokens."""
        return self(self.tokens)

    def time(self) -> tuple[float, float]:
        """Seconds of one step, queued `STEPS` at a time: median over passes, and (largest − smallest) / median."""
        jax.block_until_ready(self.step())
        return queued(self, self.tokens, STEPS)

    def reduces_in_float32(self) -> bool:
        """Whether the compiled step adds its partial sums over devices in float32."""
        shape = f"f32[{self.rows},{self.model.config.hidden_size}]"
        lines = self.compiled.as_text().splitlines()
        return any(shape in line.split(" all-reduce")[0] for line in lines if " all-reduce" in line)

    def floor_bytes(self) -> int:
        """Bytes that one device must read: its weights, embeddings left out, and its KV."""
        c, shards = self.model.config, 1 if self.sharding is None else self.sharding.kv_head_shards
        weights = sum(_on_one_device(x) for x in jax.tree.leaves(self.model)) - _on_one_device(self.model.embedding)
        element = jnp.dtype(self.pool.layout.dtype).itemsize
        kv = 2 * c.num_layers * self.rows * self.context * c.num_kv_heads * c.head_dim * element
        return weights + kv // shards


def _on_one_device(x: jax.Array) -> int:
    return x.addressable_shards[0].data.nbytes


def _filled(arrays: Any) -> Any:
    """Random numbers in the pool's arrays, in place, sharded as they are. A pool that lies in words stays zero."""
    leaves, tree = jax.tree.flatten(arrays)
    out = []
    for i, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            out.append(leaf)
            continue

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=leaf.sharding, static_argnums=1)
        def draw(old: jax.Array, seed: int) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), old.shape, old.dtype)

        out.append(draw(leaf, i))
    return jax.tree.unflatten(tree, out)
