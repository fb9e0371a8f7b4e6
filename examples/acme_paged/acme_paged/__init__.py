"""A backend of paged in one file: what a kernel author writes. Here the "kernel" is a gather and two einsums.

pip install --editable examples/acme_paged
paged certify acme --output acme.json --html acme.html
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from paged.backends import moves
from paged.common import Capabilities, Range

CAPABILITIES = Capabilities(
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    kv_dtypes=frozenset({"bfloat16", "float16", "float32"}),
    page_sizes=Range(1, 256),
    head_dims=frozenset({16, 64, 80, 96, 128, 256}),
    group_sizes=Range(1, 16),
    # Whatever is not named here is refused by paged before it reaches us: sinks, fp8 scales, non-causal masks.
    features=frozenset({"window", "soft_cap", "lse", "prefill", "decode", "mixed"}),
    # The arithmetic we claim: float32 weights, not divided by their sum before they meet V.
    numerics="N0+xla",
)


@dataclasses.dataclass(frozen=True)
class Acme:
    """Frozen, hence hashable: it is a static argument of the jitted step."""

    name: str = "acme"
    capabilities: Capabilities = CAPABILITIES

    def static_plan(self, rung, spec):
        """Constant per rung. We need no more than the rung itself."""
        return rung

    def plan_arrays(self, rung, table):
        """Once per step, for all layers: each token's row and position, and each row's pages as a rectangle."""
        token = jnp.arange(rung.tokens, dtype=jnp.int32)
        row = jnp.minimum(moves.rows_of(table.query_offsets, rung.tokens), max(rung.rows - 1, 0))
        position = table.kv_lens[row] - table.query_offsets[row + 1] + token
        live = (token < table.query_offsets[-1]) & (table.kv_lens[row] > 0)
        width = -(-rung.max_kv_len // rung.tokens_per_page)
        entry = table.page_offsets[:-1, None] + jnp.arange(width, dtype=jnp.int32)[None]
        listed = entry < table.page_offsets[1:, None]
        pages = jnp.where(listed, table.page_ids[jnp.where(listed, entry, 0)], 0)  # page 0: the sentinel
        return {"position": jnp.where(live, position, -1), "pages": pages[row]}

    def append(self, pool, key, value, slots, static, arrays):
        """Slots are absolute; negative ones are padding and must not be written."""
        return moves.scatter_append(pool, key, value, slots)

    def attend(self, query, pool, page_base, static, arrays, spec, extras):
        """Output in the query's dtype, natural-log LSE in float32; nothing from slots that are not ours to read."""
        tokens, heads, dim = query.shape
        kv_heads = pool.keys.shape[2]
        rows = arrays["pages"] + page_base
        keys, values = (x[rows].reshape(tokens, -1, *x.shape[2:]).astype(jnp.float32) for x in (pool.keys, pool.values))
        at = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        position = arrays["position"][:, None]
        seen = at <= position
        if spec.window is not None:
            seen &= at > position - spec.window
        # Masked before any arithmetic: 0 × NaN would let what lies in unowned slots through.
        keys, values = (jnp.where(seen[:, :, None, None], x, jnp.float32(0)) for x in (keys, values))
        grouped = query.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, dim)
        with jax.default_matmul_precision("highest"):
            logits = jnp.einsum("tkgd,tskd->tkgs", grouped, keys) * jnp.float32(spec.scale)
            if spec.soft_cap is not None:
                logits = jnp.float32(spec.soft_cap) * jnp.tanh(logits / jnp.float32(spec.soft_cap))
            logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
            top = jnp.max(logits, axis=-1, keepdims=True)
            top = jnp.where(jnp.isfinite(top), top, jnp.float32(0))
            weights = jnp.exp(logits - top)
            total = jnp.sum(weights, axis=-1)
            out = (
                jnp.einsum("tkgs,tske->tkge", weights, values) / jnp.where(total > 0, total, jnp.float32(1))[..., None]
            )
        lse = jnp.where(total > 0, top[..., 0] + jnp.log(total), -jnp.inf)
        out = out + jnp.float32(0)  # a computed zero is +0
        return out.reshape(tokens, heads, -1).astype(query.dtype), lse.reshape(tokens, heads)

    def scrub(self, pool, pages):
        """Zero the named rows of the pool."""
        return moves.scrub(pool, pages)

    def copy_pages(self, pool, source, target):
        """Copy rows of the pool."""
        return moves.copy_pages(pool, source, target)


def make_backend() -> Acme:
    """What the entry point names. It must not touch a device."""
    return Acme()
