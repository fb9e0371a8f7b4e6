"""How the tokens of one request are chosen, in the form in which a runner wants to know it."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

import numpy as np

from paged.common.checks import check_int
from paged.common.errors import InvalidInputError
from paged.engine.params import GREEDY, NUM_WORDS, SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class RequestSampling:
    """A request's parameters, and what a step's host sends for it.

    - `seed`: the one that is used. `num_prompt`: tokens of its prompt, whose scores are wanted if
      `params.prompt_logprobs` is not None.
    """

    params: SamplingParams
    words: np.ndarray
    seed: int
    num_prompt: int

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        num_prompt: int,
        *,
        seed: int | None,
        sample: int,
        vocabulary: int,
        most_top: int,
        name: str,
    ) -> RequestSampling:
        """That of sample number `sample`; `seed` is used where the parameters have none, by default a fresh one.

        Raises `InvalidInputError` for `name`, naming the field, for more than `most_top` log probabilities and for ids
        outside the vocabulary.
        """
        for field in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, field) or 0) > most_top:
                raise InvalidInputError(
                    f"{name}: SamplingParams.{field} is {asked}; this runtime reports at most {most_top} likeliest "
                    f"tokens. Ask for fewer, or build it with num_top={asked} (max_logprobs of an engine)."
                )
        for token in params.stop_token_ids:
            check_int(name, "stop_token_ids", token, minimum=0, maximum=vocabulary - 1)
        if params.seed is not None:
            seed = params.seed
        elif seed is None:
            seed = secrets.randbits(64)
        return cls(params, params.words(seed, sample), seed, num_prompt)


class BatchSampling:
    """What the requests of one step ask for together. Rows without an entry are greedy, with `default_top` likeliest
    tokens.

    - `level`: what the program needs to be able to do. `num_top`: likeliest tokens by row. `words`: of all rows.
    - `scored`: rows whose prompts' scores are wanted.
    """

    def __init__(self, asked: Sequence[RequestSampling | None], default_top: int):
        self.asked = asked
        # Of those that do not sample yet, too: fewer programs.
        self.level = max((one.params.level for one in asked if one is not None), default=GREEDY)
        self.num_top = [default_top if one is None else one.params.logprobs for one in asked]
        self.words = np.zeros((len(asked), NUM_WORDS), np.int32)
        for row, one in enumerate(asked):
            if one is not None:
                self.words[row] = one.words
        self.scored = [i for i, one in enumerate(asked) if one is not None and one.params.prompt_logprobs is not None]
