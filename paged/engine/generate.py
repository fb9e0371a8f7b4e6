"""Greedy generation in one call: `OfflineEngine` for those who want nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paged.backends.protocol import AttentionBackend
from paged.common.checks import check_int
from paged.engine.intake import Prompt
from paged.engine.offline import OfflineEngine
from paged.engine.outputs import BatchProgress, Completion, Delta
from paged.engine.params import SamplingParams
from paged.engine.runner import Token
from paged.engine.runtime import OnChunk
from paged.engine.text import TextCodec
from paged.models import Decoder

OnToken = Callable[[int, Token, str], object]
"""on_token(index of the prompt, token, text that it made certain), as tokens come."""


class Generator:
    """Generates text greedily with one decoder; a face of `OfflineEngine`, which does the work.

    - `model`, `tokenizer`, `backend`, `options`: those of `OfflineEngine`. `num_top`: likeliest tokens to report beside
      each.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextCodec | None = None,
        backend: str | AttentionBackend = "xla",
        *,
        num_top: int = 0,
        **options: Any,
    ):
        self.engine = OfflineEngine(model, tokenizer, backend, max_logprobs=num_top, **options)
        self.runtime = self.engine.runtime
        self.tokenizer = tokenizer
        self._num_top = num_top

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 16,
        eos: Iterable[int] | None = None,
        on_token: OnToken | None = None,
        on_chunk: OnChunk | None = None,
    ) -> list[Completion]:
        """Continue each prompt greedily by at most `max_tokens` tokens; completions in the order of the prompts.

        - `eos`: ids that end a text; by default the model's own, and `()` ignores them.
        - `on_token`, `on_chunk`: called as tokens come, and after each step while prompts are fed.

        Every prompt is checked before anything runs. Raises `InvalidInputError` for an empty prompt or a token outside
        the vocabulary, `PoolExhaustedError` with the arithmetic for one beyond the model or the pool.
        """
        params = SamplingParams(
            max_tokens=check_int("generate", "max_tokens", max_tokens, minimum=1),
            ignore_eos=eos is not None,
            stop_token_ids=tuple(eos or ()),
            logprobs=self._num_top,
        )
        total = self.engine.check(prompts, params)
        reported = 0

        def on_step(progress: BatchProgress) -> None:
            nonlocal reported
            if on_chunk is not None and progress.prompt_tokens > reported:
                reported = progress.prompt_tokens
                on_chunk(reported, total)

        def on_delta(delta: Delta) -> None:
            if on_token is not None and delta.token is not None:
                on_token(delta.request, delta.token, delta.text)

        return self.engine.batch_inference(prompts, params, on_delta=on_delta, on_step=on_step)
