"""Steps of a whole small decoder, every token's hidden state and logits, for the tests of kernels for layers."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged.backends.metadata import table_arrays
from paged.backends.protocol import KvArrays, Rung
from paged.backends.step import plan_step
from paged.common import AttentionSpec, build_page_table
from paged.models import Decoder, DecoderConfig
from paged.models.decoder import abstract_decoder, map_weights

NUM_PAGES = 120


def drawn_decoder(seed: int, block: tuple[AttentionSpec, ...] = (AttentionSpec(scale=0.25),), **sizes: int) -> Decoder:
    """A float32 decoder of random weights; `sizes` are fields of its config."""
    config = DecoderConfig(
        **({"vocab_size": 203, "num_layers": 2} | sizes),
        rms_eps=1e-5,
        rope_theta=1e4,
        max_positions=512,
        tied_embeddings=False,
        eos=(2,),
        bos=1,
        block=block,
    )
    rng = np.random.default_rng(seed)

    def draw(name: str, position: int, struct: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.standard_normal(struct.shape, np.float32)
        return jnp.asarray(1 + 0.1 * noise if name.endswith("norm") else noise * np.float32(struct.shape[-1] ** -0.5))

    return map_weights(draw, abstract_decoder(config, "float32"))


class Row(NamedTuple):
    """`tokens` of a request of which `start` are in the pool, on `pages`."""

    start: int
    tokens: list[int]
    pages: list[int]


class Step(NamedTuple):
    """What `run` gives: (t, m), (t, v), and the pool's words, (pages, slots, heads, dim)."""

    hidden: np.ndarray
    logits: np.ndarray
    keys: np.ndarray
    values: np.ndarray


@partial(jax.jit, static_argnames=("rung", "backend"), donate_argnames="pool")
def _step(model, pool, tokens, positions, table, *, rung, backend):
    plans = tuple(plan_step(backend, table, rung, spec) for spec in model.config.block)
    hidden, pool = model.hidden(tokens, positions, pool, plans, backend=backend)
    return hidden, model.logits(hidden, backend), pool


def random_pool(model: Decoder, tokens_per_page: int, seed: int = 0) -> KvArrays:
    """A pool of float32 numbers."""
    c = model.config
    shape = (c.num_layers * NUM_PAGES, tokens_per_page, c.num_kv_heads, c.head_dim)
    rng = np.random.default_rng(seed)
    keys, values = (jnp.asarray(rng.standard_normal(shape, np.float32)).view(jnp.uint32) for _ in range(2))
    return KvArrays(keys, values, words_of="float32")


def table_of(requests: list[Row], tokens_per_page: int, **padded: int) -> Any:
    """The page table of a step; `padded` are arguments of `PageTable.pad`."""
    table = build_page_table(
        query_lens=[len(row.tokens) for row in requests],
        kv_lens=[row.start + len(row.tokens) for row in requests],
        pages=[row.pages for row in requests],
        tokens_per_page=tokens_per_page,
        num_pages=NUM_PAGES,
    )
    shape = {"rows": table.num_rows, "tokens": table.num_tokens, "listed_pages": table.page_ids.shape[0]}
    shape |= {"max_query_len": table.max_query_len, "max_kv_len": table.max_kv_len} | padded
    return table.pad(**shape)


def run(model: Decoder, backend: Any, pool: KvArrays, requests: list[Row], **padded: int) -> tuple[Step, KvArrays]:
    """One step, and the pool that follows; `pool` is donated."""
    table = table_of(requests, pool.keys.shape[1], **padded)
    c = model.config
    rung = Rung.of(table).with_heads(
        group_size=c.num_query_heads // c.num_kv_heads, head_dim=c.head_dim, kv_dtype="float32"
    )
    tokens = np.zeros(table.num_tokens, np.int32)
    listed = [token for row in requests for token in row.tokens]
    tokens[: len(listed)] = listed
    arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, table.positions()))
    hidden, logits, pool = _step(model, pool, *arrays, table_arrays(table), rung=rung, backend=backend)
    return Step(*(np.array(x) for x in (hidden, logits, pool.keys, pool.values))), pool


def scattered(seed: int, lengths: list[tuple[int, int]], tokens_per_page: int) -> list[Row]:
    """Rows of (tokens in the pool, tokens of this step) on random pages, none twice."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(np.arange(1, NUM_PAGES)))
    rows = []
    for start, count in lengths:
        pages = [int(free.pop()) for _ in range(-(-(start + count) // tokens_per_page))]
        rows.append(Row(start, rng.integers(3, 203, count).tolist(), pages))
    return rows


def written(model: Decoder, rows: list[Row], tokens_per_page: int) -> np.ndarray:
    """(pages of all layers, slots) True where a step writes."""
    where = np.zeros((model.config.num_layers, NUM_PAGES, tokens_per_page), bool)
    for row in rows:
        for position in range(row.start, row.start + len(row.tokens)):
            where[:, row.pages[position // tokens_per_page], position % tokens_per_page] = True
    return where.reshape(-1, tokens_per_page)
