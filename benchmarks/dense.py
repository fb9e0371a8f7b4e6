"""A dense KV cache to compare with: each slot has a contiguous strip of a fixed length, as long as any request may get.

The same decoder layers and weights, layers in one scan over a donated cache (on a CPU one by one, as in the paged arm),
greedy sampling in the same step, steps queued one ahead with their tokens on the device, lengths padded to the same
kind of ladder. What differs is where keys and values lie, and therefore how many requests fit: a slot is taken whole,
whatever its request needs.

Attention is one batched product over the strips, cut at the rung of the longest live request: no work item, no page
list.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from paged.backends.protocol import PackedHeads
from paged.engine.compile_options import compiler_options
from paged.engine.sampling import Sampled, greedy
from paged.engine.step import Apart
from paged.models import Decoder, DecoderConfig
from paged.models.decoder import DecoderLayer
from paged.models.layers import Rotary


class DenseCache(eqx.Module):
    """Keys and values (layers, slots, KV heads, max_len, head dim): a head's strip is contiguous."""

    keys: Float[Array, "l s k n d"]
    values: Float[Array, "l s k n d"]


def _strips(stored: Array, layer: Array, first: Array | int, slots: int, bound: int) -> Array:
    """The first `bound` positions of `slots` slots of one layer, (slots, KV heads, bound, head dim)."""
    _, _, heads, _, width = stored.shape
    return lax.dynamic_slice(stored, (layer, first, 0, 0, 0), (1, slots, heads, bound, width))[0]


def _attend(
    query: Float[Array, "s t h d"], keys: Float[Array, "s k n d"], values: Float[Array, "s k n d"], positions: Array
) -> Float[Array, "s t h d"]:
    """Causal attention of t tokens of each slot, at `positions` (s, t), over its strip."""
    slots, tokens, heads, width = query.shape
    kv_heads, bound = keys.shape[1:3]
    group = heads // kv_heads
    grouped = query.reshape(slots, tokens, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(slots, kv_heads, group * tokens, width)
    # Weights of 16 bits are multiplied as such and summed in float32, as the paged arm's kernels do on a GPU.
    options = {"precision": lax.Precision.HIGHEST} if query.dtype == jnp.float32 else {}
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, **options)
    logits = product("skmd,sknd->skmn", grouped, keys) * jnp.float32(width**-0.5)
    seen = jnp.arange(bound)[None, None, :] <= jnp.maximum(positions, 0)[:, :, None]
    seen = jnp.tile(seen, (1, group, 1))[:, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
    out = product("skmn,sknd->skmd", weights.astype(values.dtype), values).astype(query.dtype)
    return out.reshape(slots, kv_heads, group, tokens, width).transpose(0, 3, 1, 2, 4).reshape(query.shape)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache", "last"], meta_fields=[])
@dataclasses.dataclass
class DenseState:
    """What every step takes and gives back, donated: the cache, and each slot's latest token."""

    cache: DenseCache
    last: Int32[Array, " s"]


class _Fed(NamedTuple):
    """t tokens of each of some slots, on their way through the layers. Negative positions are padding."""

    x: Float[Array, "st m"]
    rotary: Rotary
    positions: Int32[Array, "s t"]
    first_slot: Array


def _begin(model: Decoder, tokens: Int32[Array, "s t"], positions: Int32[Array, "s t"], first_slot: Array) -> _Fed:
    x, rotary = model.embed(tokens.reshape(-1), positions.reshape(-1))
    return _Fed(x, rotary, positions, first_slot)


def _layer(
    config: DecoderConfig, bound: int, layer: DecoderLayer, index: Array, fed: _Fed, cache: DenseCache
) -> tuple[Array, DenseCache]:
    """One layer over the first `bound` positions of the slots: what the next one gets, and the cache.

    Padding writes nothing, because a scatter drops what is out of range.
    """
    slots, count = fed.positions.shape
    slot = fed.first_slot + jnp.arange(slots, dtype=jnp.int32)
    where = jnp.where(fed.positions >= 0, fed.positions, cache.keys.shape[3])

    def write(stored: Array, new: Array) -> Array:
        if slots == 1:  # a chunk of one request: its tokens lie side by side
            strip = new.reshape(1, 1, count, *new.shape[1:]).transpose(0, 1, 3, 2, 4)
            return lax.dynamic_update_slice(stored, strip, (index, slot[0], 0, fed.positions[0, 0], 0))
        new = new.reshape(slots, count, *new.shape[1:])[:, 0]
        return stored.at[index, slot, :, where[:, 0]].set(new, mode="drop")

    def attend(heads: PackedHeads) -> tuple[Array, DenseCache]:
        query, key, value = heads.split()
        new = DenseCache(write(cache.keys, key), write(cache.values, value))
        keys, values = (_strips(a, index, slot[0], slots, bound) for a in (new.keys, new.values))
        out = _attend(query.reshape(slots, count, *query.shape[1:]), keys, values, fed.positions)
        return out.reshape(query.shape), new

    return layer(fed.x, fed.rotary, config, attend)


def _end(model: Decoder, fed: _Fed, samples: Int32[Array, " s"]) -> Sampled:
    """The likeliest next token after token `samples[i]` of each slot."""
    slots, count = fed.positions.shape
    return greedy(model.logits(fed.x[jnp.arange(slots) * count + samples]))


def _begin_decode(model: Decoder, last: Array, positions: Array) -> _Fed:
    return _begin(model, last[:, None], positions[:, None], jnp.int32(0))


def _end_decode(model: Decoder, fed: _Fed, last: Array, _: Array) -> tuple[Array, Sampled]:
    new = _end(model, fed, jnp.zeros_like(last))
    return jnp.where(fed.positions[:, 0] >= 0, new.tokens, last), new


def _begin_prefill(model: Decoder, _: Array, packed: Array) -> _Fed:
    tokens = packed[3:][None]
    return _begin(model, tokens, packed[1] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], packed[0])


def _end_prefill(model: Decoder, fed: _Fed, last: Array, packed: Array) -> tuple[Array, Sampled]:
    new = _end(model, fed, (packed[2] - 1)[None])
    return last.at[packed[0]].set(new.tokens[0]), new


def _looped(bound: int, model: Decoder, fed: _Fed, cache: DenseCache) -> tuple[_Fed, DenseCache]:
    def body(carry: tuple[Array, DenseCache], xs: tuple) -> tuple[tuple[Array, DenseCache], None]:
        (x, cache), ((layer,), index) = carry, xs
        return _layer(model.config, bound, layer, index, fed._replace(x=x), cache), None

    indices = jnp.arange(model.config.num_layers, dtype=jnp.int32)
    (x, cache), _ = lax.scan(body, (fed.x, cache), (model.layers, indices))
    return fed._replace(x=x), cache


@functools.cache
def _programs(platform: str) -> tuple[Callable, Callable]:
    """decode(bound, state, model, positions): one token of every slot; slots at a negative position are empty.
    prefill(bound, state, model, packed): a chunk of one slot's prompt; packed: slot, first position, number of tokens,
    then the padded tokens.

    One program each; on a CPU layer by layer, as the paged arm does it there, with an `Apart` for the model.
    """
    options = dict(compiler_options(platform)) or None

    def whole(begin: Callable, end: Callable) -> Callable:
        @functools.partial(jax.jit, static_argnums=0, donate_argnums=1, compiler_options=options)
        def run(bound: int, state: DenseState, model: Decoder, sent: Array) -> tuple[DenseState, Sampled]:
            fed, cache = _looped(bound, model, begin(model, state.last, sent), state.cache)
            last, new = end(model, fed, state.last, sent)
            return DenseState(cache, last), new

        return run

    one = jax.jit(_layer, static_argnums=(0, 1), donate_argnums=5)

    def apart(begin: Callable, end: Callable) -> Callable:
        before, after = jax.jit(begin), jax.jit(end)

        def run(bound: int, state: DenseState, model: Apart, sent: np.ndarray) -> tuple[DenseState, Sampled]:
            outside, cache = model.outside, state.cache
            fed = before(outside, state.last, sent)
            for index, (layer,) in zip(model.indices, model.blocks, strict=True):
                x, cache = one(outside.config, bound, layer, index, fed, cache)
                fed = fed._replace(x=x)
            last, new = after(outside, fed, state.last, sent)
            return DenseState(cache, last), new

        return run

    kind = apart if platform == "cpu" else whole
    return kind(_begin_decode, _end_decode), kind(_begin_prefill, _end_prefill)


def rung(need: int, low: int, top: int) -> int:
    """The smallest power of two from `low` up that holds `need`, ended by `top`."""
    size = low
    while size < need:
        size *= 2
    return min(size, top)


@dataclasses.dataclass(eq=False)
class _Request:
    number: int
    prompt: np.ndarray
    new: int
    fed: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    planned: int = 0  # tokens sampled by steps that were dispatched


class DenseEngine:
    """Continuous batching over `slots` strips of `max_len` tokens; a request waits until a slot is free.

    - Prompts first, one request at a time in chunks of at most `max_step_tokens`; then every live slot decodes.
    - `depth`: steps under way at once, as in the paged arm.
    - `max_len` is a multiple of `max_step_tokens`, so that a padded chunk ends within its strip.

    Feed it `submit`, then call `step` until it returns None; each call gives [(request number, token), …] in order.
    """

    def __init__(
        self, model: Decoder, *, slots: int, max_len: int, max_step_tokens: int, depth: int = 2, min_bound: int = 128
    ):
        if len(model.config.block) != 1:
            raise ValueError(f"one kind of layer is dealt with here; the block has {len(model.config.block)}.")
        if max_len % max_step_tokens:
            raise ValueError(f"max_len={max_len} is no multiple of max_step_tokens={max_step_tokens}.")
        platform = next(iter(model.embedding.devices())).platform
        self.model = Apart.of(model) if platform == "cpu" else model
        self.slots, self.max_len, self.max_step_tokens, self.depth = slots, max_len, max_step_tokens, depth
        self._min_bound = min_bound
        self._decode, self._prefill = _programs(platform)
        self._state = _zeros_program(model.config, slots, max_len, model.embedding.dtype.name)()
        self._waiting: deque[_Request] = deque()
        self._slots: list[_Request | None] = [None] * slots
        self._flying: deque[tuple[Sampled, list[tuple[int, _Request]]]] = deque()

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return self._state.cache.keys.nbytes + self._state.cache.values.nbytes

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return sum(r is not None for r in self._slots)

    def submit(self, number: int, prompt: np.ndarray, new: int) -> None:
        """Queue a request for `new` tokens. Raises `ValueError` if it can never fit a slot."""
        if len(prompt) + new - 1 > self.max_len:
            raise ValueError(f"request {number} needs {len(prompt) + new - 1} tokens, a slot has {self.max_len}.")
        self._waiting.append(_Request(number, np.asarray(prompt, np.int32), new))

    def step(self) -> list[tuple[int, int]] | None:
        """Keep steps under way, wait for the oldest, and return its tokens; None when all requests are done."""
        while len(self._flying) < self.depth and self._launch():
            pass
        if not self._flying:
            return None
        sampled, rows = self._flying.popleft()
        host = jax.device_get(sampled).tokens
        out = []
        for row, request in rows:
            request.tokens.append(int(host[row]))
            out.append((request.number, request.tokens[-1]))
        return out

    def _launch(self) -> bool:
        # Lengths are known without the tokens, so a slot is free again as soon as its last step is dispatched.
        for slot, request in enumerate(self._slots):
            if request is not None and request.planned == request.new:
                self._slots[slot] = None
        for slot, request in enumerate(self._slots):
            if request is None and self._waiting:
                request = self._slots[slot] = self._waiting.popleft()
            if request is not None and request.fed < len(request.prompt):
                self._chunk(slot, request)
                return True
        live = [(slot, r) for slot, r in enumerate(self._slots) if r is not None]
        if not live:
            return False
        positions = np.full(self.slots, -1, np.int32)
        for slot, request in live:
            positions[slot] = len(request.prompt) + request.planned - 1
            request.planned += 1
        bound = rung(int(positions.max()) + 1, min(self._min_bound, self.max_len), self.max_len)
        self._state, sampled = self._decode(bound, self._state, self.model, positions)
        self._flying.append((sampled, live))
        return True

    def _chunk(self, slot: int, request: _Request) -> None:
        count = min(len(request.prompt) - request.fed, self.max_step_tokens)
        padded = rung(count, min(64, self.max_step_tokens), self.max_step_tokens)
        packed = np.zeros(3 + padded, np.int32)
        packed[:3] = slot, request.fed, count
        packed[3 : 3 + count] = request.prompt[request.fed : request.fed + count]
        bound = rung(request.fed + padded, min(self._min_bound, self.max_len), self.max_len)
        self._state, sampled = self._prefill(bound, self._state, self.model, packed)
        request.fed += count
        done = request.fed == len(request.prompt)
        request.planned += done
        self._flying.append((sampled, [(0, request)] if done else []))


@functools.cache
def _zeros_program(config: DecoderConfig, slots: int, max_len: int, dtype: str) -> Callable[[], DenseState]:
    shape = (config.num_layers, slots, config.num_kv_heads, max_len, config.head_dim)

    def zeros() -> DenseState:
        cache = DenseCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        return DenseState(cache, jnp.zeros(slots, jnp.int32))

    return jax.jit(zeros)


class DenseRun(NamedTuple):
    """One run of a list of prompts. Times in seconds."""

    seconds: float
    tokens: dict[int, tuple[int, ...]]
    first_token_s: np.ndarray
    between_tokens_s: np.ndarray
    mean_running: float
    peak_running: int

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds


def run_all(engine: DenseEngine, prompts: Sequence[np.ndarray], new: Sequence[int]) -> DenseRun:
    """Run prompts that all arrive at once to their ends."""
    tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    last: dict[int, float] = {}
    first_s, between_s = [], []
    running_s, peak, before = 0.0, 0, 0.0
    began = time.perf_counter()
    for number, (prompt, count) in enumerate(zip(prompts, new)):
        engine.submit(number, prompt, count)
    while (found := engine.step()) is not None:
        now = time.perf_counter() - began
        running_s += engine.num_running * (now - before)
        peak, before = max(peak, engine.num_running), now
        for number, token in found:
            (between_s if number in last else first_s).append(now - last.get(number, 0.0))
            last[number] = now
            tokens[number].append(token)
    seconds = time.perf_counter() - began
    return DenseRun(
        seconds,
        {number: tuple(found) for number, found in tokens.items()},
        np.array(first_s, np.float32),
        np.array(between_s, np.float32),
        running_s / seconds,
        peak,
    )
