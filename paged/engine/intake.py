"""Prompts and parameters as users give them: checked before anything runs, each error naming the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged.common.checks import show
from paged.common.errors import InvalidInputError, PoolExhaustedError
from paged.engine.params import SamplingParams
from paged.engine.request_sampling import RequestSampling
from paged.engine.runtime import Runtime
from paged.engine.text import TextCodec

Prompt = str | Sequence[int] | np.ndarray
Params = SamplingParams | Sequence[SamplingParams] | None


class Checked(NamedTuple):
    """A prompt whose values are right. `error` says why it can never fit, if so."""

    ids: tuple[int, ...]
    params: SamplingParams
    error: str | None


class Intake:
    """What a runtime and a tokenizer can take."""

    def __init__(self, runtime: Runtime, tokenizer: TextCodec | None):
        self._runtime = runtime
        self._tokenizer = tokenizer

    def batch(self, prompts: Sequence[Prompt], params: Params) -> list[Checked]:
        """All prompts, with parameters for all or for each. Raises `InvalidInputError` for the first that is wrong."""
        if isinstance(prompts, str):
            raise InvalidInputError("prompts must be a sequence of prompts, got one text. Put it into a list.")
        if params is None or isinstance(params, SamplingParams):
            params = [SamplingParams() if params is None else params] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidInputError(f"{len(prompts)} prompts and {len(params)} SamplingParams; give one for each.")
        return [self._checked(prompt, one, f"prompt {i}") for i, (prompt, one) in enumerate(zip(prompts, params))]

    def _checked(self, prompt: Prompt, params: SamplingParams, name: str) -> Checked:
        params = self.params(params, name)
        ids = self.ids(prompt, name)
        self.sampling(params, len(ids), name)
        try:
            self.limit(ids, params, name)
        except PoolExhaustedError as refused:
            return Checked(ids, params, str(refused))
        return Checked(ids, params, None)

    def params(self, params: object, name: str) -> SamplingParams:
        """Those given, or greedy ones."""
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidInputError(f"{name}: params must be SamplingParams, got {show(params)}.")
        return SamplingParams() if params is None else params

    def tenant(self, tenant: object, name: str) -> str | None:
        """With whom prefixes are shared, if they are; refused in any case if it is no name."""
        if tenant is not None and not isinstance(tenant, str):
            raise InvalidInputError(f"{name}: tenant must be a str or None, got {show(tenant)}.")
        return tenant

    def ids(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        """Token ids of a text or of ids."""
        if not isinstance(prompt, str):
            return tuple(self._runtime.check_ids(prompt, name=name))
        if self._tokenizer is None:
            raise InvalidInputError(f"{name} is text, and this engine has no tokenizer. Give token ids.")
        return tuple(self._runtime.check_ids(self._tokenizer.encode(prompt) if prompt else [], name=name))

    def limit(self, ids: tuple[int, ...], params: SamplingParams, name: str) -> int:
        """Tokens to generate at most. Raises `PoolExhaustedError` if the prompt and they can never fit."""
        runtime, positions = self._runtime, self._runtime.model.config.max_positions
        if len(ids) > positions:
            raise PoolExhaustedError(
                f"{name} has {len(ids)} tokens; the model has positions for {positions} (max_positions). Shorten it by "
                f"{len(ids) - positions}."
            )
        limit = min(params.max_tokens, positions - len(ids) + 1)  # the last token is sampled and never fed
        runtime.check_prompt(ids, name=name, more=limit - 1)
        if len(ids) + limit - 1 > runtime.max_tokens:
            raise PoolExhaustedError(
                f"{name}: {len(ids)} tokens and {limit - 1} to cache beside them are more than the "
                f"{runtime.max_tokens} that a request may have (max_request_tokens)."
            )
        return limit

    def sampling(
        self, params: SamplingParams, num_prompt: int, name: str, *, seed: int | None = None, sample: int = 0
    ) -> RequestSampling:
        """What the runner wants to know of a sample."""
        if params.stop and self._tokenizer is None:
            raise InvalidInputError(f"{name}: SamplingParams.stop is {show(params.stop)}, and there is no tokenizer.")
        return self._runtime.sampling(params, num_prompt, seed=seed, sample=sample, name=name)
