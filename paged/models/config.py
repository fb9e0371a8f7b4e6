"""What a decoder is made of: sizes, options, and how each weight is shaped and sharded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from paged.backends.sharding import KvSharding
from paged.common import AttentionSpec, InvalidInputError, StorageLayout
from paged.common.checks import check_bool, check_int, check_number, per_field

LAYER_WEIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention_norm": ("hidden",),
        "query": ("query", "hidden"),
        "key": ("kv", "hidden"),
        "value": ("kv", "hidden"),
        "output": ("hidden", "query"),
        "mlp_norm": ("hidden",),
        "gate": ("intermediate", "hidden"),
        "up": ("intermediate", "hidden"),
        "down": ("hidden", "intermediate"),
    }
)
"""Weights of one layer and the dimensions of each, (out, in) as checkpoints store them."""

FUSED_WEIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}
)
"""Weights that `Decoder` stores as one, so that they are one product: name of its field -> their names."""

STORED_LAYER_WEIGHTS = ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down")
"""Weights of one layer as `Decoder` stores them: the names of the fields that hold them."""

MODEL_WEIGHTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"embedding": ("vocab", "hidden"), "norm": ("hidden",), "head": ("vocab", "hidden")}
)
"""Weights outside the layers. `head` is absent where embeddings are tied."""

SHARDED_DIMS = frozenset({"query", "kv", "intermediate", "vocab"})
"""Dimensions laid over the KV-head axes. Each weight has at most one; norms have none and are replicated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a Llama-family decoder; frozen and hashable, so it may be static under jit.

    - `head_dim`: elements of one head. Always given: it is not hidden_size / num_query_heads in every model (A7).
    - `rope_theta`, `rope_factors`: the angle of frequency pair i at position p is p · theta^(−2i / head_dim) /
      rope_factors[i]. None means that no factor applies; `llama3_rope_factors` gives those of Llama 3.1 and later.
    - `eos`: every token id that ends a text. `bos`: the id that starts one, or None.
    - `block`: attention options of the repeating block: layer i has `block[i % len(block)]`.
    - `max_positions`: positions 0 .. max_positions − 1 may occur.

    Raises `InvalidInputError` naming the field, for a size out of range, query heads that are no multiple of KV heads,
    an odd head_dim, layers that are no multiple of the block, token ids outside the vocabulary, and a block that is
    not causal.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] | None = None
    max_positions: int
    tied_embeddings: bool
    eos: tuple[int, ...]
    bos: int | None = None
    block: tuple[AttentionSpec, ...]

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_query_heads", "num_kv_heads")
        per_field(check_int, self, *sizes, "head_dim", "max_positions", minimum=1)
        per_field(check_number, self, "rms_eps", "rope_theta", positive=True)
        per_field(check_bool, self, "tied_embeddings")
        if self.num_query_heads % self.num_kv_heads:
            raise InvalidInputError(
                f"DecoderConfig.num_query_heads={self.num_query_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise InvalidInputError(f"DecoderConfig.head_dim must be even for rotary positions, got {self.head_dim}.")
        self._check_rope()
        self._check_block()
        self._check_tokens()

    def _check_rope(self) -> None:
        if self.rope_factors is None:
            return
        owner, pairs = "DecoderConfig", self.head_dim // 2
        factors = tuple(check_number(owner, "rope_factors", f, positive=True) for f in self.rope_factors)
        if len(factors) != pairs:
            raise InvalidInputError(
                f"{owner}.rope_factors must have head_dim / 2 = {pairs} entries, got {len(factors)}."
            )
        object.__setattr__(self, "rope_factors", factors)

    def _check_block(self) -> None:
        block = tuple(self.block)
        if not block or self.num_layers % len(block):
            raise InvalidInputError(
                f"DecoderConfig.block has {len(block)} positions, of which num_layers={self.num_layers} is no multiple."
            )
        for position, spec in enumerate(block):
            if not isinstance(spec, AttentionSpec) or not spec.causal:
                raise InvalidInputError(
                    f"DecoderConfig.block[{position}] must be a causal AttentionSpec, got {spec!r}."
                )
        object.__setattr__(self, "block", block)

    def _check_tokens(self) -> None:
        eos, last = (self.eos,) if isinstance(self.eos, int) else tuple(self.eos), self.vocab_size - 1
        eos = tuple(check_int("DecoderConfig", "eos", t, minimum=0, maximum=last) for t in eos)
        object.__setattr__(self, "eos", tuple(dict.fromkeys(eos)))
        if self.bos is not None:
            per_field(check_int, self, "bos", minimum=0, maximum=last)

    @property
    def num_blocks(self) -> int:
        """Times that the block repeats: the length of the scan over layers."""
        return self.num_layers // len(self.block)

    def shape(self, weight: str) -> tuple[int, ...]:
        """Shape of one weight of `LAYER_WEIGHTS` or `MODEL_WEIGHTS`, without the stacked layer axis."""
        sizes = {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "intermediate": self.intermediate_size,
            "query": self.num_query_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
        }
        return tuple(sizes[dim] for dim in _dims(weight))

    def stored_shape(self, weight: str) -> tuple[int, ...]:
        """Shape of one of `STORED_LAYER_WEIGHTS` or `MODEL_WEIGHTS` in `Decoder`, without the stacked layer axis.

        `qkv` is (KV heads, group + 2, head_dim, hidden): for each KV head the rows of its query heads, its key, its
        value. `gate_up` is (2, intermediate, hidden).
        """
        if weight == "qkv":
            group = self.num_query_heads // self.num_kv_heads
            return self.num_kv_heads, group + 2, self.head_dim, self.hidden_size
        return (2, *self.shape("gate")) if weight == "gate_up" else self.shape(weight)

    def fuse(self, weight: str, parts: Mapping[str, Any], xp: Any = np) -> Any:
        """The stored weight from checkpoint weights by name; what is stored alone is returned as it is.

        `xp`: numpy or jax.numpy, whichever the parts are of.
        """
        if weight == "gate_up":
            return xp.stack([parts["gate"], parts["up"]])
        if weight != "qkv":
            return parts[weight]
        heads, _, dim, hidden = self.stored_shape("qkv")
        return xp.concatenate([parts[name].reshape(heads, -1, dim, hidden) for name in FUSED_WEIGHTS["qkv"]], axis=1)

    def partition(self, weight: str, sharding: KvSharding) -> PartitionSpec:
        """`PartitionSpec` of one weight as stored: layer weights carry a leading, unsharded layer axis.

        A vocabulary that does not divide over the shards is replicated. Raises `InvalidInputError` if KV heads or the
        intermediate size do not divide (requirement S3).
        """
        self._require_shards(sharding.kv_head_shards)
        if weight == "qkv":
            return PartitionSpec(None, sharding.kv_axes)
        if weight == "gate_up":
            return PartitionSpec(None, None, sharding.kv_axes)
        dims = _dims(weight)
        sharded = SHARDED_DIMS if self.vocab_size % sharding.kv_head_shards == 0 else SHARDED_DIMS - {"vocab"}
        lead = (None,) if weight in LAYER_WEIGHTS else ()
        return PartitionSpec(*lead, *(sharding.kv_axes if dim in sharded else None for dim in dims))

    def _require_shards(self, shards: int) -> None:
        for field in ("num_kv_heads", "intermediate_size"):
            if getattr(self, field) % shards:
                raise InvalidInputError(
                    f"{field}={getattr(self, field)} does not divide over {shards} shards. Put the surplus devices on "
                    f"a mesh axis that does not shard KV heads, e.g. {math.gcd(self.num_kv_heads, shards)} × "
                    f"{shards // math.gcd(self.num_kv_heads, shards)}."
                )

    def storage_layout(
        self, *, num_pages: int, tokens_per_page: int, dtype: str, sharding: KvSharding | None = None
    ) -> StorageLayout:
        """Geometry of a pool for this decoder: `num_pages` pages a layer of elements of `dtype`."""
        return StorageLayout(
            num_layers=self.num_layers,
            num_pages=num_pages,
            tokens_per_page=tokens_per_page,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            kv_head_shards=1 if sharding is None else sharding.kv_head_shards,
            pool_replicas=1 if sharding is None else sharding.pool_replicas,
        )


def _dims(weight: str) -> tuple[str, ...]:
    return LAYER_WEIGHTS[weight] if weight in LAYER_WEIGHTS else MODEL_WEIGHTS[weight]


def llama3_rope_factors(
    *,
    theta: float,
    head_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> tuple[float, ...]:
    """Divisors of the rotary frequencies under Llama 3.1's scaling, one for each of the head_dim / 2 pairs.

    A wavelength above original / low_freq_factor is stretched by `factor`, one below original / high_freq_factor is
    left alone, and between them 1 / divisor moves linearly in original / wavelength.
    """
    if not 0 < low_freq_factor < high_freq_factor:
        raise InvalidInputError(
            f"llama3 rope scaling: low_freq_factor={low_freq_factor} must be positive and below "
            f"high_freq_factor={high_freq_factor}."
        )
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        turns = original_max_positions / wavelength
        keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        keep = min(max(keep, 0.0), 1.0)
        factors.append(1.0 / (keep + (1.0 - keep) / factor))
    return tuple(factors)
