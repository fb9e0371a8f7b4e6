"""How `eqx.nn.MultiheadAttention` is taken apart, so that its attention can run on pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from paged.common import AttentionSpec, InvalidInputError
from paged.models.adapter import AttentionShape


@dataclasses.dataclass(frozen=True)
class MultiheadParts:
    """Takes `eqx.nn.MultiheadAttention` apart, as self-attention of a decoder: causal, scale 1 / sqrt(qk_size).

    - `rotary`: the embedding that the model's `process_heads` applies to queries and keys. Here it is applied at the
      given positions; Equinox's own call counts from 0 in every step.
    - `replaces`: arguments of the module's call that paging stands in for, out of `"mask"` and `"process_heads"`. An
      argument that is passed and not named here is refused: on pages the `AttentionSpec` decides what a token sees.

    Refused too: keys or values that are not the queries' own tokens, and dropout that is not switched off.
    """

    rotary: eqx.nn.RotaryPositionalEmbedding | None = None
    replaces: frozenset[str] = frozenset()

    def describe(self, module: eqx.nn.MultiheadAttention) -> AttentionShape:
        """Sizes of the module."""
        return AttentionShape(
            spec=AttentionSpec(scale=module.qk_size**-0.5),
            num_query_heads=module.num_heads,
            num_kv_heads=module.num_heads,
            head_dim=module.qk_size,
            value_head_dim=module.vo_size,
        )

    def project(
        self,
        module: eqx.nn.MultiheadAttention,
        positions: Int32[Array, " t"],
        query: Float[Array, "t m"],
        key_: Float[Array, "t m"],
        value: Float[Array, "t m"],
        mask: Any = None,
        *,
        process_heads: Any = None,
        key: Any = None,
        inference: bool | None = None,
    ) -> tuple[Float[Array, "t h d"], Float[Array, "t h d"], Float[Array, "t h e"]]:
        """The module's projections, and its rotary embedding at `positions`."""
        self._check(module, mask, process_heads, inference)
        if key_ is not query or value is not query:
            raise InvalidInputError(
                "MultiheadParts: keys and values must come from the same array as the queries; cross attention is not "
                "paged."
            )

        def heads(projection: eqx.nn.Linear) -> Array:
            return jax.vmap(projection)(query).reshape(query.shape[0], module.num_heads, -1)

        q, k, v = heads(module.query_proj), heads(module.key_proj), heads(module.value_proj)
        if self.rotary is not None:
            q, k = rotate_at(self.rotary, q, positions), rotate_at(self.rotary, k, positions)
        return q, k, v

    def combine(self, module: eqx.nn.MultiheadAttention, heads: Float[Array, "t h e"]) -> Float[Array, "t o"]:
        """The output projection."""
        return jax.vmap(module.output_proj)(heads.reshape(heads.shape[0], -1))

    def _check(self, module: eqx.nn.MultiheadAttention, mask: Any, process_heads: Any, inference: bool | None) -> None:
        for name, value in (("mask", mask), ("process_heads", process_heads)):
            if value is not None and name not in self.replaces:
                raise InvalidInputError(
                    f"MultiheadParts: attention was called with {name}. If paging stands in for it (a causal mask: the "
                    f"AttentionSpec; rotary positions: `rotary`), say so: replaces=frozenset({{{name!r}}})."
                )
        if self.rotary is not None and process_heads is None:
            raise InvalidInputError("MultiheadParts: `rotary` is given, but attention is called without process_heads.")
        off = module.dropout.inference if inference is None else inference
        if module.dropout.p > 0 and not off:
            raise InvalidInputError(
                f"MultiheadParts: dropout of {module.dropout.p} is on. Switch it off with eqx.nn.inference_mode(model)."
            )


def rotate_at(
    rotary: eqx.nn.RotaryPositionalEmbedding, x: Float[Array, "t h d"], positions: Int32[Array, " t"]
) -> Float[Array, "t h d"]:
    """Equinox's rotary embedding of every head, at given positions instead of 0, 1, 2, …"""
    size = rotary.embedding_size
    with jax.ensure_compile_time_eval():  # as Equinox does: the same operations give the same bits
        frequency = 1.0 / (rotary.theta ** (jnp.arange(0.0, size, 2)[None, :] / size))
    angle = positions.astype(frequency.dtype)[:, None] * frequency
    cos, sin = (jnp.tile(f(angle).astype(rotary.dtype), (1, 2))[:, None, :] for f in (jnp.cos, jnp.sin))
    return x * cos + rotary.rotate_half(x) * sin
