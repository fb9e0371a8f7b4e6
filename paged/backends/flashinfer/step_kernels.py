"""The kernels around attention in steps of few tokens: when they apply, and their FFI calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

MOST_TOKENS = 16
"""Tokens of a step, at most: two tiles of 8, which the kernels keep in shared memory whole."""

CHUNK = 512
"""Elements of a product's inputs in one stage, as the kernels have it."""

_MOST_CHUNKS, _MOST_SPLITS, _MOST_HIDDEN = 8, 4, 16384


@dataclasses.dataclass(frozen=True)
class StepKernels:
    """`paged.backends.protocol.LayerKernels` for one geometry.

    - `target`: name of a function of the `step` module -> its FFI target.
    - `output_splits`, `down_splits`: parts that the inputs of the two products into the residual stream are cut into.
      They depend on the model alone, so bits depend neither on the batch nor on the device.
    """

    target: Callable[[str], str]
    packed: int
    intermediate: int
    output_splits: int
    down_splits: int
    overlap: bool

    @classmethod
    def fitting(
        cls,
        target: Callable[[str], str],
        tokens: int,
        hidden: int,
        intermediate: int,
        heads: tuple[int, int, int],
        dtype: str,
        overlap: bool,
    ) -> StepKernels | None:
        """Kernels for a model, or None where they do not fit it or the step.

        `heads`: query heads, KV heads, head dim.
        """
        query_heads, kv_heads, dim = heads
        packed, attended = (query_heads + 2 * kv_heads) * dim, query_heads * dim
        into = [_splits(hidden), _splits(attended), _splits(intermediate)]
        rows = all(n % 16 == 0 for n in (packed, hidden, intermediate))
        fits = tokens <= MOST_TOKENS and dtype in ("bfloat16", "float16") and hidden <= _MOST_HIDDEN
        if not fits or not rows or None in into or into[0] != 1:
            return None
        return cls(target, packed, intermediate, into[1] or 1, into[2] or 1, overlap)

    def start(self, x: Float[Array, "t m"]) -> Float[Array, "s t m"]:
        """See `LayerKernels`."""
        return jnp.zeros((self.down_splits, *x.shape), jnp.float32)

    def enter(
        self, x: Float[Array, "t m"], parts: Float[Array, "s t m"], norm: Array, weight: Array, layer: Array, eps: float
    ) -> tuple[Float[Array, "t m"], Float[Array, "t n"]]:
        """See `LayerKernels`."""
        results = [x, x, jax.ShapeDtypeStruct((x.shape[0], self.packed), x.dtype)]
        new, _, out = self._call("enter", results, x, parts, norm, weight, layer, eps=float(eps))
        return new, out

    def leave(
        self,
        heads: Float[Array, "t n"],
        x: Float[Array, "t m"],
        output: Array,
        norm: Array,
        gate_up: Array,
        down: Array,
        layer: Array,
        eps: float,
    ) -> tuple[Float[Array, "t m"], Float[Array, "s t m"]]:
        """See `LayerKernels`."""
        parts = [jax.ShapeDtypeStruct((s, *x.shape), jnp.float32) for s in (self.down_splits, self.output_splits)]
        inner = jax.ShapeDtypeStruct((x.shape[0], self.intermediate), x.dtype)
        operands = (heads, x, output, norm, gate_up, down, layer)
        new, left, *_ = self._call("leave", [x, *parts, x, inner], *operands, eps=float(eps))
        return new, left

    def _call(self, name: str, results: list[Any], *operands: Array, **attributes: Any) -> list[Array]:
        structs = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]
        call = jax.ffi.ffi_call(self.target(name), structs)
        return list(call(*operands, overlap=np.int64(self.overlap), **attributes))


def _splits(inputs: int) -> int | None:
    """Parts that a product's inputs are cut into, so that the tokens of one part fit in shared memory; None if none."""
    for splits in range(1, _MOST_SPLITS + 1):
        if inputs % (splits * CHUNK) == 0 and inputs // (splits * CHUNK) <= _MOST_CHUNKS:
            return splits
    return None
