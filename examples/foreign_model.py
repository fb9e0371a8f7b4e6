"""Decode with an Equinox transformer that knows nothing of pages: its attention modules are exchanged, nothing else.

python examples/foreign_model.py
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from paged import build_page_table, get_backend
from paged.backends.metadata import pack_table, unpack_table
from paged.engine.pool import KvPool
from paged.models import MultiheadParts, page_attention

rotary = eqx.nn.RotaryPositionalEmbedding(16)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(64)
        self.attention = eqx.nn.MultiheadAttention(4, 64, key=a)
        self.mlp = eqx.nn.MLP(64, 64, 128, 1, key=b)

    def __call__(self, x):
        def turn(query, key, value):
            rotate = jax.vmap(rotary, in_axes=1, out_axes=1)
            return rotate(query), rotate(key), value

        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)), process_heads=turn)
        return x + jax.vmap(self.mlp)(x)


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b, *rest = jax.random.split(key, 6)
        self.embedding, self.head = eqx.nn.Embedding(100, 64, key=a), eqx.nn.Linear(64, 100, key=b)
        self.blocks = [Block(k) for k in rest]

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


model = Transformer(jax.random.key(0))

# Where the attention is, and what paging stands in for: the causal mask, and rotary positions counted from 0.
parts = MultiheadParts(rotary=rotary, replaces=frozenset({"mask", "process_heads"}))
paged = page_attention(model, lambda m: [block.attention for block in m.blocks], parts)

backend = get_backend("xla")
pool = KvPool(paged.storage_layout(num_pages=9, tokens_per_page=8, dtype="float32"), backend)
arrays, static = eqx.partition(paged, eqx.is_array)


@partial(jax.jit, static_argnames="rung", donate_argnums=0)
def step(pool, arrays, tokens, positions, table, *, rung):
    paged = eqx.combine(arrays, static)
    plans = paged.plan(backend, unpack_table(table, rung), rung)
    logits, pool = paged(lambda m: m(tokens), positions, pool, plans, backend=backend)
    return pool, logits[-1].argmax()


def feed(pool, tokens, start):
    """Feed `tokens` of one request at positions from `start` on; the pool and the next token."""
    end = start + len(tokens)
    table = build_page_table(
        query_lens=[len(tokens)],
        kv_lens=[end],
        pages=[[5, 2, 7, 1]],
        tokens_per_page=8,
        num_pages=9,
        max_kv_len=32,
    ).pad(rows=1, tokens=len(tokens), listed_pages=4, max_query_len=len(tokens), max_kv_len=32)
    vector, rung = pack_table(table)
    fed = [jnp.asarray(x, jnp.int32) for x in (tokens, table.positions(), vector)]
    return pool.step(lambda live: step(live, arrays, *fed, rung=rung))


tokens = [3, 14, 15, 92, 65]
pool, token = feed(pool, tokens, 0)
while len(tokens) < 20:
    tokens.append(int(token))
    pool, token = feed(pool, tokens[-1:], len(tokens) - 1)
print("on pages:     ", tokens[5:])

again = tokens[:5]
while len(again) < 20:
    again.append(int(np.argmax(model(jnp.asarray(again))[-1])))
print("without cache:", again[5:])
