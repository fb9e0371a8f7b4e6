"""Runs steps on the model's devices: the `StepRunner` that a driver talks to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

from paged.backends.protocol import Rung
from paged.common.checks import check_int, refuse_rows
from paged.common.errors import InvalidInputError
from paged.common.page_table import PageTable
from paged.control import Slice, Step
from paged.control.runner_protocol import IN_FLIGHT
from paged.engine.pool import KvPool, PoolArrays
from paged.engine.sampling import Sampled
from paged.engine.step import Program, from_previous, pack_step, step
from paged.engine.step_inputs import build_step_inputs
from paged.models import Decoder


@dataclasses.dataclass(frozen=True)
class Token:
    """One sampled token: its id, natural-log probability, and the likeliest (id, log probability) pairs if asked."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A step as the host sends it. `samples[i]` says whether slice i yields a token; `batch[i]` whose it is."""

    batch: tuple[Hashable, ...]
    vector: np.ndarray
    rung: Rung
    samples: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """A step under way: what it samples is still on the device."""

    batch: tuple[Hashable, ...]
    samples: np.ndarray
    sampled: Sampled


OnToken = Callable[[Any, Token], object]
"""on_token(request id, token): what `collect` tells beyond the bare ids, for tables of log probabilities."""


class DeviceRunner:
    """A decoder and its pool, running one dispatched step after the other. Implements `paged.control.StepRunner`.

    - `pool`: what the runner owns from here on; every operation replaces it.
    - `max_rows`: requests in one step at most.
    - `depth`: 1 waits for each step; 2 lets the host plan the next one meanwhile, whose tokens then never leave the
      device: where the host does not know a token yet, the step reads what the latest step sampled for that request.
    - `on_token`: called by `collect` for every sampled token, in the order of the batch.

    A step that fails before the pool was given away changes nothing. One that fails later takes the pool along: every
    further use raises `DonatedPoolError`.
    """

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        program: Program,
        *,
        max_rows: int,
        depth: int = 1,
        on_token: OnToken | None = None,
    ):
        self.model = model
        self.pool = pool
        self.program = program
        self.depth = check_int("DeviceRunner", "depth", depth, minimum=1, maximum=2)
        self.on_token = on_token
        # Placed where steps leave it, or the second step would compile anew.
        sharding = program.sharding
        one = next(iter(model.embedding.devices()))
        place = SingleDeviceSharding(one) if sharding is None else sharding.named(PartitionSpec())
        self._previous = jax.device_put(np.zeros(max_rows, np.int32), place)
        self._row_of: dict[Hashable, int] = {}

    @property
    def can_mix(self) -> bool:
        """Whether one step may hold slices of one token beside longer ones: the backend's capability `mixed`."""
        return "mixed" in self.program.backend.capabilities.features

    def scrub(self, pages: np.ndarray) -> None:
        """Zero these pages in every layer, in one dispatch, before any later step."""
        self.pool = self.pool.scrub(pages)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy pages whole in every layer, in one dispatch, before any later step."""
        self.pool = self.pool.copy(source, target)

    def poison(self, pages: np.ndarray) -> None:
        """Debugging: fill pages with NaN in every layer."""
        self.pool = self.pool.poison(pages)

    def pack(
        self,
        batch: Sequence[Hashable],
        slices: Sequence[Slice],
        known: Sequence[Sequence[int] | np.ndarray],
        table: PageTable,
    ) -> Packed:
        """What the host sends for one step. Raises `InvalidInputError` naming the row that does not fit the table."""
        inputs = build_step_inputs(slices, known, table)
        for row, (who, piece) in enumerate(zip(batch, slices)):
            last = int(table.query_offsets[row + 1]) - 1
            if inputs.tokens[last] == IN_FLIGHT:
                if who not in self._row_of:
                    raise InvalidInputError(
                        f"slice {row} feeds a token of request {who!r} that is in flight, but the latest step did not "
                        f"hold that request (position {piece.start + piece.num_tokens - 1})."
                    )
                inputs.tokens[last] = from_previous(self._row_of[who])
        vector, rung = pack_step(inputs, table)
        return Packed(tuple(batch), vector, rung, inputs.samples[: len(slices)])

    def launch(self, packed: Packed) -> Ticket:
        """Start a packed step, before any other is packed that feeds on it."""

        def run(arrays: PoolArrays) -> tuple[PoolArrays, tuple[jax.Array, Sampled]]:
            pool, previous, sampled = step(self.program, packed.rung, self.model, arrays, self._previous, packed.vector)
            return pool, (previous, sampled)

        self.pool, (self._previous, sampled) = self.pool.step(run)
        self._row_of = {who: row for row, who in enumerate(packed.batch)}
        return Ticket(packed.batch, packed.samples, sampled)

    def dispatch(self, step: Step) -> Ticket:
        """Start a driver's step; it does not wait for the device."""
        return self.launch(self.pack(step.batch, step.slices, step.known, step.table))

    def collect(self, ticket: Ticket) -> np.ndarray:
        """Wait for a step: (slices,) int32 sampled ids; 0 for slices that sample nothing."""
        tokens = self.read(ticket)
        if self.on_token is not None:
            for who, token in zip(ticket.batch, tokens):
                if token is not None:
                    self.on_token(who, token)
        return np.array([0 if token is None else token.id for token in tokens], np.int32)

    def read(self, ticket: Ticket) -> list[Token | None]:
        """Wait for a step: for each slice its token, or None where its prompt goes on.

        Raises `InvalidInputError` naming the row if the logits were not finite.
        """
        host = jax.device_get(ticket.sampled)
        rows = np.flatnonzero(ticket.samples)
        refuse_rows("step", "log probability", host.logprobs[rows], np.isnan(host.logprobs[rows]), _NOT_FINITE)
        out: list[Token | None] = [None] * len(ticket.samples)
        for row in rows.tolist():
            top = zip(host.top_tokens[row].tolist(), host.top_logprobs[row].tolist())
            out[row] = Token(int(host.tokens[row]), float(host.logprobs[row]), tuple(top))
        return out


_NOT_FINITE = (
    "is NaN, so the logits are not finite: a weight is, or the dtype overflowed. Try float32, and check the weights"
)
