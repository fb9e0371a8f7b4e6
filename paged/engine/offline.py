"""Text generation for batches of prompts: continuous batching over pages, without a server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from paged.backends.protocol import AttentionBackend
from paged.common.checks import show
from paged.common.errors import InvalidInputError, PoolExhaustedError
from paged.common.page_table import pages_for
from paged.control import Driver, RequestId, StepOutcome
from paged.control.timeline import Timeline
from paged.engine.outputs import BatchProgress, CompletionOutput, Delta, Interruption
from paged.engine.params import GREEDY, SamplingParams
from paged.engine.parity import Flips, count_flips
from paged.engine.runner import RequestSampling, Token
from paged.engine.runtime import Runtime
from paged.engine.text import StopText, TextCodec, stream_after
from paged.engine.trace import StepTrace
from paged.engine.warm_up import Say, WarmUp
from paged.models import Decoder

Prompt = str | Sequence[int] | np.ndarray
Params = SamplingParams | Sequence[SamplingParams] | None
OnDelta = Callable[[Delta], object]
OnStep = Callable[[BatchProgress], object]

_DEFAULT_REQUEST_TOKENS = 1024
_DEFAULT_LOGPROBS = 20


@dataclasses.dataclass(eq=False)
class _Sequence:
    """One sample of a request that has not ended."""

    request: int
    sample: int
    prompt: tuple[int, ...]
    params: SamplingParams
    sampling: RequestSampling
    text: StopText
    ends: frozenset[int]
    tokens: list[Token] = dataclasses.field(default_factory=list)
    fed: int = 0  # tokens of the prompt


class OfflineEngine:
    """Generates with one decoder: any number of requests, batched continuously over one pool of pages.

    - `model`, `tokenizer`: without a tokenizer, prompts are token ids and texts are empty.
    - `depth`: steps under way at once; at 2 the host plans a step while the device runs the one before.
    - `invariant`: tokens of a request depend on nothing but itself: not on neighbours, order of arrival or what is
      cached. Prompts and decoding get one program shape each, always the largest, nobody is preempted, and requests
      wait until all their pages are certain; so it is slower. Otherwise arithmetic may differ in its last bits between
      shapes, and a token may be another one where two are as good as equally likely.
    - `prefix_cache`: share cached prefixes between requests of one tenant; with `share_across_tenants` between all.
    - `schedule`: see `Driver`. `max_logprobs`: likeliest tokens that a request may ask for.
    - `backend` and `options`: those of `Runtime`; by default the pool holds `max_requests` requests of 1024 tokens.

    `batch_inference` and `stream` run prompts to their end. `submit`, `step`, `abort` and `take` are what they are made
    of, for requests that come and go while others run. One thread at a time.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextCodec | None = None,
        backend: str | AttentionBackend = "xla",
        *,
        invariant: bool = False,
        prefix_cache: bool = False,
        share_across_tenants: bool = False,
        depth: int = 2,
        schedule: str | None = None,
        max_logprobs: int | None = None,
        **options: Any,
    ):
        if options.get("num_pages") is None and options.get("memory_bytes") is None:
            tokens = min(model.config.max_positions, options.get("max_request_tokens") or _DEFAULT_REQUEST_TOKENS)
            pages = pages_for(tokens, options.get("tokens_per_page", 16))
            options["num_pages"] = 1 + options.get("max_requests", 8) * pages
        num_top = min(_DEFAULT_LOGPROBS, model.config.vocab_size) if max_logprobs is None else max_logprobs
        if tokenizer is not None:
            options.setdefault("tokenizer_fingerprint", getattr(tokenizer, "fingerprint", type(tokenizer).__name__))
        self.runtime = Runtime(
            model,
            backend,
            depth=depth,
            num_top=num_top,
            few_programs=True,
            pinned=invariant,
            prefix_cache=prefix_cache,
            **options,
        )
        self.invariant = invariant
        self._share_across_tenants = share_across_tenants
        self.tokenizer = tokenizer
        self.driver = Driver(
            self.runtime.plane,
            self.runtime.runner,
            max_step_tokens=self.runtime.max_step_tokens,
            schedule=schedule,
            max_request_tokens=self.runtime.max_tokens,
        )
        self.timeline = Timeline()
        self._sequences: dict[RequestId, _Sequence] = {}
        self._groups: dict[int, list[CompletionOutput | None]] = {}
        self._keys: dict[int, list[str]] = {}
        self._submitted = self._fed = 0
        self.interruption: Interruption | None = None

    @property
    def idle(self) -> bool:
        """Whether every request has ended."""
        return self.driver.idle

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        priority: int = 0,
    ) -> int:
        """Queue a request; its number. Nothing runs before `step`.

        - `params`: by default greedy, see `SamplingParams`. `priority`: lower goes first.
        - `tenant`: with whom it shares cached prefixes, if the engine has a prefix cache.

        Raises `InvalidInputError` for an empty prompt, tokens outside the vocabulary or what the engine does not have,
        and `PoolExhaustedError` with the arithmetic for a request that could never be cached whole.
        """
        number = self._submitted
        params = SamplingParams() if params is None else params
        ids = self._ids(prompt, "prompt")
        self._enqueue(number, ids, params, tenant, priority, "prompt")
        self._submitted += 1
        return number

    def step(self) -> list[Delta]:
        """Run until the oldest step under way is done: what it added, in the order of its batch. Empty if all is done.

        Raises what the device raises; then requests of the steps under way are computed again, see `Driver.step`.
        """
        if not self.driver.num_in_flight and not self.driver.num_running:
            self.runtime.runner.rest()
        outcome = self.driver.step()
        if outcome is None:
            return []
        self.timeline.observe(outcome, time.perf_counter())
        return self._accept(outcome, self.runtime.runner.collected)

    def abort(self, request: int) -> None:
        """End a request at any point with what it has; its outputs are there to be taken. Nothing if it has ended."""
        for key in self._keys_of(request):
            if key in self._sequences:
                self.driver.abort(key)
                self._end(key, "abort", None)

    def take(self, request: int) -> list[CompletionOutput]:
        """Remove and return the outputs of a request that has ended, one for each sample."""
        self._keys_of(request)
        outputs = [output for output in self._groups[request] if output is not None]
        if len(outputs) < len(self._groups[request]):
            raise InvalidInputError(f"take: request {request} has not ended. Call step() until it has, or abort() it.")
        del self._groups[request], self._keys[request]
        return outputs

    def warm_up(self, *params: SamplingParams, strict: bool = False, say: Say | None = None) -> WarmUp:
        """Compile every program that such requests can need, see `Runtime.warm_up`."""
        return self.runtime.warm_up(*params, strict=strict, say=say)

    def update_weights(self, model: Decoder, *, fingerprint: str | None = None) -> None:
        """Go on with other weights of the same model; nothing cached by the old ones is used. See `Runtime`."""
        self._drain()
        self.runtime.update_weights(model, fingerprint=fingerprint)

    def flips(self, outputs: Sequence[CompletionOutput]) -> Flips:
        """Replay greedy outputs through the model without a cache: tokens that are no argmax there, and by how much."""
        return count_flips(self.runtime.model, outputs)

    def trace(self) -> list[StepTrace]:
        """How host and device shared the time of each step since the last warm-up, at most the latest 65,536 steps.

        `Overlap.of(engine.trace())` sums them up.
        """
        return list(self.runtime.runner.traces)

    def batch_inference(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        tenant: str | None = None,
        on_delta: OnDelta | None = None,
        on_step: OnStep | None = None,
    ) -> list[CompletionOutput]:
        """Continue all prompts; outputs in their order, `n` for each.

        - `params`: for all prompts, or one for each. `on_delta`: called with each piece as it comes, see `stream`.
          `on_step`: called after each step. `tenant`: see `submit`.

        All are checked before anything runs: values that are wrong raise `InvalidInputError` naming the prompt. A
        request that can never fit is refused alone: its output says `"refused"` and why, and the others run.

        If an exception ends the batch, an interrupt included, nothing stays behind in the pool; the exception carries a
        note that says what is done and what is lost, and `interruption` holds the outputs so far.
        """
        outputs: list[CompletionOutput] = []
        for _ in self._running(self._checked(prompts, params), tenant, on_delta, on_step, outputs):
            pass
        return outputs

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        tenant: str | None = None,
        outputs: list[CompletionOutput] | None = None,
    ) -> Iterator[Delta]:
        """Like `batch_inference`, piece by piece as the tokens come; `Delta.request` is the index of the prompt.

        - `outputs`: a list that gets the whole completions at the end.

        Prompts are checked at once. Closing the iterator aborts what has not ended.
        """
        return self._running(self._checked(prompts, params), tenant, None, None, [] if outputs is None else outputs)

    def check(self, prompts: Sequence[Prompt], params: Params = None) -> int:
        """Tokens of all prompts, if `batch_inference` would run every one; raises for the first that it would not."""
        total = 0
        for i, (ids, one, error) in enumerate(self._checked(prompts, params)):
            total += len(ids)
            if error is not None:
                self.runtime.check_prompt(ids, name=f"prompt {i}", more=one.max_tokens - 1)
                raise PoolExhaustedError(error)
        return total

    def _running(
        self,
        batch: list[tuple[tuple[int, ...], SamplingParams, str | None]],
        tenant: str | None,
        on_delta: OnDelta | None,
        on_step: OnStep | None,
        outputs: list[CompletionOutput],
    ) -> Iterator[Delta]:
        index_of: dict[int, int] = {}
        numbers: list[int | None] = []
        before, generated, done = self._fed, 0, 0
        total = sum(params.n for _, params, error in batch if error is None)
        self.interruption = None
        try:
            for i, (ids, params, error) in enumerate(batch):
                if error is not None:
                    numbers.append(None)
                    continue
                number = self._submitted
                self._enqueue(number, ids, params, tenant, 0, f"prompt {i}")
                self._submitted += 1
                index_of[number] = i
                numbers.append(number)
            while not all(self._ended(number) for number in index_of):
                for delta in self.step():
                    if delta.request not in index_of:
                        continue
                    generated += delta.token is not None
                    done += delta.finish_reason is not None
                    delta = dataclasses.replace(delta, request=index_of[delta.request])
                    if on_delta is not None:
                        on_delta(delta)
                    yield delta
                if on_step is not None:
                    on_step(BatchProgress(self._fed - before, generated, done, total))
        except BaseException as error:
            for number in index_of:
                self.abort(number)
            self._drain()
            gathered = self._gather(batch, [*numbers, *[None] * (len(batch) - len(numbers))])
            self.interruption = Interruption(tuple(gathered))
            error.add_note(f"paged: {self.interruption}.")
            raise
        self._drain()
        outputs += self._gather(batch, numbers)

    def _drain(self) -> None:
        """If nobody else runs, collect what is under way for requests that ended, so that their pages come free."""
        try:
            while self.driver.num_in_flight and not self._sequences:
                self.driver.step()
        except Exception:
            # The device failed before; what its steps would have given is lost, and the driver has let go of them.
            return

    def _gather(
        self, batch: list[tuple[tuple[int, ...], SamplingParams, str | None]], numbers: Sequence[int | None]
    ) -> list[CompletionOutput]:
        out: list[CompletionOutput] = []
        for i, ((ids, _, error), number) in enumerate(zip(batch, numbers)):
            if number is None:
                reason = "refused" if error is not None else "abort"
                out.append(CompletionOutput(i, 0, ids, finish_reason=reason, error=error))
            else:
                out += [dataclasses.replace(output, request=i) for output in self.take(number)]
        return out

    def _checked(
        self, prompts: Sequence[Prompt], params: Params
    ) -> list[tuple[tuple[int, ...], SamplingParams, str | None]]:
        """Ids, parameters, and why it can never fit, of each prompt; raises for the first that is wrong."""
        if isinstance(prompts, str):
            raise InvalidInputError("prompts must be a sequence of prompts, got one text. Put it into a list.")
        if params is None or isinstance(params, SamplingParams):
            params = [SamplingParams() if params is None else params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidInputError(f"{len(prompts)} prompts and {len(params)} SamplingParams; give one for each.")
        out = []
        for i, (prompt, one) in enumerate(zip(prompts, params)):
            name = f"prompt {i}"
            if not isinstance(one, SamplingParams):
                raise InvalidInputError(f"{name}: params must be SamplingParams, got {show(one)}.")
            ids = self._ids(prompt, name)
            self._sampling(one, len(ids), 0, name)
            try:
                self._limit(ids, one, name)
                error = None
            except PoolExhaustedError as refused:
                error = str(refused)
            out.append((ids, one, error))
        return out

    def _ids(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(self.runtime.check_ids(prompt, name=name))
        if self.tokenizer is None:
            raise InvalidInputError(f"{name} is text, and this engine has no tokenizer. Give token ids.")
        return tuple(self.runtime.check_ids(self.tokenizer.encode(prompt) if prompt else [], name=name))

    def _limit(self, ids: tuple[int, ...], params: SamplingParams, name: str) -> int:
        """Tokens to generate at most. Raises `PoolExhaustedError` if the prompt and they can never fit."""
        positions = self.runtime.model.config.max_positions
        if len(ids) > positions:
            raise PoolExhaustedError(
                f"{name} has {len(ids)} tokens; the model has positions for {positions} (max_positions). Shorten it by "
                f"{len(ids) - positions}."
            )
        limit = min(params.max_tokens, positions - len(ids) + 1)  # the last token is sampled and never fed
        self.runtime.check_prompt(ids, name=name, more=limit - 1)
        return limit

    def _sampling(self, params: SamplingParams, num_prompt: int, sample: int, name: str) -> RequestSampling:
        if params.stop and self.tokenizer is None:
            raise InvalidInputError(f"{name}: SamplingParams.stop is {show(params.stop)}, and there is no tokenizer.")
        return self.runtime.sampling(params, num_prompt, sample=sample, name=name)

    def _enqueue(
        self,
        number: int,
        ids: tuple[int, ...],
        params: SamplingParams,
        tenant: str | None,
        priority: int,
        name: str,
    ) -> None:
        limit = self._limit(ids, params, name)
        model_ends = () if params.ignore_eos else self.runtime.model.config.eos
        ends = frozenset((*model_ends, *params.stop_token_ids))
        first = self._sampling(params, len(ids), 0, name)
        now, keys = time.perf_counter(), [f"{number}.{sample}" for sample in range(params.n)]
        namespace = None
        # What is found cached has no logits, so a prompt whose scores are wanted is computed whole (scenario C13).
        if self.runtime.plane.prefixes is not None and params.prompt_logprobs is None:
            namespace = self.runtime.namespace(tenant=None if self._share_across_tenants else tenant)
        options: Any = {"eos": ends, "priority": priority, "namespace": namespace}
        self.driver.submit_samples(ids, limit, keys, **options)
        for sample, key in enumerate(keys):
            # One seed for all samples, told apart by their numbers; the first scores the prompt for all.
            own = params if not sample else dataclasses.replace(params, prompt_logprobs=None)
            sampling = self.runtime.sampling(own, len(ids), seed=first.seed, sample=sample)
            pieces = None if self.tokenizer is None else stream_after(self.tokenizer, ids)
            self._sequences[key] = _Sequence(number, sample, ids, params, sampling, StopText(pieces, params.stop), ends)
            self.runtime.runner.sampling[key] = sampling
            self.timeline.arrive(key, now)
        self._keys[number], self._groups[number] = keys, [None] * params.n

    def _accept(self, outcome: StepOutcome, collected: Sequence[Token | None]) -> list[Delta]:
        deltas = []
        finished = set(outcome.finished)
        fed = (outcome.cached + outcome.query_lens).tolist()
        for key, kept, token, end in zip(outcome.batch, outcome.tokens.tolist(), collected, fed):
            sequence = self._sequences.get(key)
            if sequence is None:  # it ended while the step was under way
                continue
            if sequence.fed < len(sequence.prompt):
                more = max(0, min(end, len(sequence.prompt)) - sequence.fed)
                sequence.fed += more
                self._fed += more
            if kept < 0 or token is None:  # its prompt goes on
                continue
            sequence.tokens.append(token)
            text, reason = sequence.text.push(token.id), None
            if sequence.text.stopped_by is not None:
                self.driver.stop(key)
                reason = "stop"
            elif key in finished:
                reason = self.driver.finished[key].reason
            if reason is not None:
                text += self._end(key, reason, token)
            deltas.append(Delta(sequence.request, sequence.sample, token, text, reason))
        return deltas

    def _end(self, key: RequestId, reason: str, token: Token | None) -> str:
        """Make a sample's output; the text that was held back."""
        sequence, result = self._sequences.pop(key), self.driver.take(key)
        runner, params = self.runtime.runner, sequence.params
        del runner.sampling[key]
        scores = runner.prompt_scores.pop(key, {})
        rest = sequence.text.finish()
        why: str | int | None = sequence.text.stopped_by
        if why is None and token is not None and token.id in sequence.ends:
            why = token.id
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not sequence.sample:
            prompt_logprobs = tuple(scores.get(i) for i in range(len(sequence.prompt)))
        timing = self.timeline.timing(key)
        self.timeline.forget(key)
        self._groups[sequence.request][sequence.sample] = CompletionOutput(
            request=sequence.request,
            sample=sequence.sample,
            prompt_ids=sequence.prompt,
            token_ids=tuple(token.id for token in sequence.tokens),
            text=sequence.text.text,
            logprobs=tuple(token.logprob for token in sequence.tokens),
            top_logprobs=tuple(token.top for token in sequence.tokens) if params.logprobs else (),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=why,
            seed=None if params.level == GREEDY else sequence.sampling.seed,
            preemptions=result.preemptions,
            prefix_tokens=result.prefix_tokens,
            timing=timing,
        )
        return rest

    def _ended(self, number: int) -> bool:
        return all(output is not None for output in self._groups[number])

    def _keys_of(self, request: int) -> list[str]:
        if request not in self._keys:
            raise InvalidInputError(f"there is no request {show(request)}: never submitted, or taken.")
        return self._keys[request]
