"""The jitted step: unpack, plan, run the decoder over the donated pool, sample. One program for each shape."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from paged.backends.metadata import pack_table, unpack_table
from paged.backends.protocol import AttentionBackend, Rung
from paged.backends.sharding import KvSharding
from paged.backends.step import plan_step
from paged.common.page_table import PageTable
from paged.engine.compile_options import compiler_options
from paged.engine.pool import PoolArrays
from paged.engine.sampling import Sampled, greedy
from paged.engine.step_inputs import StepInputs
from paged.models import Decoder


@dataclasses.dataclass(frozen=True)
class Program:
    """What is static in a step besides its rung: equal programs at equal rungs compile once."""

    backend: AttentionBackend
    sharding: KvSharding | None
    platform: str
    scan: bool
    num_top: int


def pack_step(inputs: StepInputs, table: PageTable) -> tuple[np.ndarray, Rung]:
    """Everything that a step needs from the host in one int32 vector: one transfer, whatever the number of devices."""
    vector, rung = pack_table(table)
    return np.concatenate([inputs.tokens, inputs.positions, inputs.sample_indices, vector]), rung


def from_previous(row: int) -> int:
    """What stands in a packed step for the token that row `row` of the step before sampled: below every token id."""
    return -1 - row


def step(
    program: Program, rung: Rung, model: Decoder, pool: PoolArrays, previous: Array, packed: np.ndarray
) -> tuple[PoolArrays, Array, Sampled]:
    """One step over a packed batch: the pool to use from now on, the next `previous`, and what each row sampled.

    - `pool` is donated. `previous` (most rows of any step,) int32: tokens that the step before sampled, by row.

    Compiles once for each program, rung and structure of the model.
    """
    return jitted(program.platform)(program, rung, model, pool, previous, packed)


@functools.cache
def jitted(platform: str) -> Any:
    """The jitted step with the options that a platform wants."""
    options = dict(compiler_options(platform)) or None
    return jax.jit(traced_step, static_argnums=(0, 1), donate_argnums=3, compiler_options=options)


def traced_step(
    program: Program,
    rung: Rung,
    model: Decoder,
    pool: PoolArrays,
    previous: Int32[Array, " m"],
    packed: Int32[Array, " n"],
) -> tuple[PoolArrays, Int32[Array, " m"], Sampled]:
    """What `step` compiles: unpack, plan, run the decoder, sample."""
    ends = np.cumsum([rung.tokens, rung.tokens, rung.rows])
    tokens, positions, sample_indices, vector = (
        packed[a:b] for a, b in zip([0, *ends.tolist()], [*ends.tolist(), packed.shape[0]])
    )
    tokens = jnp.where(tokens < 0, previous[-1 - tokens], tokens)
    table = unpack_table(vector, rung)
    backend, sharding, config = program.backend, program.sharding, model.config
    stored = pool[0] if isinstance(pool, tuple) else pool
    group_size = config.num_query_heads // config.num_kv_heads
    rung = rung.with_heads(group_size=group_size, head_dim=config.head_dim, kv_dtype=stored.dtype.name)
    plans = tuple(plan_step(backend, table, rung, spec) for spec in config.block)
    logits, pool = model(
        tokens, positions, sample_indices, pool, plans, backend=backend, sharding=sharding, scan=program.scan
    )
    sampled = greedy(logits, num_top=program.num_top)
    kept = sampled.tokens[: previous.shape[0]]
    previous = jnp.zeros_like(previous).at[: kept.shape[0]].set(kept)
    if sharding is not None:
        previous, sampled = jax.lax.with_sharding_constraint((previous, sampled), sharding.named(PartitionSpec()))
    return pool, previous, sampled
