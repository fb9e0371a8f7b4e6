"""What a compiled step does with a pool: which operations are as large as it, and whether devices talk."""

from __future__ import annotations

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from reference_problem import BACKEND, Batch, Laid, lay

from paged.backends.protocol import AttentionExtras, Rung
from paged.backends.sharding import KvSharding
from paged.backends.step import attention_step, plan_step
from paged.common import AttentionSpec

_OPERATION = re.compile(r"\s*(?:ROOT )?%?[\w.-]+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(")
FREE = {"parameter", "get-tuple-element", "bitcast", "tuple", "while"}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def pool_sized(compiled, elements: int) -> Counter:
    """Operations with that many elements, inside fusions too, but for those that cost nothing."""
    found = Counter()
    for line in compiled.as_text().splitlines():
        match = _OPERATION.match(line)
        if match and match[2] not in FREE and math.prod(int(n) for n in match[1].split(",") if n) == elements:
            found[match[2]] += 1
    return found


def collectives(compiled) -> list[str]:
    text = compiled.as_text()
    return [name for name in COLLECTIVES if re.search(rf"\b{name}(-start)?\(", text)]


def addresses(pool) -> list[int]:
    return [s.data.unsafe_buffer_pointer() for x in (pool.keys, pool.values) for s in x.addressable_shards]


def new_tokens(batch: Batch, laid: Laid) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the step's tokens; garbage for padding."""
    wide = laid.query.shape[0]

    def packed(rows: list[np.ndarray]) -> jax.Array:
        new = np.concatenate([x[len(x) - len(q) :] for x, q in zip(rows, batch.queries)])
        return jnp.asarray(np.concatenate([new, np.full((wide - len(new), *new.shape[1:]), 77, new.dtype)]))

    return packed(batch.keys), packed(batch.values)


def scanned_step(table, spec: AttentionSpec, extras=None, *, num_layers: int, sharding: KvSharding | None = None):
    """pool, query, key, value, table arrays -> pool, and every layer's output and LSE, under a scan over layers."""

    def step(pool, query, key, value, arrays):
        plan = plan_step(BACKEND, arrays, Rung.of(table), spec)

        def layer(pool, index):
            out, lse, pool = attention_step(
                BACKEND,
                plan,
                pool,
                query,
                key,
                value,
                layer=index,
                extras=extras or AttentionExtras(),
                sharding=sharding,
            )
            return pool, (out, lse)

        return jax.lax.scan(layer, pool, jnp.arange(num_layers, dtype=jnp.int32))

    return step


def small_step(dtype: str, *, heads=(4, 2), num_layers=3, num_pages=200, poisoned=True):
    """A batch whose new tokens are still to be appended, laid out in a pool of several layers, with padding."""
    batch = Batch.random([5, 1, 0], [9, 20, 3], heads=heads, dims=(16, 8), dtype=dtype)
    pad = {"rows": 5, "tokens": 11, "listed_pages": 20, "max_query_len": 8, "max_kv_len": 64}
    return batch, lay(batch, num_pages=num_pages, num_layers=num_layers, pad=pad, poisoned=poisoned)
