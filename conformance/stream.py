"""Random numbers that depend on a case's id and on nothing else.

Only the raw counter-based generator of numpy is used: its words are fixed by its definition, whereas the methods that
turn them into distributions may change from one numpy to the next. What is drawn from it is integer arithmetic, so the
bits are the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


class Stream:
    """A stream of random numbers named by a case and a purpose; two purposes of one case never share numbers."""

    def __init__(self, case_id: str, purpose: str):
        key = hashlib.sha256(f"{case_id}\0{purpose}".encode()).digest()[:16]
        self._philox = np.random.Philox(key=int.from_bytes(key, "little"))

    def words(self, shape: int | Sequence[int]) -> np.ndarray:
        """Uniform uint64."""
        size = int(np.prod(shape))
        return self._philox.random_raw(size).reshape(shape) if size else np.zeros(shape, np.uint64)

    def integers(self, low: int, high: int, shape: int | Sequence[int] = ()) -> np.ndarray:
        """Integers in low .. high − 1, uniform up to a bias below 2^-40."""
        span = high - low
        if not 0 < span <= 1 << 24:
            raise ValueError(f"Stream.integers: the range {low}..{high} must hold 1..2^24 values.")
        return (self.words(shape) % np.uint64(span)).astype(np.int64) + low

    def choice(self, values: Sequence[float] | np.ndarray, shape: int | Sequence[int] = ()) -> np.ndarray:
        """Entries of `values`."""
        return np.asarray(values)[self.integers(0, len(values), shape)]

    def normal(self, shape: int | Sequence[int]) -> np.ndarray:
        """Nearly normal numbers of mean 0 and variance 1 on a grid of 2^-16: sums of twelve uniform 16-bit integers."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        lanes = self.words((*shape, 3))[..., None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
        return (lanes.sum((-2, -1)).astype(np.float64) - 12 * 32767.5) / 65536.0

    def permutation(self, n: int) -> np.ndarray:
        """The integers below n in random order."""
        return np.argsort(self.words(n), kind="stable")
