"""A Llama-family decoder whose attention runs on pages, and the same weights with no cache at all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from paged.backends.protocol import (
    AttentionBackend,
    KvArrays,
    LayerAt,
    LayerKernels,
    LayerSizes,
    LayerWeights,
    PackedHeads,
)
from paged.backends.sharding import KvSharding
from paged.backends.step import StepPlan, packed_attention_step
from paged.common import AttentionSpec
from paged.common.errors import InvalidInputError
from paged.models.attention import Attention, dense_attention
from paged.models.config import (
    FUSED_WEIGHTS,
    LAYER_WEIGHTS,
    MODEL_WEIGHTS,
    STORED_LAYER_WEIGHTS,
    DecoderConfig,
)
from paged.models.layers import Mlp, Rotary, linear, rms_norm

Pool = KvArrays | tuple[KvArrays, ...]
"""One stacked pool for all layers, or one pool for each layer (`per_layer`)."""

Attended = tuple[Array, KvArrays]

Attend = Callable[..., Attended]
"""attend(layer, position in the block, pool, heads) -> attention's output and the pool."""


class DecoderLayer(eqx.Module):
    """Weights of one layer, or, with a leading axis, of every layer at one position of the block."""

    attention_norm: Float[Array, "*l m"]
    attention: Attention
    mlp_norm: Float[Array, "*l m"]
    mlp: Mlp

    def __call__(
        self,
        x: Float[Array, "t m"],
        rotary: Rotary,
        config: DecoderConfig,
        attend: Callable[[PackedHeads], tuple[Float[Array, "t h d"], Any]],
    ) -> tuple[Float[Array, "t m"], Any]:
        """The layer around `attend`, which gets this layer's heads; also returns what else `attend` returned."""
        y = rms_norm(x, self.attention_norm, config.rms_eps)
        heads, state = attend(self.attention.project(y, rotary))
        x = x + self.attention.combine(heads)
        return x + self.mlp(rms_norm(x, self.mlp_norm, config.rms_eps)), state


class Decoder(eqx.Module):
    """Token ids and positions in, logits out.

    - `layers[j]` stacks the layers at position j of the block: j, j + len(block), …
    - `head` is None where embeddings are tied.

    Weights are (out, in), in one floating dtype. Norms, rotary angles and logits are computed in float32.
    """

    embedding: Float[Array, "v m"]
    layers: tuple[DecoderLayer, ...]
    norm: Float[Array, " m"]
    head: Float[Array, "v m"] | None
    config: DecoderConfig = eqx.field(static=True)

    def __call__(
        self,
        tokens: Int32[Array, " t"],
        positions: Int32[Array, " t"],
        sample_indices: Int32[Array, " n"],
        pool: Pool,
        plans: tuple[StepPlan, ...],
        *,
        backend: AttentionBackend,
        sharding: KvSharding | None = None,
        scan: bool = True,
    ) -> tuple[Float[Array, "n v"], Pool]:
        """One step over packed tokens of any mix of requests: float32 logits of the sampled rows, and the pool.

        - `positions`: absolute position of every token; what padding tokens hold does not matter.
        - `sample_indices`: tokens whose logits are wanted, e.g. the last one of every request.
        - `pool`: what `paged.engine.KvPool` holds; donate it, and use the returned one from then on.
        - `plans`: `plan_step` for each `AttentionSpec` of `config.block`, in order.
        - `sharding`: the mesh that weights and pool lie on; logits are then laid over the vocabulary.
        - `scan`: run the layers as one compiled loop over the block, carrying the pool. False unrolls them; a tuple
          of per-layer pools must be unrolled.

        No dense cache exists here: memory beyond the pool is that of one layer's activations. Raises
        `InvalidInputError` while tracing if plans or pools do not fit the config.
        """
        x, pool = self.hidden(tokens, positions, pool, plans, backend=backend, sharding=sharding, scan=scan)
        return self.logits(jnp.take(x, sample_indices, axis=0, mode="clip"), None if sharding else backend), pool

    def hidden(
        self,
        tokens: Int32[Array, " t"],
        positions: Int32[Array, " t"],
        pool: Pool,
        plans: tuple[StepPlan, ...],
        *,
        backend: AttentionBackend,
        sharding: KvSharding | None = None,
        scan: bool = True,
    ) -> tuple[Float[Array, "t m"], Pool]:
        """The step without its end: of every token what `logits` takes, and the pool. Arguments are those of a call."""
        _check_step(self.config, pool, plans, scan)
        attend = _on_pages(plans, backend, sharding)
        x, rotary = self.embed(tokens, positions)
        if isinstance(pool, KvArrays) and scan:
            kernels = self._kernels(backend, x, plans, sharding)
            if kernels is not None:
                return self._scanned_by_kernels(kernels, x, rotary, pool, plans)
            return self._scanned(x, rotary, pool, attend)
        return self._unrolled(x, rotary, pool, attend)

    def _kernels(
        self,
        backend: AttentionBackend,
        x: Float[Array, "t m"],
        plans: tuple[StepPlan, ...],
        sharding: KvSharding | None,
    ) -> LayerKernels | None:
        """The backend's kernels for whole layers, where it offers them for this step; on one device."""
        offered = getattr(backend, "layer_kernels", None)
        if offered is None or sharding is not None:
            return None
        sizes = layer_sizes(self.config)
        found = [offered(plan, sizes, x.dtype.name) for plan in plans]
        return None if None in found else found[0]

    def _scanned_by_kernels(
        self,
        kernels: LayerKernels,
        x: Float[Array, "t m"],
        rotary: Rotary,
        pool: KvArrays,
        plans: tuple[StepPlan, ...],
    ) -> tuple[Float[Array, "t m"], KvArrays]:
        # A block of one layer needs no loop: one call runs all. Else kernels get the loop's own counter: an index array
        # would be sliced by a kernel in every turn.
        size, blocks = len(self.config.block), self.config.num_blocks
        count, turns = (blocks, 1) if size == 1 else (1, blocks)
        weights = [
            LayerWeights(
                attention_norm=layer.attention_norm,
                qkv=layer.attention.qkv,
                output=layer.attention.output,
                mlp_norm=layer.mlp_norm,
                gate_up=layer.mlp.gate_up,
                down=layer.mlp.down,
            )
            for layer in self.layers
        ]

        def body(counter: Int32[Array, ""], carry: tuple[Array, Array, KvArrays]) -> tuple[Array, Array, KvArrays]:
            x, parts, pool = carry
            for position in range(size):
                at = LayerAt(times=count, plus=0, block=size, position=position, count=count)
                x, parts, pool = kernels.layers(
                    *(x, parts, pool, weights[position], counter, at),
                    *(rotary.cos, rotary.sin, plans[position], self.config.rms_eps),
                )
            return x, parts, pool

        carry = x, kernels.start(x), pool
        x, parts, pool = body(jnp.int32(0), carry) if turns == 1 else lax.fori_loop(0, turns, body, carry)
        return (x.astype(jnp.float32) + parts.sum(axis=0)).astype(x.dtype), pool

    def _scanned(
        self, x: Float[Array, "t m"], rotary: Rotary, pool: KvArrays, attend: Attend
    ) -> tuple[Float[Array, "t m"], KvArrays]:
        def body(carry: tuple[Array, KvArrays], xs: tuple[tuple[DecoderLayer, ...], Array]) -> tuple[Any, None]:
            return _run_block(self.config, *xs, carry[0], rotary, carry[1], attend), None

        indices = jnp.arange(self.config.num_blocks, dtype=jnp.int32)
        return lax.scan(body, (x, pool), (self.layers, indices))[0]

    def _unrolled(
        self, x: Float[Array, "t m"], rotary: Rotary, pool: Pool, attend: Attend
    ) -> tuple[Float[Array, "t m"], Pool]:
        pools = [pool] if isinstance(pool, KvArrays) else list(pool)
        for index in range(self.config.num_layers):
            block, j = divmod(index, len(self.config.block))
            layer = jax.tree.map(operator.itemgetter(block), self.layers[j])
            at = 0 if isinstance(pool, KvArrays) else index
            x, pools[at] = layer(x, rotary, self.config, partial(attend, index, j, pools[at]))
        return x, pools[0] if isinstance(pool, KvArrays) else tuple(pools)

    def dense(self, tokens: Int32[Array, "*b t"]) -> Float[Array, "*b t v"]:
        """Logits after every token of whole sequences, with no cache and no pages: the dense side of parity.

        Attention is t × t, causal, in float64, with the options of the block. Batch with leading axes rather than
        `jax.vmap`, which would replay the float64 part as float32.
        """
        *batch, length = tokens.shape
        rotary = Rotary.at(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape).reshape(-1), self.config)

        def attend(spec: AttentionSpec, heads: PackedHeads) -> tuple[Array, None]:
            split = heads.split()
            query, key, value = (x.reshape(*batch, length, *x.shape[1:]) for x in split)
            return dense_attention(query, key, value, spec).reshape(split[0].shape), None

        def body(x: Array, block: tuple[DecoderLayer, ...]) -> tuple[Array, None]:
            for layer, spec in zip(block, self.config.block):
                x, _ = layer(x, rotary, self.config, partial(attend, spec))
            return x, None

        x, _ = lax.scan(body, self._embed(tokens.reshape(-1)), self.layers)
        return self.logits(x).reshape(*tokens.shape, -1)

    def embed(self, tokens: Int32[Array, " t"], positions: Int32[Array, " t"]) -> tuple[Float[Array, "t m"], Rotary]:
        """What the first layer gets, and the angles that every layer turns its heads by."""
        return self._embed(tokens), Rotary.at(positions, self.config)

    def _embed(self, tokens: Int32[Array, " t"]) -> Float[Array, "t m"]:
        return jnp.take(self.embedding, tokens, axis=0, mode="clip")

    def logits(self, x: Float[Array, "n m"], backend: AttentionBackend | None = None) -> Float[Array, "n v"]:
        """float32 logits of the tokens that follow, from what `hidden` gives of these.

        - `backend`: on one device, whose kernel for them is used where it has one.
        """
        head = self.embedding if self.head is None else self.head
        offered = getattr(backend, "logits", None)
        found = None if offered is None else offered(x, self.norm, head, self.config.rms_eps)
        if found is not None:
            return found
        return linear(rms_norm(x, self.norm, self.config.rms_eps), head, out=jnp.float32)


def layer_sizes(config: DecoderConfig) -> LayerSizes:
    """What a backend is told of a model's layers."""
    return LayerSizes(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def runs_layers(backend: AttentionBackend, config: DecoderConfig, dtype: str, kv_dtype: str) -> bool:
    """Whether a backend's kernels run the layers of every step of a model, on one device."""
    offered = getattr(backend, "runs_layers", None)
    return offered is not None and offered(layer_sizes(config), dtype, kv_dtype)


def _on_pages(plans: tuple[StepPlan, ...], backend: AttentionBackend, sharding: KvSharding | None) -> Attend:
    def attend(layer: Int32[Array, ""] | int, position: int, pool: KvArrays, heads: PackedHeads) -> Attended:
        plan = plans[position]
        out, _, pool = packed_attention_step(backend, plan, pool, heads, layer=layer, sharding=sharding)
        return out, pool

    return attend


def _run_block(
    config: DecoderConfig,
    block: tuple[DecoderLayer, ...],
    index: Int32[Array, ""],
    x: Float[Array, "t m"],
    rotary: Rotary,
    pool: KvArrays,
    attend: Attend,
) -> tuple[Float[Array, "t m"], KvArrays]:
    """The layers of block `index`, whose weights carry no leading axis."""
    for j, layer in enumerate(block):
        x, pool = layer(x, rotary, config, partial(attend, index * len(block) + j, j, pool))
    return x, pool


def run_block(
    config: DecoderConfig,
    block: tuple[DecoderLayer, ...],
    index: Int32[Array, ""],
    x: Float[Array, "t m"],
    rotary: Rotary,
    pool: KvArrays,
    plans: tuple[StepPlan, ...],
    *,
    backend: AttentionBackend,
) -> tuple[Float[Array, "t m"], KvArrays]:
    """One block of `Decoder.hidden` over a stacked pool, with weights of `block_views`: a program for all blocks.

    Between `Decoder.embed` and `Decoder.logits`, blocks in order. Raises what `hidden` raises.
    """
    _check_step(config, pool, plans, True)
    return _run_block(config, block, index, x, rotary, pool, _on_pages(plans, backend, None))


def block_views(model: Decoder) -> tuple[tuple[DecoderLayer, ...], ...]:
    """The weights of each block by themselves, for a model on a CPU: they lie in the memory of the stacked arrays.

    What is not aligned there as XLA wants it is copied.
    """
    device = next(iter(model.embedding.devices()))

    def view(block: int, stacked: Array) -> Array:
        return jax.device_put(np.asarray(stacked)[block], device, may_alias=True)

    return tuple(jax.tree.map(partial(view, i), model.layers) for i in range(model.config.num_blocks))


def _check_step(config: DecoderConfig, pool: Pool, plans: tuple[StepPlan, ...], scan: bool) -> None:
    specs = tuple(plan.spec for plan in plans)
    if specs != config.block:
        raise InvalidInputError(
            f"Decoder: plans must be for the attention of the block, one each, in order: expected {config.block}, "
            f"got {specs}. Plan with `for spec in config.block`."
        )
    layers = config.num_layers
    if isinstance(pool, tuple):
        if scan or len(pool) != layers:
            raise InvalidInputError(
                f"Decoder: per-layer pools need scan=False and one pool for each of {layers} layers, got "
                f"scan={scan} and {len(pool)} pools."
            )
        return
    num_pages = plans[0].rung.num_pages
    if pool.keys.shape[0] != layers * num_pages:
        raise InvalidInputError(
            f"Decoder: a stacked pool for {layers} layers of {num_pages} pages has {layers * num_pages} rows, got "
            f"{pool.keys.shape[0]}."
        )


def stored_shape(config: DecoderConfig, weight: str) -> tuple[int, ...]:
    """Shape of a weight as `Decoder` stores it: layer weights carry the stacked axis in front."""
    return ((config.num_blocks,) if weight in STORED_LAYER_WEIGHTS else ()) + config.stored_shape(weight)


def abstract_decoder(config: DecoderConfig, dtype: str = "float32") -> Decoder:
    """The decoder's structure with `jax.ShapeDtypeStruct` leaves; allocates nothing."""

    def weights(names: Iterable[str]) -> dict[str, Array]:
        return {name: jnp.zeros(stored_shape(config, name), dtype) for name in names}

    def layer() -> DecoderLayer:
        w = weights(STORED_LAYER_WEIGHTS)
        attention = Attention(w["qkv"], w["output"])
        return DecoderLayer(w["attention_norm"], attention, w["mlp_norm"], Mlp(w["gate_up"], w["down"]))

    def build() -> Decoder:
        outer = weights(MODEL_WEIGHTS)
        head = None if config.tied_embeddings else outer["head"]
        return Decoder(outer["embedding"], tuple(layer() for _ in config.block), outer["norm"], head, config)

    return jax.eval_shape(build)


def map_weights(fill: Callable[[str, int | None, Any], Any], decoder: Decoder) -> Decoder:
    """The decoder with every leaf replaced by `fill(name, position in the block or None, leaf)`.

    Names are those of `STORED_LAYER_WEIGHTS` and `MODEL_WEIGHTS`: the fields that hold the leaves.
    """

    def leaf(path: tuple[Any, ...], value: Any) -> Any:
        position = path[1].idx if path[0].name == "layers" else None
        return fill(path[-1].name, position, value)

    return jax.tree_util.tree_map_with_path(leaf, decoder)


def decoder_specs(config: DecoderConfig, sharding: KvSharding) -> Decoder:
    """The decoder's structure with `PartitionSpec` leaves, by the rules beside the config (`DecoderConfig.partition`).

    Heads, the intermediate size and the vocabulary are laid over the KV-head axes; norms are replicated, and so is
    everything over the mesh's other axes.
    """
    return map_weights(lambda name, *_: config.partition(name, sharding), abstract_decoder(config))


def shard_decoder(model: Decoder, sharding: KvSharding) -> Decoder:
    """The same weights laid over `sharding.mesh`. A model that is loaded sharded (`load_model`) needs no such copy."""
    specs = decoder_specs(model.config, sharding)
    return jax.tree.map(lambda weight, spec: jax.device_put(weight, sharding.named(spec)), model, specs)


def random_decoder(
    config: DecoderConfig, key: PRNGKeyArray, dtype: str = "float32", sharding: KvSharding | None = None
) -> Decoder:
    """A decoder with random weights, for tests and benchmarks; built sharded, never whole on one device.

    Matrices have standard deviation 1 / sqrt(inputs), so that logits are of order 1; norm weights scatter around 1, so
    that exchanging two of them shows.
    """
    abstract = abstract_decoder(config, dtype)

    def draw(key: PRNGKeyArray, name: str, position: int | None, struct: jax.ShapeDtypeStruct) -> Array:
        names = FUSED_WEIGHTS.get(name, (name,))
        if position is None:
            return draw_one(key, name, 0, config.shape(name), struct.dtype)
        shapes = {part: (config.num_blocks, *config.shape(part)) for part in names}
        parts = {part: draw_one(key, part, position, shape, struct.dtype) for part, shape in shapes.items()}
        return jax.vmap(lambda parts: config.fuse(name, parts, jnp))(parts)

    def draw_one(key: PRNGKeyArray, name: str, position: int, shape: tuple[int, ...], dtype: Any) -> Array:
        index = [*LAYER_WEIGHTS, *MODEL_WEIGHTS].index(name)
        noise = jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, index), position), shape)
        matrix = len(config.shape(name)) == 2
        value = noise * jnp.float32(shape[-1] ** -0.5) if matrix else 1 + jnp.float32(0.1) * noise
        return value.astype(dtype)

    specs = None if sharding is None else decoder_specs(config, sharding)
    out = None if specs is None or sharding is None else jax.tree.map(sharding.named, specs)
    return jax.jit(lambda key: map_weights(partial(draw, key), abstract), out_shardings=out)(key)
