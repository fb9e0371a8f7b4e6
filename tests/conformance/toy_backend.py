"""Attention in a few lines of float32, quick to compile: the backend that tests of the runner wrap and break."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from paged.backends import moves
from paged.common import Capabilities, Range

CAPABILITIES = Capabilities(
    dtypes=frozenset({"bfloat16", "float32"}),
    kv_dtypes=frozenset({"bfloat16", "float32", "float8_e4m3fn"}),
    page_sizes=Range(1, 64),
    head_dims=frozenset({8, 32, 64}),
    group_sizes=Range(1, 8),
    features=frozenset({"window", "soft_cap", "sinks", "lse", "non_causal", "kv_scales", "prefill", "decode", "mixed"}),
    numerics="N0+xla",
    promises=frozenset({"deterministic", "masked_nan"}),
    pool_storage="words",
)


@dataclasses.dataclass(frozen=True)
class Toy:
    """Gathers whole rows; one softmax over all of them."""

    name: str = "toy"

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def static_plan(self, rung, spec):
        return rung

    def plan_arrays(self, static, table):
        return table

    def append(self, pool, key, value, slots, static, arrays):
        return moves.scatter_append(pool, key, value, slots)

    def scrub(self, pool, pages):
        return moves.scrub(pool, pages)

    def copy_pages(self, pool, source, target):
        return moves.copy_pages(pool, source, target)

    def attend(self, query, pool, page_base, rung, table, spec, extras):
        tokens, heads, width = query.shape
        kv_heads, size = pool.keys.shape[2], rung.tokens_per_page
        row = jnp.minimum(moves.rows_of(table.query_offsets, tokens), rung.rows - 1)
        own = moves.rows_of(table.query_offsets, tokens) < rung.rows
        n = jnp.where(own, table.kv_lens[row], 0)[:, None]
        here = n - table.query_offsets[row + 1][:, None] + jnp.arange(tokens, dtype=jnp.int32)[:, None]
        at = jnp.arange(rung.max_kv_len, dtype=jnp.int32)[None]
        seen = (at < n) & ((at <= here) | (not spec.causal))
        if spec.window is not None:
            seen &= at > here - spec.window
        entry = jnp.where(seen, table.page_offsets[row][:, None] + at // size, 0)
        page = jnp.where(seen, table.page_ids[entry], 0) + page_base

        def read(stored, scale):
            found = moves.from_storage(stored[page, at % size], pool.dtype).astype(jnp.float32)
            return jnp.where(seen[..., None, None], found, jnp.float32(0)) * (1.0 if scale is None else scale)

        keys, values = read(pool.keys, extras.key_scale), read(pool.values, extras.value_scale)
        q = query.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, width)
        s = jnp.einsum("tkgd,tnkd->tkgn", q, keys, precision=lax.Precision.HIGHEST) * jnp.float32(spec.scale)
        if spec.soft_cap is not None:
            s = jnp.float32(spec.soft_cap) * jnp.tanh(s / jnp.float32(spec.soft_cap))
        s = jnp.where(seen[:, None, None], s, -jnp.inf)
        top = s.max(-1)
        if extras.sinks is not None:
            top = jnp.maximum(top, extras.sinks.reshape(1, kv_heads, -1))
        top = jnp.where(jnp.isfinite(top), top, jnp.float32(0))
        weight = jnp.exp(s - top[..., None])
        total = weight.sum(-1)
        if extras.sinks is not None:
            total = total + jnp.exp(extras.sinks.reshape(1, kv_heads, -1) - top)
        some = (n > 0)[:, :, None] & (total > 0)
        out = jnp.einsum("tkgn,tnke->tkge", weight, values, precision=lax.Precision.HIGHEST)
        out = jnp.where(some[..., None], out / jnp.where(some, total, 1.0)[..., None], jnp.float32(0))
        lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
        return out.reshape(tokens, heads, -1).astype(query.dtype), lse.reshape(tokens, heads)


def axis_rank(axis: str) -> jax.Array:
    """This device's index on a mesh axis."""
    return lax.axis_index(axis)
