"""A simple loop that generates greedily: admit what fits for certain, prefill, decode together, release."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paged.backends.protocol import AttentionBackend
from paged.common.checks import check_int
from paged.common.errors import InvalidInputError, PagedError, PoolExhaustedError
from paged.common.page_table import pages_for
from paged.control.page_map import Handle
from paged.engine.runner import Token
from paged.engine.runtime import OnChunk, Runtime
from paged.models import Decoder

OnToken = Callable[[int, Token, str], object]
"""on_token(index of the prompt, token, text that it made certain), as tokens come."""

Prompt = str | Sequence[int] | np.ndarray

_DEFAULT_REQUEST_TOKENS = 1024
_CONTEXT_TOKENS = 8


@runtime_checkable
class TextPieces(Protocol):
    """Text of a sequence that grows token by token."""

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


@runtime_checkable
class TextCodec(Protocol):
    """What the loop needs of a tokenizer; `paged.models.tokenizer.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def stream(self) -> TextPieces:
        """An incremental decoder for one sequence, special tokens left out."""
        ...


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    - `prompt_ids`, `token_ids`: fed and generated ids; an end-of-text token is the last of `token_ids`.
    - `text`: what the generated ids add to the prompt's text, without special tokens; "" without a tokenizer.
    - `logprobs`: natural-log probability of each generated token.
    - `top_logprobs`: for each generated token the likeliest (id, log probability), if the runtime was asked for any.
    - `finish_reason`: `"stop"` at an end-of-text token, `"length"` at `max_tokens` or the model's last position.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: str


@dataclasses.dataclass(eq=False)
class _Request:
    index: int
    prompt: list[int]
    limit: int
    pages: int
    stream: TextPieces | None
    handle: Handle | None = None
    tokens: list[Token] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)
    finish: str | None = None


class Generator:
    """Generates text with one decoder.

    - `model`, `tokenizer`: without a tokenizer, prompts are token ids and texts are empty.
    - `backend` and `options`: those of `Runtime`; by default the pool holds `max_requests` requests of 1024 tokens.

    Requests that fit the pool for certain, with all they may generate, run together; the others wait. So nothing is
    ever preempted, and any number of prompts may be given at once.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextCodec | None = None,
        backend: str | AttentionBackend = "xla",
        **options: Any,
    ):
        if options.get("num_pages") is None and options.get("memory_bytes") is None:
            tokens = min(model.config.max_positions, _DEFAULT_REQUEST_TOKENS)
            pages = pages_for(tokens, options.get("tokens_per_page", 16))
            options["num_pages"] = 1 + options.get("max_requests", 8) * pages
        self.runtime = Runtime(model, backend, **options)
        self.tokenizer = tokenizer

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
        - `on_token`, `on_chunk`: called as tokens come, and after each step of a prefill.

        Every prompt is checked before anything runs. Raises `InvalidInputError` for an empty prompt or one beyond the
        model's positions, `PoolExhaustedError` with the arithmetic for one that the pool can never hold.
        """
        max_tokens = check_int("generate", "max_tokens", max_tokens, minimum=1)
        stop = frozenset(self.runtime.model.config.eos if eos is None else eos)
        requests = [self._request(i, prompt, max_tokens) for i, prompt in enumerate(prompts)]
        free = self.runtime.plane.available_pages
        if short := next((r for r in requests if r.pages > free), None):
            raise PoolExhaustedError(
                f"prompt {short.index} may need {short.pages} pages; {free} of {self.runtime.layout.usable_pages} are "
                f"free, the others are held by requests of this runtime's other users."
            )
        waiting, running = deque(requests), list[_Request]()
        try:
            while waiting or running:
                fresh = self._admit(waiting, running, free)
                handles = [r.handle for r in fresh or running if r.handle is not None]
                step = self.runtime.prefill(handles, on_chunk=on_chunk) if fresh else self.runtime.decode(handles)
                running += fresh
                for request, token in zip(fresh or list(running), step):
                    self._accept(request, token, stop, on_token)
                    if request.finish is not None:
                        running.remove(request)
                        self._release(request)
        finally:
            for request in requests:
                self._release(request)
        return [self._completion(r) for r in requests]

    def _request(self, index: int, prompt: Prompt, max_tokens: int) -> _Request:
        runtime, name = self.runtime, f"prompt {index}"
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidInputError(f"{name} is text, and this generator has no tokenizer. Give token ids.")
            ids: Any = self.tokenizer.encode(prompt) if prompt else []
        else:
            ids = prompt
        # The last token is sampled but never fed, hence one position less.
        tokens = runtime.check_prompt(ids, name=name, more=max_tokens - 1)
        limit = min(max_tokens, runtime.model.config.max_positions - len(tokens) + 1)
        pages = pages_for(len(tokens) + limit - 1, runtime.layout.tokens_per_page)
        return _Request(index, tokens, limit, pages, self._stream(tokens))

    def _stream(self, prompt: list[int]) -> TextPieces | None:
        """A decoder that has seen the prompt's end: at the start of a text some tokenizers drop a leading space."""
        if self.tokenizer is None:
            return None
        stream = self.tokenizer.stream()
        for token in prompt[-_CONTEXT_TOKENS:]:
            stream.push(token)
        return stream

    def _admit(self, waiting: deque[_Request], running: list[_Request], free: int) -> list[_Request]:
        """Open waiting requests, first come first served, as long as rows and all their pages are certain."""
        fresh: list[_Request] = []
        used = sum(r.pages for r in running)
        plane = self.runtime.plane
        while waiting and used + waiting[0].pages <= free and plane.num_open < plane.max_requests:
            request = waiting.popleft()
            request.handle = self.runtime.add(request.prompt)
            used += request.pages
            fresh.append(request)
        if not fresh and not running:
            raise PoolExhaustedError(f"all {plane.max_requests} requests of the runtime are open. Release one.")
        return fresh

    def _accept(self, request: _Request, token: Token, stop: frozenset[int], on_token: OnToken | None) -> None:
        request.tokens.append(token)
        if token.id in stop:
            request.finish = "stop"
        elif len(request.tokens) == request.limit:
            request.finish = "length"
        piece = ""
        if request.stream is not None:
            piece = request.stream.push(token.id) + (request.stream.finish() if request.finish else "")
            request.pieces.append(piece)
        if on_token is not None:
            on_token(request.index, token, piece)

    def _release(self, request: _Request) -> None:
        if request.handle is not None:
            self.runtime.release(request.handle)
            request.handle = None

    def _completion(self, request: _Request) -> Completion:
        if request.finish is None:
            raise PagedError(f"prompt {request.index} did not finish.")
        return Completion(
            prompt_ids=tuple(request.prompt),
            token_ids=tuple(t.id for t in request.tokens),
            text="".join(request.pieces),
            logprobs=tuple(t.logprob for t in request.tokens),
            top_logprobs=tuple(t.top for t in request.tokens if t.top),
            finish_reason=request.finish,
        )
