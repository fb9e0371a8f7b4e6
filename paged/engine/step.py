"""The jitted step: unpack, plan, run the decoder over the donated pool, sample. One program for each shape."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from paged.backends.metadata import pack_table, unpack_table
from paged.backends.protocol import AttentionBackend, KvArrays, Rung, StepPlan
from paged.backends.sharding import KvSharding
from paged.backends.step import plan_step
from paged.common.page_table import PageTable
from paged.engine.compile_options import compiler_options
from paged.engine.params import FILTERED, GREEDY, NUM_WORDS
from paged.engine.pool import PoolArrays
from paged.engine.sampling import RowParams, Sampled, greedy_tokens, random_tokens, scored
from paged.engine.step_inputs import StepInputs
from paged.models import Decoder, DecoderConfig
from paged.models.decoder import DecoderLayer, block_views, run_block
from paged.models.layers import Rotary

_SCORED_TOGETHER = 64


@dataclasses.dataclass(frozen=True)
class Program:
    """What is static in a step besides its rung: equal programs at equal rungs compile once.

    - `apart`: blocks of layers run as programs of their own, see `Apart`; `scan` then says nothing.
    - `kernels`: the backend's kernels run all layers, on one device, see `paged.models.decoder.runs_layers`.
    - `num_top`: likeliest tokens to report. `level`: `GREEDY`, `RANDOM` or `FILTERED` choice of tokens.
    - `scores_prompt`: whether the log probabilities of the tokens that follow those of the step are computed.
    """

    backend: AttentionBackend
    sharding: KvSharding | None
    platform: str
    scan: bool
    num_top: int
    level: int = GREEDY
    scores_prompt: bool = False
    apart: bool = False
    kernels: bool = False

    def __or__(self, other: Program) -> Program:
        """The program that can do what either can do for its requests."""
        return self.doing(
            max(self.level, other.level), max(self.num_top, other.num_top), self.scores_prompt or other.scores_prompt
        )

    def doing(self, level: int, num_top: int, scores_prompt: bool) -> Program:
        """The same step with other abilities: how tokens are chosen, likeliest ones reported, prompts scored."""
        if (level, num_top, scores_prompt) == (self.level, self.num_top, self.scores_prompt):
            return self
        return dataclasses.replace(self, level=level, num_top=num_top, scores_prompt=scores_prompt)


class Scored(NamedTuple):
    """What a step leaves on the device: `sampled` by row and, if prompts are scored, `prompt` by token of the step."""

    sampled: Sampled
    prompt: Sampled | None


def pack_step(
    inputs: StepInputs, table: PageTable, words: np.ndarray | None = None, targets: np.ndarray | None = None
) -> tuple[np.ndarray, Rung]:
    """Everything that a step needs from the host in one int32 vector: one transfer, whatever the number of devices.

    - `words` (rows × `NUM_WORDS`,): what a program above `GREEDY` reads; `targets` (tokens,): the token that follows
      each, for one that scores prompts.
    """
    vector, rung = pack_table(table)
    parts = [inputs.tokens, inputs.positions, inputs.sample_indices, words, targets, vector]
    return np.concatenate([part for part in parts if part is not None]), rung


def from_previous(row: int) -> int:
    """What stands in a packed step for the token that row `row` of the step before sampled: below every token id."""
    return -1 - row


class Apart(NamedTuple):
    """A model whose blocks run as programs of their own: one program for all blocks, one before them, one after them.

    For CPUs. A loop over layers copies each layer's weights out of the stacked arrays in every step, and an unrolled
    one takes minutes to compile.

    - `outside`: the model without its layers. `blocks`: their weights, see `block_views`; `indices`: 0, 1, … on the
      device.
    """

    outside: Decoder
    blocks: tuple[tuple[DecoderLayer, ...], ...]
    indices: tuple[Int32[Array, ""], ...]

    @classmethod
    def of(cls, model: Decoder) -> Apart:
        """The same weights, in the same memory."""
        (device,) = model.embedding.devices()
        indices = tuple(jax.device_put(np.int32(i), device) for i in range(model.config.num_blocks))
        return cls(dataclasses.replace(model, layers=()), block_views(model), indices)


def step(
    program: Program,
    rung: Rung,
    model: Decoder | Apart,
    pool: PoolArrays,
    previous: Array,
    packed: np.ndarray,
) -> tuple[PoolArrays, Array, Scored]:
    """One step over a packed batch: the pool to use from now on, the next `previous`, and what was sampled and scored.

    - `model`: an `Apart` for a program that is `apart`.
    - `pool` is donated. `previous` (most rows of any step,) int32: tokens that the step before sampled, by row.

    Compiles once for each program, rung and structure of the model.
    """
    if not isinstance(model, Apart):
        return jitted(program.platform, program.kernels)(program, rung, model, pool, previous, packed)
    assert isinstance(pool, KvArrays)
    (begin, block, end), config = jitted_apart(), model.outside.config
    begun, x, rotary = begin(program, rung, model.outside, pool.dtype.name, previous, packed)
    for index, weights in zip(model.indices, model.blocks, strict=True):
        x, pool = block(program.backend, config, weights, index, x, rotary, pool, begun.plans)
    previous, out = end(program, model.outside, x, begun, previous)
    return pool, previous, out


@functools.cache
def jitted(platform: str, kernels: bool = False) -> Any:
    """The jitted step with the options that a platform and such programs want."""
    options = compiler_options(platform, kernels=kernels) or None
    return jax.jit(traced_step, static_argnums=(0, 1), donate_argnums=3, compiler_options=options)


@functools.cache
def jitted_apart() -> tuple[Any, Any, Any]:
    """The programs of a step over an `Apart`: its begin, a block, its end."""

    def begin(
        program: Program, rung: Rung, outside: Decoder, kv_dtype: str, previous: Array, packed: Array
    ) -> tuple[_Begun, Array, Rotary]:
        begun = _unpack(program, rung, outside.config, kv_dtype, previous, packed)
        return begun, *outside.embed(begun.tokens, begun.positions)

    def block(
        backend: AttentionBackend, config: DecoderConfig, weights: Any, index: Array, *rest: Any
    ) -> tuple[Array, KvArrays]:
        return run_block(config, weights, index, *rest, backend=backend)

    return (
        jax.jit(begin, static_argnums=(0, 1, 3)),
        jax.jit(block, static_argnums=(0, 1), donate_argnums=6),
        jax.jit(_finish, static_argnums=0),
    )


def num_compiled(platform: str) -> int:
    """Programs that steps were compiled to in this process: one a step, or three for one that is `apart`."""
    return sum(program._cache_size() for program in (jitted(platform), jitted(platform, True), *jitted_apart()))


class _Begun(NamedTuple):
    """What the host sent, unpacked, and the plans made of it."""

    tokens: Int32[Array, " t"]
    positions: Int32[Array, " t"]
    sample_indices: Int32[Array, " n"]
    words: Int32[Array, " w"]
    targets: Int32[Array, " u"]
    plans: tuple[StepPlan, ...]


def traced_step(
    program: Program,
    rung: Rung,
    model: Decoder,
    pool: PoolArrays,
    previous: Int32[Array, " m"],
    packed: Int32[Array, " n"],
) -> tuple[PoolArrays, Int32[Array, " m"], Scored]:
    """What `step` compiles: unpack, plan, run the decoder, sample."""
    stored = pool[0] if isinstance(pool, tuple) else pool
    begun = _unpack(program, rung, model.config, stored.dtype.name, previous, packed)
    on = {"backend": program.backend, "sharding": program.sharding, "scan": program.scan}
    hidden, pool = model.hidden(begun.tokens, begun.positions, pool, begun.plans, **on)
    return pool, *_finish(program, model, hidden, begun, previous)


def _unpack(
    program: Program, rung: Rung, config: DecoderConfig, kv_dtype: str, previous: Array, packed: Array
) -> _Begun:
    words, targets = NUM_WORDS * rung.rows * (program.level > GREEDY), rung.tokens * program.scores_prompt
    ends = np.cumsum([rung.tokens, rung.tokens, rung.rows, words, targets]).tolist()
    tokens, positions, sample_indices, words, targets, vector = (
        packed[a:b] for a, b in zip([0, *ends], [*ends, packed.shape[0]])
    )
    tokens = jnp.where(tokens < 0, previous[-1 - tokens], tokens)
    table = unpack_table(vector, rung)
    group_size = config.num_query_heads // config.num_kv_heads
    rung = rung.with_heads(group_size=group_size, head_dim=config.head_dim, kv_dtype=kv_dtype)
    plans = tuple(plan_step(program.backend, table, rung, spec) for spec in config.block)
    return _Begun(tokens, positions, sample_indices, words, targets, plans)


def _finish(
    program: Program, model: Decoder, hidden: Array, begun: _Begun, previous: Array
) -> tuple[Int32[Array, " m"], Scored]:
    # What is done with the logits must not reach into how the model before them is compiled (requirement R6).
    backend = program.backend if program.sharding is None else None
    logits = model.logits(jnp.take(hidden, begun.sample_indices, axis=0, mode="clip"), backend)
    logits, hidden = jax.lax.optimization_barrier((logits, hidden))
    positions = jnp.take(begun.positions, begun.sample_indices, mode="clip") + 1
    chosen = _choose(program, logits, positions, begun.words)
    sampled = scored(logits, chosen, num_top=program.num_top)
    prompt = None
    if program.scores_prompt:
        prompt = _score_prompt(lambda x: model.logits(x, backend), hidden, begun.targets, program.num_top)
    kept = sampled.tokens[: previous.shape[0]]
    previous = jnp.zeros_like(previous).at[: kept.shape[0]].set(kept)
    out = Scored(sampled, prompt)
    if program.sharding is not None:
        whole = program.sharding.named(PartitionSpec())
        previous, out = jax.lax.with_sharding_constraint((previous, out), whole)
    return previous, out


def _choose(program: Program, logits: Array, positions: Array, words: Array) -> Array:
    if program.level == GREEDY:
        return greedy_tokens(logits)
    if program.sharding is not None:  # whole rows: thresholds are found in many passes over them
        logits = jax.lax.with_sharding_constraint(logits, program.sharding.named(PartitionSpec()))
    return random_tokens(logits, positions, RowParams.unpack(words), filtered=program.level == FILTERED)


def _score_prompt(logits: Callable[[Array], Array], hidden: Array, targets: Array, num_top: int) -> Sampled:
    """Scores of the token after each, a block of tokens at a time: logits of a whole step are larger than the model."""
    blocks = -(-targets.shape[0] // _SCORED_TOGETHER)
    padding = blocks * _SCORED_TOGETHER - targets.shape[0]
    rows = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(blocks, -1, hidden.shape[1])
    wanted = jnp.pad(targets, (0, padding)).reshape(blocks, -1)
    out = jax.lax.map(lambda x: scored(logits(x[0]), x[1], num_top=num_top), (rows, wanted))
    together = blocks * _SCORED_TOGETHER  # not −1: without likeliest tokens there is nothing to divide by
    return jax.tree.map(lambda x: x.reshape(together, *x.shape[2:])[: targets.shape[0]], out)
