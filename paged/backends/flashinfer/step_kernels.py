"""Whole layers of a step of few tokens by this project's kernels: when they apply, and the FFI call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from paged.backends.flashinfer.plan import StaticPlan, decode_info
from paged.backends.protocol import KvArrays, LayerAt, LayerSizes, LayerWeights, StepPlan
from paged.common import AttentionSpec

MOST_TOKENS = 64
"""Tokens of a step, at most: the rows of one tensor core instruction."""

MOST_RESIDENT_TOKENS = 16
"""Up to here a product keeps its tokens in shared memory whole, as two tiles of 8; above it streams them beside the
weight. The two cut sums differently."""

CHUNK, WIDE_CHUNK = 512, 64
"""Elements of a product's inputs in one stage, as the kernels have it: with resident tokens, and with streamed ones."""

_MOST_CHUNKS, _MOST_SPLITS, _MOST_HIDDEN = 8, 4, 16384

_WIDE_ROWS, _WIDE_INPUTS = 8192, 4096
"""Rows of a streamed product times the parts of its inputs, at least, and inputs of one part, at most. Tokens are read
again for every tile of rows, so tiles should be tall; parts are written and read again."""


def decode_attributes(static: StaticPlan, spec: AttentionSpec) -> dict[str, Any]:
    """Attributes of the decode kernel that follow from plan and spec."""
    return {
        "split": np.int64(static.chunk is not None),
        "window": np.int64(spec.window or 0),
        "cap": float(spec.soft_cap or 0.0),
        "scale": float(spec.scale),
    }


@dataclasses.dataclass(frozen=True)
class StepKernels:
    """`paged.backends.protocol.LayerKernels` for one geometry.

    - `qkv_splits`, `output_splits`, `down_splits`: parts that the inputs of products are cut into. They depend on the
      model and on which of the two kinds of product the rung takes, so bits depend neither on the batch nor on the
      device. `qkv_splits` of None: a product with resident tokens, which is never cut there.
    - `terms`: of a decode weight, see `FlashInferBackend`.
    """

    target: Callable[[], str]
    sizes: LayerSizes
    qkv_splits: int | None
    output_splits: int
    down_splits: int
    terms: int
    overlap: bool

    @classmethod
    def fitting(
        cls, target: Callable[[], str], tokens: int, sizes: LayerSizes, dtype: str, terms: int, overlap: bool
    ) -> StepKernels | None:
        """Kernels for a model, or None where they do not fit it or the step."""
        attended = sizes.num_query_heads * sizes.head_dim
        packed = attended + 2 * sizes.num_kv_heads * sizes.head_dim
        inputs = (sizes.hidden_size, attended, sizes.intermediate_size)
        rows = all(n % 16 == 0 for n in (packed, sizes.hidden_size, sizes.intermediate_size))
        fits = tokens <= MOST_TOKENS and dtype in ("bfloat16", "float16") and sizes.hidden_size <= _MOST_HIDDEN
        if not fits or not rows:
            return None
        if tokens <= MOST_RESIDENT_TOKENS:
            qkv, output, down = (_splits(n) for n in inputs)
            if qkv != 1 or output is None or down is None:
                return None
            return cls(target, sizes, None, output, down, terms, overlap)
        if any(n % WIDE_CHUNK for n in inputs):
            return None
        outputs = (packed, sizes.hidden_size, sizes.hidden_size)
        qkv, output, down = (_wide_splits(i, o) for i, o in zip(inputs, outputs))
        return cls(target, sizes, qkv, output, down, terms, overlap)

    def start(self, x: Float[Array, "t m"]) -> Float[Array, "s t m"]:
        """See `LayerKernels`."""
        return jnp.zeros((self.down_splits, *x.shape), jnp.float32)

    def layers(
        self,
        x: Float[Array, "t m"],
        parts: Float[Array, "s t m"],
        pool: KvArrays,
        weights: LayerWeights,
        counter: Int32[Array, ""],
        at: LayerAt,
        cos: Float[Array, "t half"],
        sin: Float[Array, "t half"],
        plan: StepPlan,
        eps: float,
    ) -> tuple[Float[Array, "t m"], Float[Array, "s t m"], KvArrays]:
        """See `LayerKernels`."""
        tokens, heads, dim = x.shape[0], self.sizes.num_query_heads, self.sizes.head_dim
        _, float_bytes = decode_info(plan.static, query_heads=heads, head_dim=dim)

        def new(*shape: int, dtype: Any = x.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        in_place = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, parts, pool.keys, pool.values)]
        packed = (tokens, *weights.qkv.shape[1:-1])
        scratch = [
            new(*x.shape),
            new(*packed) if self.qkv_splits is None else new(self.qkv_splits, *packed, dtype=jnp.float32),
            new(tokens, heads, dim),
            new(tokens, heads, dim),
            new(tokens, heads, dtype=jnp.float32),
            new(max(float_bytes, 16), dtype=jnp.uint8),
            new(self.output_splits, *x.shape, dtype=jnp.float32),
            new(tokens, self.sizes.intermediate_size),
        ]
        call = jax.ffi.ffi_call(self.target(), [*in_place, *scratch], input_output_aliases={i: i for i in range(4)})
        x, parts, keys, values, *_ = call(
            *(x, parts, pool.keys, pool.values),
            *(weights.attention_norm, weights.qkv, weights.output, weights.mlp_norm, weights.gate_up, weights.down),
            *(counter, cos, sin, plan.write_slots, plan.arrays.page_ids, plan.arrays.decode_words),
            times=np.int64(at.times),
            plus=np.int64(at.plus),
            pool_times=np.int64(at.times * at.block),
            pool_plus=np.int64(at.plus * at.block + at.position),
            count=np.int64(at.count),
            num_pages=np.int64(plan.rung.num_pages),
            blocks=np.int64(plan.static.decode_blocks),
            terms=np.int64(self.terms),
            eps=float(eps),
            overlap=np.int64(self.overlap),
            **decode_attributes(plan.static, plan.spec),
        )
        return x, parts, KvArrays(keys, values, words_of=pool.words_of)


def _splits(inputs: int) -> int | None:
    """Parts that a product's inputs are cut into, so that the tokens of one part fit in shared memory; None if none."""
    for splits in range(1, _MOST_SPLITS + 1):
        if inputs % (splits * CHUNK) == 0 and inputs // (splits * CHUNK) <= _MOST_CHUNKS:
            return splits
    return None


def _wide_splits(inputs: int, outputs: int) -> int:
    """Parts that the inputs of a product with streamed tokens are cut into: the fewest that give enough rows."""
    possible = [splits for splits in range(1, _MOST_SPLITS + 1) if inputs % (splits * WIDE_CHUNK) == 0]
    enough = (n for n in possible if n * outputs >= _WIDE_ROWS and inputs <= n * _WIDE_INPUTS)
    return next(enough, possible[-1])
