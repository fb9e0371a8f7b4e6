"""A few rows of pages and a jitted step: what an engine does, small enough to read."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.backends.metadata import pack_table, unpack_table
from paged.backends.registry import get_backend
from paged.backends.step import plan_step
from paged.backends.xla.backend import XlaBackend
from paged.common import AttentionSpec, build_page_table
from paged.engine.pool import KvPool
from paged.models import Decoder, DecoderConfig
from paged.models.decoder import abstract_decoder, map_weights

XLA = get_backend("xla")


def tiny_config(**changes: Any) -> DecoderConfig:
    """Two layers whose head_dim is not hidden / heads."""
    fields = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_eps": 1e-5,
        "rope_theta": 1e4,
        "max_positions": 256,
        "tied_embeddings": False,
        "eos": (2,),
        "bos": 1,
        "block": (AttentionSpec(scale=0.25),),
    }
    return DecoderConfig(**(fields | changes))


def drawn_decoder(config: DecoderConfig, seed: int, dtype: str = "float32") -> Decoder:
    """A decoder with weights like those of `random_decoder`, but numpy's: that one compiles three seconds a config."""
    rng = np.random.default_rng(seed)

    def draw(name, position, struct):
        noise = rng.standard_normal(struct.shape, np.float32)
        value = 1 + np.float32(0.1) * noise if name.endswith("norm") else noise * np.float32(struct.shape[-1] ** -0.5)
        return jnp.asarray(value.astype(struct.dtype))

    return map_weights(draw, abstract_decoder(config, dtype))


@partial(jax.jit, static_argnames=("rung", "specs", "backend", "sharding", "scan"), donate_argnums=0)
def run_step(pool, model, tokens, positions, sample, vector, *, rung, specs, backend, sharding, scan):
    """Plan and run one step; (pool, logits)."""
    table = unpack_table(vector, rung)
    plans = tuple(plan_step(backend, table, rung, spec) for spec in specs)
    options = {"backend": backend, "sharding": sharding, "scan": scan}
    logits, pool = model(tokens, positions, sample, pool, plans, **options)
    return pool, logits


class Rows:
    """Rows of scattered pages. `step` feeds (row, start, tokens) slices packed and padded, as an engine would."""

    def __init__(self, model, *, rows=4, tokens_per_page=4, pages_per_row=8, dtype="float32", **options):
        self.model, self.rows, self.size = model, rows, tokens_per_page
        self.options = {"backend": XLA, "sharding": None, "scan": True} | options
        pages = rows * pages_per_row + 1
        order = np.random.default_rng(0).permutation(pages - 1) + 1
        self.pages = order.reshape(rows, pages_per_row).tolist()
        layout = model.config.storage_layout(
            num_pages=pages, tokens_per_page=tokens_per_page, dtype=dtype, sharding=self.options["sharding"]
        )
        self.pool = KvPool(layout, self.options["backend"], self.options["sharding"])

    def arguments(self, slices, *, width=32, positions=None):
        """Arguments of `run_step` after the pool and the model, and its static ones."""
        query = [len(tokens) for _, _, tokens in slices]
        table = build_page_table(
            query_lens=query,
            kv_lens=[start + len(tokens) for _, start, tokens in slices],
            pages=[self.pages[row] for row, _, _ in slices],
            tokens_per_page=self.size,
            num_pages=self.pool.layout.num_pages,
        )
        longest = len(self.pages[0]) * self.size
        listed = self.rows * len(self.pages[0])
        table = table.pad(rows=self.rows, tokens=width, listed_pages=listed, max_query_len=width, max_kv_len=longest)
        vector, rung = pack_table(table)
        tokens = np.zeros(width, np.int32)
        tokens[: sum(query)] = np.concatenate([np.asarray(t) for _, _, t in slices])
        sample = np.zeros(self.rows, np.int32)
        sample[: len(query)] = np.cumsum(query) - 1
        at = table.positions() if positions is None else positions
        arrays = [jnp.asarray(x, jnp.int32) for x in (tokens, at, sample, vector)]
        return arrays, {"rung": rung, "specs": self.model.config.block, **self.options}

    def step(self, slices, *, width=32, positions=None):
        """Logits (slices, vocab) after each slice's last token."""
        arrays, static = self.arguments(slices, width=width, positions=positions)
        self.pool, logits = self.pool.step(lambda pool: run_step(pool, self.model, *arrays, **static))
        return np.asarray(logits)[: len(slices)]


def dense_logits(model, tokens):
    """`Decoder.dense` of a sequence of any length, through one program of 32 tokens; causality ignores the padding."""
    padded = np.zeros(32, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_dense(model, jnp.asarray(padded)))[: len(tokens)]


_dense = jax.jit(lambda model, tokens: model.dense(tokens))


class PerLayer(XlaBackend):
    """The xla backend, declaring that it wants one pool for each layer."""

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, pool_layout="per_layer")
