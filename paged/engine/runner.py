"""Runs steps on the model's devices: the `StepRunner` that a driver talks to."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

from paged.backends.protocol import Rung
from paged.common.checks import check_int, show
from paged.common.errors import InvalidInputError
from paged.common.page_table import PageTable
from paged.control import Slice, Step
from paged.control.runner_protocol import FAILED, IN_FLIGHT
from paged.engine.params import GREEDY, NUM_WORDS
from paged.engine.pool import KvPool, PoolArrays
from paged.engine.programs import ProgramBook
from paged.engine.request_sampling import BatchSampling, RequestSampling
from paged.engine.sampling import Sampled
from paged.engine.step import Apart, Program, Scored, from_previous, pack_step, step
from paged.engine.step_inputs import StepInputs, build_step_inputs
from paged.engine.trace import StepTrace
from paged.models import Decoder


@dataclasses.dataclass(frozen=True)
class Token:
    """One sampled token: its id, natural-log probability, and the likeliest (id, log probability) pairs if asked."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class _Wanted(NamedTuple):
    """Scores that a step computes for one request's prompt: those of positions first .. first + length − 1, which are
    the step's tokens from `token` on; `num_top` likeliest tokens each."""

    who: Hashable
    token: int
    first: int
    length: int
    num_top: int


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A step as the host sends it. `samples[i]` says whether slice i yields a token; `batch[i]` whose it is.

    `num_top[i]`: likeliest tokens that slice i reports; `wanted`: scores of prompts.
    """

    batch: tuple[Hashable, ...]
    vector: np.ndarray
    rung: Rung
    samples: np.ndarray
    program: Program
    num_top: Sequence[int]
    wanted: Sequence[_Wanted] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """A step under way: what it samples is still on the device."""

    packed: Packed
    scored: Scored
    trace: StepTrace


class DeviceRunner:
    """A decoder and its pool, running one dispatched step after the other. Implements `paged.control.StepRunner`.

    - `pool`: what the runner owns from here on; every operation replaces it.
    - `max_rows`: requests in one step at most.
    - `depth`: 1 waits for each step; 2 lets the host plan the next one meanwhile, whose tokens then never leave the
      device: where the host does not know a token yet, the step reads what the latest step sampled for that request.
    - `sampling`: how tokens are chosen, by request; greedily for those that are not in it. Who enters a request takes
      it out again.

    `collected` holds what the latest collected step sampled, slice by slice, None where a prompt goes on. At depth 2
    that includes a token of requests that ended meanwhile: `StepOutcome.tokens` tells which are kept.
    `prompt_scores` gathers the scores of prompts by request and position; take them out.

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
    ):
        self.pool = pool
        self.program = program
        self.model = model
        self.depth = check_int("DeviceRunner", "depth", depth, minimum=1, maximum=2)
        self.sampling: dict[Hashable, RequestSampling] = {}
        self._together = BatchSampling([], program.num_top)
        self.collected: list[Token | None] = []
        self.prompt_scores: dict[Hashable, dict[int, Token]] = {}
        self.programs = ProgramBook()
        self.traces = StepTrace.log()
        # Placed where steps leave it, or the second step would compile anew.
        sharding = program.sharding
        one = next(iter(model.embedding.devices()))
        place = SingleDeviceSharding(one) if sharding is None else sharding.named(PartitionSpec())
        self._previous = jax.device_put(np.zeros(max_rows, np.int32), place)
        self._row_of: dict[Hashable, int] = {}
        self._latest: Scored | None = None
        self._free_at = time.perf_counter()

    @property
    def model(self) -> Decoder:
        """The decoder; set it to another one of the same structure."""
        return self._model

    @model.setter
    def model(self, model: Decoder) -> None:
        self._model, self._run = model, Apart.of(model) if self.program.apart else model

    @property
    def can_mix(self) -> bool:
        """Whether one step may hold slices of one token beside longer ones: the backend's capability `mixed`."""
        return "mixed" in self.program.backend.capabilities.features

    def scrub(self, pages: np.ndarray) -> None:
        """Zero these pages in every layer, in one dispatch, before any later step."""
        self.programs.expect("scrub", self.pool.batch_size(len(pages)))
        self.pool = self.pool.scrub(pages)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy pages whole in every layer, in one dispatch, before any later step."""
        self.programs.expect("copy", self.pool.batch_size(len(target)))
        self.pool = self.pool.copy(source, target)

    def poison(self, pages: np.ndarray) -> None:
        """Debugging: fill pages with NaN in every layer."""
        if self.pool.lost:  # and whoever gives its pages back has no need to hear of it
            return
        self.programs.expect("poison", self.pool.batch_size(len(pages)))
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
        samples = inputs.samples[: len(slices)]
        if not self.sampling:
            vector, rung = pack_step(inputs, table)
            return Packed(tuple(batch), vector, rung, samples, self.program, [self.program.num_top] * len(slices))
        return self._pack_sampling(tuple(batch), slices, known, table, inputs, samples)

    def _pack_sampling(
        self,
        batch: tuple[Hashable, ...],
        slices: Sequence[Slice],
        known: Sequence[Sequence[int] | np.ndarray],
        table: PageTable,
        inputs: StepInputs,
        samples: np.ndarray,
    ) -> Packed:
        asked = [self.sampling.get(who) for who in batch]
        if asked != self._together.asked:  # requests that decode together do so step after step
            self._together = BatchSampling(asked, self.program.num_top)
        together, wanted = self._together, list[_Wanted]()
        targets = np.zeros(table.num_tokens if together.scored else 0, np.int32)
        for row in together.scored:
            one, first = asked[row], slices[row].start + 1
            assert one is not None
            length = min(slices[row].num_tokens, one.num_prompt - first)
            if length > 0:
                token = int(table.query_offsets[row])
                targets[token : token + length] = known[row][first : first + length]
                wanted.append(_Wanted(batch[row], token, first, length, one.params.prompt_logprobs or 0))
        top = self.program.num_top if any(together.num_top) or any(want.num_top for want in wanted) else 0
        program = self.program.doing(together.level, top, bool(wanted))
        words = None
        if together.level > GREEDY:
            words = np.zeros((table.num_rows, NUM_WORDS), np.int32)
            words[: len(batch)] = together.words
            words = words.reshape(-1)
        vector, rung = pack_step(inputs, table, words, targets if wanted else None)
        return Packed(batch, vector, rung, samples, program, together.num_top, wanted)

    def launch(self, packed: Packed) -> Ticket:
        """Start a packed step, before any other is packed that feeds on it.

        Raises `LateCompileError`, and starts nothing, if it would compile a program after `programs` was sealed.
        """
        self.programs.expect(packed.program, packed.rung)
        began = time.perf_counter()
        # Whether the device had run out of work by now; if so, at most since the host last knew it to be busy.
        ran_dry = self._latest is None or self._latest.sampled.tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

        def run(arrays: PoolArrays) -> tuple[PoolArrays, tuple[jax.Array, Scored]]:
            pool, previous, scored = step(packed.program, packed.rung, self._run, arrays, self._previous, packed.vector)
            return pool, (previous, scored)

        self.pool, (self._previous, self._latest) = self.pool.step(run)
        self._row_of = {who: row for row, who in enumerate(packed.batch)}
        ended = time.perf_counter()
        trace = StepTrace(
            rows=len(packed.batch),
            rung_tokens=packed.rung.tokens,
            plan_s=began - self._free_at,
            dispatch_s=ended - began,
            idle_s=ended - self._free_at if ran_dry else 0.0,
        )
        self._free_at = ended
        return Ticket(packed, self._latest, trace)

    def rest(self) -> None:
        """Nobody asked for anything until now: the time since the last step counts for nothing."""
        self._free_at, self._latest = time.perf_counter(), None

    def dispatch(self, step: Step) -> Ticket:
        """Start a driver's step; it does not wait for the device."""
        return self.launch(self.pack(step.batch, step.slices, step.known, step.table))

    def collect(self, ticket: Ticket) -> np.ndarray:
        """Wait for a step: (slices,) int32 sampled ids; 0 for slices that sample nothing, `FAILED` where logits are not
        finite. Fills `collected`."""
        self.collected, failed = self._read(ticket)
        ids = np.array([0 if token is None else token.id for token in self.collected], np.int32)
        ids[failed] = FAILED
        return ids

    def read(self, ticket: Ticket) -> list[Token | None]:
        """Wait for a step: for each slice its token, or None where its prompt goes on.

        Raises `InvalidInputError` naming the request if its logits were not finite.
        """
        tokens, failed = self._read(ticket)
        if failed:
            _refuse_not_finite([ticket.packed.batch[row] for row in failed], failed[0])
        return tokens

    def _read(self, ticket: Ticket) -> tuple[list[Token | None], list[int]]:
        """Tokens of a step, and the rows that should have one and whose logits were not finite."""
        began = time.perf_counter()
        try:
            host, prompt = jax.device_get(ticket.scored)
        except jax.errors.JaxRuntimeError as error:
            self.pool.lose(error)  # the device had it when it failed
            raise
        packed, self._free_at = ticket.packed, time.perf_counter()
        self.traces.append(dataclasses.replace(ticket.trace, wait_s=self._free_at - began))
        rows = np.flatnonzero(packed.samples)
        failed = rows[np.isnan(host.logprobs[rows])].tolist()
        out: list[Token | None] = [None] * len(packed.samples)
        sampled = _tokens(host, rows.tolist(), [packed.num_top[row] for row in rows.tolist()])
        for row, token in zip(rows.tolist(), sampled):
            out[row] = token
        for row in failed:
            out[row] = None
        for want in packed.wanted:
            if want.who not in self.sampling:  # it ended meanwhile, and nobody would take them out
                continue
            scores = self.prompt_scores.setdefault(want.who, {})
            there = range(want.token, want.token + want.length)
            for position, token in enumerate(_tokens(prompt, there, [want.num_top] * want.length), want.first):
                scores.setdefault(position, token)
        return out, failed


def _tokens(host: Sampled, rows: Sequence[int], num_top: Sequence[int]) -> list[Token]:
    """Tokens of some rows, each with as many likeliest ones as it asked for."""
    ids, logprobs = host.tokens.tolist(), host.logprobs.tolist()
    if not any(num_top):
        return [Token(ids[row], logprobs[row]) for row in rows]
    top_ids, top_logprobs = host.top_tokens.tolist(), host.top_logprobs.tolist()
    return [
        Token(ids[row], logprobs[row], tuple(zip(top_ids[row][:most], top_logprobs[row][:most])))
        for row, most in zip(rows, num_top)
    ]


def _refuse_not_finite(who: Sequence[Hashable], row: int) -> NoReturn:
    others = f" So {'is that' if len(who) == 2 else 'are those'} of {len(who) - 1} more." if len(who) > 1 else ""
    raise InvalidInputError(
        f"step: the log probability of what request {show(who[0])} sampled (row {row}) is NaN, so its logits are not "
        f"finite: a weight that its tokens read is not, or the dtype overflowed.{others} Release it to go on with the "
        f"others; try float32, and check the weights."
    )
