"""What generation hands out: pieces while it runs, whole completions at the end."""

from __future__ import annotations

import dataclasses

from paged.control.timeline import Timing
from paged.engine.runner import Token


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one step added to one sample of a request.

    - `request`: what `submit` returned, or in `stream` the index of the prompt. `sample`: 0 .. n − 1.
    - `token`: the token, None where the request failed instead; `text`: the text that became certain with it.
    - `finish_reason`: at the end, like `CompletionOutput.finish_reason`; None before.
    """

    request: int
    sample: int
    token: Token | None
    text: str
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """What was generated for one sample of one prompt.

    - `request`: index of the prompt in its batch, or what `submit` returned. `sample`: 0 .. n − 1.
    - `prompt_ids`, `token_ids`: fed and generated ids; an end-of-text token is the last of `token_ids`, and so is the
      token that completed a stop string.
    - `text`: what the generated ids add to the prompt's text, without special tokens and before any stop string; ""
      without a tokenizer.
    - `logprobs`: the model's natural-log probability of each generated token. `top_logprobs`: for each the likeliest
      (id, log probability), if asked for.
    - `prompt_logprobs`: the same for each token of the prompt, if asked for, and None for the first, which nothing
      precedes. Only sample 0 has them.
    - `finish_reason`: `"stop"` at an end-of-text token, a stop token or a stop string; `"length"` at `max_tokens` or
      the model's last position; `"abort"`; `"refused"` for a request that can never fit; `"error"` for one whose logits
      were not finite, which then has no `prompt_logprobs`. `error` says why in these two.
    - `stop_reason`: the stop string or the id of the token that ended it.
    - `seed`: that was used; None for a greedy request. `preemptions`: how often it gave way and was computed again;
      `prefix_tokens`: of the prompt, found in the prefix cache.
    - `timing`: seconds of `time.perf_counter`: arrival, first and last token; None if refused.
    """

    request: int
    sample: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[Token | None, ...] | None = None
    finish_reason: str = "refused"
    stop_reason: str | int | None = None
    seed: int | None = None
    preemptions: int = 0
    prefix_tokens: int = 0
    timing: Timing | None = None
    error: str | None = None


Completion = CompletionOutput
"""The name that `Generator` gives it."""


@dataclasses.dataclass(frozen=True)
class BatchProgress:
    """How far a batch is: tokens of prompts that were fed, tokens that were generated, samples that ended."""

    prompt_tokens: int
    generated_tokens: int
    finished: int
    total: int


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A batch that an exception ended: `outputs` of all samples, ended ones whole, the others with `"abort"`.

    As text it names each by its prompt (and sample, after a point), with the tokens that it had.
    """

    outputs: tuple[CompletionOutput, ...]

    def __str__(self) -> str:
        done = [o for o in self.outputs if o.finish_reason in ("stop", "length")]
        lost = [o for o in self.outputs if o.finish_reason == "abort"]
        begun = [o for o in lost if o.token_ids]
        words = f"{len(done)} of {len(self.outputs)} completions are done ({_names(done)}), {len(lost)} are not"
        if lost:
            kept = sum(len(o.token_ids) for o in begun)
            words += (
                f": {len(begun)} had begun, {kept} tokens in all ({_names(begun)}), and {len(lost) - len(begun)} had "
                f"no token yet ({_names([o for o in lost if not o.token_ids], tokens=False)})"
            )
        for reason, what in (("error", "failed"), ("refused", "were refused")):
            if those := [o for o in self.outputs if o.finish_reason == reason]:
                words += f"; {len(those)} {what} ({_names(those, tokens=False)})"
        return words


def _names(outputs: list[CompletionOutput], *, tokens: bool = True) -> str:
    names = [f"{o.request}" if o.sample == 0 else f"{o.request}.{o.sample}" for o in outputs]
    if tokens:
        names = [f"{name}: {len(o.token_ids)} tokens" for name, o in zip(names, outputs)]
    return "none" if not names else "prompt " + ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
