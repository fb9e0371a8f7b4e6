"""One sample of a request while it runs, and what it comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paged.control import Result
from paged.control.timeline import Timing
from paged.engine.outputs import CompletionOutput
from paged.engine.params import GREEDY, SamplingParams
from paged.engine.request_sampling import RequestSampling
from paged.engine.runner import Token
from paged.engine.text import StopText


@dataclasses.dataclass(eq=False)
class LiveSample:
    """A sample that has not ended: `tokens` so far, its `text`, and how much of its prompt was `fed`.

    `ends`: ids that end it. `number`: 0 .. n − 1 of `request`; `name`: what messages call its prompt.
    """

    request: int
    number: int
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    sampling: RequestSampling
    text: StopText
    ends: frozenset[int]
    tokens: list[Token] = dataclasses.field(default_factory=list)
    fed: int = 0

    def feed(self, end: int) -> int:
        """A step left the sample with `end` cached tokens; how many more of its prompt than ever before."""
        more = max(0, min(end, len(self.prompt)) - self.fed)
        self.fed += more
        return more

    def push(self, token: Token) -> str:
        """One more token; the text that it makes certain."""
        self.tokens.append(token)
        return self.text.push(token.id)

    def failure(self, step: int, position: int) -> str:
        """What is wrong with a sample whose logits at `position` were not finite in a step."""
        sample = f", sample {self.number}" if self.params.n > 1 else ""
        return (
            f"{self.name}{sample}: the log probability of its token {len(self.tokens)} (position {position + 1}, step "
            f"{step}) is NaN, so its logits are not finite: a weight that its tokens read is not, or the dtype "
            f"overflowed. Try float32, and check the weights."
        )

    def output(
        self, reason: str, result: Result, scores: Mapping[int, Token], timing: Timing, error: str | None = None
    ) -> tuple[str, CompletionOutput]:
        """The sample ends: the text that was held back until now, and the whole."""
        rest, params = self.text.finish(), self.params
        why: str | int | None = self.text.stopped_by
        if why is not None and reason == "length":  # a stop string that only the end made certain
            reason = "stop"
        if why is None and reason == "stop" and self.tokens and self.tokens[-1].id in self.ends:
            why = self.tokens[-1].id
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not self.number and error is None:
            prompt_logprobs = tuple(scores.get(i) for i in range(len(self.prompt)))
        return rest, CompletionOutput(
            request=self.request,
            sample=self.number,
            prompt_ids=self.prompt,
            token_ids=tuple(token.id for token in self.tokens),
            text=self.text.text,
            logprobs=tuple(token.logprob for token in self.tokens),
            top_logprobs=tuple(token.top for token in self.tokens) if params.logprobs else (),
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=why,
            seed=None if params.level == GREEDY else self.sampling.seed,
            preemptions=result.preemptions,
            prefix_tokens=result.prefix_tokens,
            timing=timing,
            error=error,
        )
