"""Small random steps for the tests of this folder, and what they should give: a plain float64 loop in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from paged.common import AttentionSpec, PageTable, build_page_table


def random_table(
    rng: np.random.Generator,
    query_lens: list[int],
    kv_lens: list[int],
    *,
    tokens_per_page: int,
    num_pages: int,
    pages: list[np.ndarray] | None = None,
) -> PageTable:
    """A table whose rows hold `pages`, or random ones, none twice."""
    if pages is None:
        counts = [-(-kv_len // tokens_per_page) for kv_len in kv_lens]
        assert sum(counts) < num_pages, "the pool of this test is too small"
        pages = np.split(rng.permutation(np.arange(1, num_pages)), np.cumsum(counts))[:-1]
    return build_page_table(
        query_lens=query_lens, kv_lens=kv_lens, pages=pages, tokens_per_page=tokens_per_page, num_pages=num_pages
    )


def expected_attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    table: PageTable,
    spec: AttentionSpec,
    *,
    page_base: int = 0,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(t, h, e) output and (t, h) LSE in float64, +0 and −∞ where a token sees nothing."""
    tokens, heads, _ = query.shape
    group = heads // keys.shape[2]
    out, lse = np.zeros((tokens, heads, values.shape[3])), np.full((tokens, heads), -np.inf)
    positions = table.positions()
    scale = float(np.float32(spec.scale))
    for row in range(table.num_rows):
        kv_len = int(table.kv_lens[row])
        if not kv_len:
            continue
        pages = page_base + table.pages_of(row)
        k = keys[pages].reshape(-1, *keys.shape[2:])[:kv_len].astype(np.float64)
        v = values[pages].reshape(-1, *values.shape[2:])[:kv_len].astype(np.float64)
        for token in range(table.query_offsets[row], table.query_offsets[row + 1]):
            high = positions[token] + 1 if spec.causal else kv_len
            low = max(0, positions[token] + 1 - spec.window) if spec.window else 0
            for head in range(heads):
                logits = scale * (k[low:high, head // group] @ query[token, head].astype(np.float64))
                if spec.soft_cap:
                    logits = spec.soft_cap * np.tanh(logits / spec.soft_cap)
                top = max(logits.max(), -np.inf if sinks is None else float(sinks[head]))
                weights = np.exp(logits - top)
                total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[head]) - top))
                out[token, head] = weights @ v[low:high, head // group] / total
                lse[token, head] = top + np.log(total)
    return out, lse


def words(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of `values` as elements of `dtype`, in unsigned words of that size."""
    stored = np.asarray(values).astype(jnp.dtype(dtype))
    return stored.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[stored.itemsize])


def elements(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Words back as float64."""
    return np.asarray(stored).view(jnp.dtype(dtype)).astype(np.float64)


def owned_slots(table: PageTable) -> np.ndarray:
    """(num_pages, tokens_per_page) True where a row of the table may read."""
    owned = np.zeros((table.num_pages, table.tokens_per_page), bool)
    for row in range(table.num_rows):
        pages = table.pages_of(row)
        flat = np.arange(len(pages) * table.tokens_per_page) < table.kv_lens[row]
        owned[pages] = flat.reshape(len(pages), table.tokens_per_page)
    return owned
