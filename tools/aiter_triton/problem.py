"""Small problems for the vendor's kernels, and their answer in float64, written apart from everything else here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import kernels


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Rows over pages. `pages[r]` are row r's pages in order; every page of the pool that no row lists is spare.

    - `query` (t, h, d); `key_pool`, `value_pool` (n, p, k, d); row r has `query_lens[r]` tokens, the last ones of its
      `kv_lens[r]`.
    """

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_page(self) -> int:
        """Token slots of a page."""
        return self.key_pool.shape[1]

    def arrays(self) -> dict[str, Any]:
        """Metadata as `kernels.attend` takes it, lengths bounded by the longest row."""
        offsets = torch.tensor(np.cumsum([0, *map(len, self.pages)]), dtype=torch.int32)
        ids = torch.tensor([p for row in self.pages for p in row], dtype=torch.int32)
        return {
            "query_offsets": torch.tensor(np.cumsum([0, *self.query_lens]), dtype=torch.int32),
            "kv_lens": torch.tensor(self.kv_lens, dtype=torch.int32),
            "block_table": kernels.table_of(offsets, ids, self.tokens_per_page),
            "max_query_len": max(self.query_lens),
            "max_kv_len": max(self.kv_lens),
        }

    def run(self, **options: Any) -> torch.Tensor:
        """The vendor's answer; `options` go to `kernels.attend`, over those of `arrays` and a scale of 1/sqrt(d)."""
        out = torch.full_like(self.query, float("nan"))
        scale = self.query.shape[2] ** -0.5
        kernels.attend(self.query, self.key_pool, self.value_pool, out, **{"scale": scale, **self.arrays(), **options})
        return out

    def exact(self, *, scale: float | None = None, window: int = 0, soft_cap: float = 0.0) -> np.ndarray:
        """The answer in float64 (t, h, d): causal, bottom-right aligned, `window` counting the token itself."""
        query = self.query.double().numpy()
        pools = self.key_pool.double().numpy(), self.value_pool.double().numpy()
        group = query.shape[1] // self.key_pool.shape[2]
        scale = query.shape[2] ** -0.5 if scale is None else scale
        out, start = np.zeros_like(query), 0
        for q_len, kv_len, pages in zip(self.query_lens, self.kv_lens, self.pages):
            keys, values = (p[list(pages)].reshape(-1, *p.shape[2:])[:kv_len].repeat(group, 1) for p in pools)
            logits = np.einsum("qhd,khd->hqk", query[start : start + q_len], keys) * scale
            if soft_cap:
                logits = soft_cap * np.tanh(logits / soft_cap)
            at, seen = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None]
            visible = (seen <= at) & (seen > at - window if window else True)
            logits = np.where(visible, logits, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[start : start + q_len] = np.einsum("hqk,khd->qhd", weights, values)
            start += q_len
        return out

    def dead(self) -> torch.Tensor:
        """Which slots (n, p) no row holds a token in."""
        dead = torch.ones(self.key_pool.shape[:2], dtype=torch.bool)
        for kv_len, pages in zip(self.kv_lens, self.pages):
            for at in range(kv_len):
                dead[pages[at // self.tokens_per_page], at % self.tokens_per_page] = False
        return dead


def make(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """Normal values, shuffled pages, page 0 unlisted."""
    random = np.random.default_rng(seed)
    counts = [-(-n // page) for n in kv_lens]
    num_pages = sum(counts) + 3
    ids, ends = random.permutation(np.arange(1, num_pages)), np.cumsum([0, *counts])
    pages = tuple(tuple(int(p) for p in ids[a:b]) for a, b in itertools.pairwise(ends))

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape)).to(dtype)

    pool = (num_pages, page, kv_heads, dim)
    return Problem(
        normal(sum(query_lens), heads, dim), normal(*pool), normal(*pool), tuple(query_lens), tuple(kv_lens), pages
    )
