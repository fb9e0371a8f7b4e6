"""What a request asks of sampling, and the words in which the host sends it to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paged.common.checks import check_bool, check_int, check_number, show
from paged.common.errors import InvalidInputError

MAX_SEED = 2**64 - 1
NUM_WORDS = 7
"""Words of one row: seed low, seed high, sample, top_k, and the bits of temperature, top_p and min_p."""

GREEDY, RANDOM, FILTERED = range(3)
"""How much a step's program does to choose a token; each level can do what those below it do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and what is reported beside them.

    - `max_tokens`: tokens to generate at most, at least 1; fewer where the model's positions end.
    - `temperature`: 0 takes the likeliest token, of equal ones that with the lowest id; otherwise logits are divided by
      it, and the three filters act on that distribution:
    - `top_k`: only the k likeliest tokens; 0 keeps all. `top_p`, in (0, 1]: of those, renormalised, only the likeliest
      ones that together reach p. `min_p`, in 0 .. 1: only tokens at least min_p times as likely as the likeliest. The
      likeliest token always stays. Tokens are ranked by logit, then by lower id.
    - `seed`: 0 .. 2⁶⁴ − 1. A draw depends on the seed, the sample's number, the token's position and its id, and on
      nothing else. None draws a fresh seed, which the output tells.
    - `n`: samples of the prompt; they share its pages.
    - `stop`: strings that end the text; the text is cut before the first of them, wherever tokens begin and end.
      `stop_token_ids` end it like the model's own ends, and `ignore_eos` goes on past those.
    - `logprobs`: likeliest tokens to report beside each token, whose own log probability is always there.
      `prompt_logprobs`: the same for the prompt's tokens; None reports nothing for them. Log probabilities are those
      of the model, before temperature and filters.

    Raises `InvalidInputError` naming the field and the value.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__

        def put(field: str, value: object) -> None:
            object.__setattr__(self, field, value)

        put("max_tokens", check_int(owner, "max_tokens", self.max_tokens, minimum=1))
        for field in ("temperature", "top_p", "min_p"):
            put(field, check_number(owner, field, getattr(self, field), float32=True))
        if self.temperature < 0:
            raise InvalidInputError(f"{owner}.temperature must be 0 or more, got {self.temperature!r}.")
        if not 0 < self.top_p <= 1:
            raise InvalidInputError(f"{owner}.top_p must be above 0 and at most 1, got {self.top_p!r}.")
        if not 0 <= self.min_p <= 1:
            raise InvalidInputError(f"{owner}.min_p must be in 0 .. 1, got {self.min_p!r}.")
        put("top_k", check_int(owner, "top_k", self.top_k, minimum=0))
        if self.seed is not None:
            put("seed", check_int(owner, "seed", self.seed, minimum=0, maximum=MAX_SEED))
        put("n", check_int(owner, "n", self.n, minimum=1, maximum=1 << 16))
        put("stop", _strings(owner, self.stop))
        put("stop_token_ids", _ids(owner, self.stop_token_ids))
        put("ignore_eos", check_bool(owner, "ignore_eos", self.ignore_eos))
        put("logprobs", check_int(owner, "logprobs", self.logprobs, minimum=0))
        if self.prompt_logprobs is not None:
            put("prompt_logprobs", check_int(owner, "prompt_logprobs", self.prompt_logprobs, minimum=0))

    @property
    def level(self) -> int:
        """`GREEDY`, `RANDOM` or `FILTERED`: what a program needs to be able to do for this request."""
        if self.temperature == 0:
            return GREEDY
        return FILTERED if self.top_k or self.top_p < 1 or self.min_p else RANDOM

    @property
    def num_top(self) -> int:
        """Likeliest tokens that a program needs to report for this request."""
        return max(self.logprobs, self.prompt_logprobs or 0)

    def words(self, seed: int, sample: int) -> np.ndarray:
        """(`NUM_WORDS`,) int32: this row's part of what the host sends in a step."""
        out = np.empty(NUM_WORDS, np.int32)
        out[:2] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
        out[2:4] = sample, self.top_k
        out[4:] = np.array([self.temperature, self.top_p, self.min_p], np.float32).view(np.int32)
        return out


def _strings(owner: str, stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (tuple, list)):
        raise InvalidInputError(f"{owner}.stop must be a string or a sequence of them, got {show(stop)}.")
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise InvalidInputError(f"{owner}.stop must hold non-empty strings: entry {i} is {show(string)}.")
    return tuple(str(string) for string in strings)


def _ids(owner: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, (tuple, list, set, frozenset)):
        raise InvalidInputError(f"{owner}.stop_token_ids must be a sequence of token ids, got {show(ids)}.")
    return tuple(check_int(owner, "stop_token_ids", i, minimum=0) for i in ids)
