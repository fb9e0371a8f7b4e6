"""Requests of an offline engine while they run: from submit to the outputs that are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from paged.common.checks import show
from paged.common.errors import InvalidInputError
from paged.common.namespace import CacheNamespace
from paged.control import Driver, RequestId, StepOutcome
from paged.control.timeline import Timeline
from paged.engine.intake import Intake
from paged.engine.outputs import CompletionOutput, Delta
from paged.engine.params import SamplingParams
from paged.engine.runner import DeviceRunner, Token
from paged.engine.sample import LiveSample
from paged.engine.text import StopText, TextCodec, stream_after


class LiveRequests:
    """Every request that is not taken yet, by number; each is `n` samples, which the driver knows by key.

    - `samples`: those that have not ended, by key. `fed`: tokens of prompts that were fed so far, each once.
    """

    def __init__(self, driver: Driver, runner: DeviceRunner, intake: Intake, tokenizer: TextCodec | None):
        self._driver, self._runner, self._intake, self._tokenizer = driver, runner, intake, tokenizer
        self.timeline = Timeline()
        self.samples: dict[RequestId, LiveSample] = {}
        self.fed = 0
        self._groups: dict[int, list[CompletionOutput | None]] = {}
        self._keys: dict[int, list[str]] = {}
        self._submitted = 0

    def submit(
        self,
        ids: tuple[int, ...],
        params: SamplingParams,
        *,
        model_ends: Sequence[int],
        namespace: CacheNamespace | None,
        priority: int,
        name: str | None,
        now: float,
    ) -> int:
        """Queue a request whose values are right, and return its number.

        `name` is what messages call its prompt; by default its number tells.
        """
        intake, number = self._intake, self._submitted
        called, name = name or f"request {number}", name or "prompt"
        limit = intake.limit(ids, params, name)
        ends = frozenset((*(() if params.ignore_eos else model_ends), *params.stop_token_ids))
        first = intake.sampling(params, len(ids), name)
        keys = [f"{number}.{sample}" for sample in range(params.n)]
        options: Any = {"eos": ends, "priority": priority, "namespace": namespace}
        self._driver.submit_samples(ids, limit, keys, **options)
        for sample, key in enumerate(keys):
            # One seed for all samples, told apart by their numbers; the first scores the prompt for all.
            own = params if not sample else dataclasses.replace(params, prompt_logprobs=None)
            sampling = intake.sampling(own, len(ids), name, seed=first.seed, sample=sample)
            text = StopText(None if self._tokenizer is None else stream_after(self._tokenizer, ids), params.stop)
            self.samples[key] = LiveSample(number, sample, called, ids, params, sampling, text, ends)
            self._runner.sampling[key] = sampling
            self.timeline.arrive(key, now)
        self._keys[number], self._groups[number] = keys, [None] * params.n
        self._submitted += 1
        return number

    def accept(self, outcome: StepOutcome, collected: Sequence[Token | None], now: float) -> list[Delta]:
        """Take in what a step sampled, and end who is done: its pieces, in the order of its batch."""
        self.timeline.observe(outcome, now)
        deltas = []
        finished = set(outcome.finished)
        ends = (outcome.cached + outcome.query_lens).tolist()
        for key, kept, token, end in zip(outcome.batch, outcome.tokens.tolist(), collected, ends):
            sample = self.samples.get(key)
            if sample is None:  # it ended while the step was under way
                continue
            if sample.fed < len(sample.prompt):
                self.fed += sample.feed(end)
            if key in finished and self._driver.finished[key].reason == "error":
                text, _ = self._end(key, "error", sample.failure(outcome.number, end - 1))
                deltas.append(Delta(sample.request, sample.number, None, text, "error"))
                continue
            if kept < 0 or token is None:  # its prompt goes on
                continue
            text, reason = sample.push(token), None
            if sample.text.stopped_by is not None:
                self._driver.stop(key)
                reason = "stop"
            elif key in finished:
                reason = self._driver.finished[key].reason
            if reason is not None:
                rest, output = self._end(key, reason)
                text, reason = text + rest, output.finish_reason
            deltas.append(Delta(sample.request, sample.number, token, text, reason))
        return deltas

    def output(self, request: int, sample: int) -> CompletionOutput | None:
        """What a sample of a request came to, if it has ended; it stays to be taken."""
        return self._groups[request][sample]

    def abort(self, request: int) -> None:
        """End what has not ended of a request."""
        for key in self._keys_of(request):
            if key in self.samples:
                self._driver.abort(key)
                self._end(key, "abort")

    def take(self, request: int) -> list[CompletionOutput]:
        """Remove and return the outputs of a request that has ended."""
        self._keys_of(request)
        outputs = [output for output in self._groups[request] if output is not None]
        if len(outputs) < len(self._groups[request]):
            raise InvalidInputError(f"take: request {request} has not ended. Call step() until it has, or abort() it.")
        del self._groups[request], self._keys[request]
        return outputs

    def _end(self, key: RequestId, reason: str, error: str | None = None) -> tuple[str, CompletionOutput]:
        """Make a sample's output; also the text that was held back."""
        sample, runner = self.samples.pop(key), self._runner
        del runner.sampling[key]
        scores = runner.prompt_scores.pop(key, {})
        rest, output = sample.output(reason, self._driver.take(key), scores, self.timeline.timing(key), error)
        self.timeline.forget(key)
        self._groups[sample.request][sample.number] = output
        return rest, output

    def _keys_of(self, request: int) -> list[str]:
        if request not in self._keys:
            raise InvalidInputError(f"there is no request {show(request)}: never submitted, or taken.")
        return self._keys[request]
