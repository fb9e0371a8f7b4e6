"""What the checks of `device_checks.py` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paged import AttentionSpec, get_backend

SPEC = AttentionSpec(scale=128**-0.5)
CHECKS: dict[str, Callable[[Any], str]] = {}


def check(run: Callable[[Any], str]) -> Callable[[Any], str]:
    """Register a check: it returns what it saw, and raises if that is wrong."""
    CHECKS[run.__name__.replace("_", " ")] = run
    return run


def backend(args: Any, **options: Any) -> Any:
    """The backend under test."""
    return get_backend("flashinfer", directory=args.directory, **options)


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One token's attention (h, d) over (n, k, d), in float64."""
    group = query.shape[0] // keys.shape[1]
    out = np.zeros(query.shape)
    for h in range(query.shape[0]):
        logits = keys[:, h // group] @ query[h] * np.float64(np.float32(SPEC.scale))
        weights = np.exp(logits - logits.max())
        out[h] = weights @ values[:, h // group] / weights.sum()
    return out
