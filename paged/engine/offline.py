"""Text generation for batches of prompts: continuous batching over pages, without a server."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paged.backends.protocol import AttentionBackend
from paged.common.errors import PagedError, PoolExhaustedError
from paged.common.page_table import pages_for
from paged.control import Driver
from paged.control.timeline import Timeline
from paged.engine.intake import Checked, Intake, Params, Prompt
from paged.engine.interrupts import Deferred
from paged.engine.live import LiveRequests
from paged.engine.outputs import BatchProgress, CompletionOutput, Delta, Interruption
from paged.engine.params import SamplingParams
from paged.engine.parity import Flips, count_flips
from paged.engine.runtime import Runtime
from paged.engine.text import TextCodec
from paged.engine.trace import StepTrace
from paged.engine.warm_up import Say, WarmUp
from paged.models import Decoder

OnDelta = Callable[[Delta], object]
OnOutput = Callable[[CompletionOutput], object]
OnStep = Callable[[BatchProgress], object]

_DEFAULT_REQUEST_TOKENS = 1024
_DEFAULT_LOGPROBS = 20


def _nothing(_: object) -> None:
    """What is called where nobody asked to be."""


class _Calls:
    """Whom a batch calls as it gets on."""

    def __init__(
        self, on_delta: OnDelta | None = None, on_output: OnOutput | None = None, on_step: OnStep | None = None
    ):
        self.on_delta = on_delta or _nothing
        self.on_output = on_output or _nothing
        self.on_step = on_step or _nothing


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
        self._intake = Intake(self.runtime, tokenizer)
        self.driver = Driver(
            self.runtime.plane,
            self.runtime.runner,
            max_step_tokens=self.runtime.max_step_tokens,
            schedule=schedule,
            max_request_tokens=self.runtime.max_tokens,
        )
        self._live = LiveRequests(self.driver, self.runtime.runner, self._intake, tokenizer)
        self._inboxes: dict[int, deque[Delta]] = {}
        self.interruption: Interruption | None = None

    @property
    def timeline(self) -> Timeline:
        """When requests arrived and their tokens came, in seconds of `time.perf_counter`."""
        return self._live.timeline

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
        ids = self._intake.ids(prompt, "prompt")
        params, tenant = self._intake.params(params, "submit"), self._intake.tenant(tenant, "submit")
        with Deferred():
            return self._enqueue(ids, params, tenant, priority, None)

    def step(self) -> list[Delta]:
        """Run until the oldest step under way is done: what it added, in the order of its batch. Empty if all is done.

        Pieces of requests of a `stream` that is open go there, too, whoever steps. Ctrl-C and SIGTERM wait for the end
        of the step; a second one does not. A request whose logits are not finite fails alone: its last piece has the
        reason `"error"` and no token, and its output says where. Raises what the device raises; then requests of the
        steps under way are computed again, see `Driver.step`, unless they are aborted.
        """
        with Deferred():
            return self._step()

    def abort(self, request: int) -> None:
        """End a request at any point with what it has; its outputs are there to be taken. Nothing if it has ended."""
        self._live.abort(request)

    def take(self, request: int) -> list[CompletionOutput]:
        """Remove and return the outputs of a request that has ended, one for each sample."""
        return self._live.take(request)

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
        on_output: OnOutput | None = None,
    ) -> list[CompletionOutput]:
        """Continue all prompts; outputs in their order, `n` for each.

        - `params`: for all prompts, or one for each. `tenant`: see `submit`.
        - `on_delta`: called with each piece as it comes, see `stream`. `on_output`: with each output as soon as it has
          ended, refused ones first. `on_step`: after each step. Ctrl-C and SIGTERM wait until all pieces and outputs of
          a step were handed out; a second one does not.

        All are checked before anything runs: values that are wrong raise `InvalidInputError` naming the prompt. A
        request that can never fit is refused alone: its output says `"refused"` and why, and the others run. One whose
        logits are not finite fails alone, with the tokens it had: its output says `"error"` and at which step.

        If an exception ends the batch, an interrupt included, nothing stays behind in the pool; the exception carries a
        note that says what is done and what is lost, and `interruption` holds the outputs so far.
        """
        outputs: list[CompletionOutput] = []
        tenant = self._intake.tenant(tenant, "batch_inference")
        batch, calls = self._intake.batch(prompts, params), _Calls(on_delta, on_output, on_step)
        for _ in self._running(batch, tenant, calls, outputs):
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

        Prompts are checked at once. Closing the iterator aborts what has not ended. Several streams may be read in
        turn, and requests be submitted beside them: reading any of them lets all get on.
        """
        batch, tenant = self._intake.batch(prompts, params), self._intake.tenant(tenant, "stream")
        return self._running(batch, tenant, _Calls(), [] if outputs is None else outputs)

    def check(self, prompts: Sequence[Prompt], params: Params = None) -> int:
        """Tokens of all prompts, if `batch_inference` would run every one; raises for the first that it would not."""
        total = 0
        for i, (ids, one, error) in enumerate(self._intake.batch(prompts, params)):
            total += len(ids)
            if error is not None:
                self.runtime.check_prompt(ids, name=f"prompt {i}", more=one.max_tokens - 1)
                raise PoolExhaustedError(error)
        return total

    def _running(
        self,
        batch: list[Checked],
        tenant: str | None,
        calls: _Calls,
        outputs: list[CompletionOutput],
    ) -> Iterator[Delta]:
        index_of: dict[int, int] = {}
        inbox: deque[Delta] = deque()  # filled by whoever steps: another stream may be read in turn with this one
        before, generated, done = self._live.fed, 0, 0
        total = sum(one.params.n for one in batch if one.error is None)
        self.interruption = None
        try:
            with Deferred():
                for i, one in enumerate(batch):
                    if one.error is None:
                        number = self._enqueue(one.ids, one.params, tenant, 0, f"prompt {i}")
                        index_of[number], self._inboxes[number] = i, inbox
                for output in self._refused(batch):
                    calls.on_output(output)
            while done < total and (inbox or not self.idle):
                # A signal waits for the pieces of its step, too: they count as generated, so they are to be seen.
                with Deferred():
                    if not inbox:
                        self._step()
                    pieces = [dataclasses.replace(delta, request=index_of[delta.request]) for delta in inbox]
                    ended = [self._live.output(d.request, d.sample) for d in inbox if d.finish_reason is not None]
                    inbox.clear()
                    generated += sum(delta.token is not None for delta in pieces)
                    done += len(ended)
                    for delta in pieces:
                        calls.on_delta(delta)
                    for output in ended:
                        if output is not None:
                            calls.on_output(dataclasses.replace(output, request=index_of[output.request]))
                yield from pieces
                calls.on_step(BatchProgress(self._live.fed - before, generated, done, total))
        except BaseException as error:
            with Deferred():
                for number in index_of:
                    self.abort(number)
                self._drain()
                self.interruption = Interruption(tuple(self._gather(batch, index_of)))
            error.add_note(f"paged: {self.interruption}.")
            if isinstance(error, PagedError):  # it may name a request
                pairs = [f"request {number} is prompt {i}" for number, i in index_of.items() if number != i]
                if pairs:
                    error.add_note(f"paged: {', '.join(pairs[:20])}{' …' if len(pairs) > 20 else ''}.")
            raise
        finally:
            for number in index_of:
                del self._inboxes[number]
        self._drain()
        outputs += self._gather(batch, index_of)

    def _step(self) -> list[Delta]:
        if not self.driver.num_in_flight and not self.driver.num_running:
            self.runtime.runner.rest()
        outcome = self.driver.step()
        if outcome is None:
            return []
        deltas = self._live.accept(outcome, self.runtime.runner.collected, time.perf_counter())
        for delta in deltas:
            if delta.request in self._inboxes:
                self._inboxes[delta.request].append(delta)
        return deltas

    def _drain(self) -> None:
        """If nobody else runs, collect what is under way for requests that ended, so that their pages come free."""
        try:
            while self.driver.num_in_flight and not self._live.samples:
                self.driver.step()
        except Exception:
            # The device failed before; what its steps would have given is lost, and the driver has let go of them.
            return

    def _gather(self, batch: list[Checked], index_of: dict[int, int]) -> list[CompletionOutput]:
        number_of = {i: number for number, i in index_of.items()}
        refused = {output.request: output for output in self._refused(batch)}
        out: list[CompletionOutput] = []
        for i, one in enumerate(batch):
            if i in number_of:
                out += [dataclasses.replace(output, request=i) for output in self.take(number_of[i])]
            else:  # a batch that ended before it was submitted whole has neither
                out.append(refused.get(i) or CompletionOutput(i, 0, one.ids, finish_reason="abort"))
        return out

    @staticmethod
    def _refused(batch: list[Checked]) -> list[CompletionOutput]:
        return [
            CompletionOutput(i, 0, one.ids, finish_reason="refused", error=one.error)
            for i, one in enumerate(batch)
            if one.error is not None
        ]

    def _enqueue(
        self, ids: tuple[int, ...], params: SamplingParams, tenant: str | None, priority: int, name: str | None
    ) -> int:
        namespace = None
        # What is found cached has no logits, so a prompt whose scores are wanted is computed whole (scenario C13).
        if self.runtime.plane.prefixes is not None and params.prompt_logprobs is None:
            namespace = self.runtime.namespace(tenant=None if self._share_across_tenants else tenant)
        return self._live.submit(
            ids,
            params,
            model_ends=self.runtime.model.config.eos,
            namespace=namespace,
            priority=priority,
            name=name,
            now=time.perf_counter(),
        )
