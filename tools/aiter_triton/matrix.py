"""The vendor's attention against its float64 answer, over shapes and options: what it means, with no call of ours.

float32 and float16 are what this is about: the interpreter needs no patch for them, so a process without patches must
give the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import emulator
from .problem import make

BATCHES = (((1, 1, 1), (5, 16, 33)), ((7, 1, 13), (7, 33, 40)), ((3, 0, 2), (5, 9, 70)))
HEADS = ((4, 4), (4, 1), (6, 2))
PAGES = (1, 16, 32)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One problem: `name`, largest error, the bound on it, and a digest of the output's bits."""

    name: str
    error: float
    bound: float
    bits: str

    @property
    def within(self) -> bool:
        """Whether the output is right; NaN is not."""
        return self.error <= self.bound


def problems() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, arguments of `make`, options of a run)."""
    for dtype in (torch.float32, torch.float16):
        for number, (query_lens, kv_lens) in enumerate(BATCHES):
            for turn, (heads, kv_heads) in enumerate(HEADS):
                page = PAGES[(number + turn) % len(PAGES)]
                made = {"heads": heads, "kv_heads": kv_heads, "page": page, "dtype": dtype}
                name = f"{str(dtype)[6:]} batch {number} heads {heads}/{kv_heads} page {page}"
                yield name, {"query_lens": query_lens, "kv_lens": kv_lens, **made}, {}
        mixed = {"query_lens": BATCHES[1][0], "kv_lens": BATCHES[1][1], "dtype": dtype}
        for window in (1, 8, 16):
            yield f"{str(dtype)[6:]} window {window}", mixed, {"window": window}
        yield f"{str(dtype)[6:]} head dim 128", {**mixed, "dim": 128}, {}
        yield f"{str(dtype)[6:]} scale 0.05", mixed, {"scale": 0.05}
        one = {"query_lens": (1,), "kv_lens": (270,), "heads": 1, "kv_heads": 1, "dtype": dtype}
        yield f"{str(dtype)[6:]} in segments", one, {"max_kv_len": 600}


def run() -> list[Outcome]:
    """Every problem, in this process. The bound is the vendor's own: 4 eps max |want| + eps |want|."""
    emulator.start()
    out = []
    for name, made, options in problems():
        problem = make(**made)
        got = problem.run(**options)
        want = problem.exact(**{k: v for k, v in options.items() if k in ("window", "scale")})
        eps = torch.finfo(made["dtype"]).eps
        error = np.abs(got.double().numpy() - want) - eps * np.abs(want)
        bits = hashlib.sha256(got.numpy().tobytes()).hexdigest()
        out.append(Outcome(name, float(error.max(initial=0.0)), float(4 * eps * np.abs(want).max(initial=0.0)), bits))
    return out


def run_unpatched() -> list[Outcome]:
    """Every problem, in a process whose interpreter is as Triton ships it."""
    folder = Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, str(folder), "--matrix"], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the unpatched process ended with {done.returncode}: {done.stderr[-1000:]}")
    return [Outcome(**fields) for fields in json.loads(done.stdout)]
