"""How long a step takes, as a linear model of what is in it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paged.common.checks import check_number, per_field, show
from paged.common.errors import InvalidInputError
from paged.common.page_table import PageTable
from paged.control.outcome import StepOutcome

_TERMS = ("step_s", "prefill_token_s", "decode_row_s", "kv_token_s")
_MEASURED = ("prefill_tokens", "decode_rows", "kv_tokens", "seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of one step on the device: step_s + prefill tokens × prefill_token_s + decode rows × decode_row_s + KV
    tokens × kv_token_s, and host_s seconds of the host beside it.

    A row of one new token counts as a decode row; KV tokens are what the rows attend to, their own included. The
    defaults are round numbers for trying a schedule, measured nowhere. Raises `InvalidInputError` naming a coefficient
    that is negative or not finite.
    """

    step_s: float = 5e-3
    prefill_token_s: float = 2e-5
    decode_row_s: float = 2e-5
    kv_token_s: float = 1e-8
    host_s: float = 0.0

    def __post_init__(self) -> None:
        per_field(check_number, self, *(field.name for field in dataclasses.fields(self)))
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) < 0:
                raise InvalidInputError(f"CostModel.{field.name} must not be negative, got {value}.")

    def seconds(self, table: PageTable, rows: int) -> float:
        """Device seconds of a step whose first `rows` rows are real."""
        offsets = table.query_offsets
        decode_rows = int(np.count_nonzero(offsets[1 : rows + 1] - offsets[:rows] == 1))
        prefill_tokens = int(offsets[rows]) - decode_rows
        kv_tokens = int(np.add.reduce(table.kv_lens, dtype=np.int64))
        return (
            self.step_s
            + prefill_tokens * self.prefill_token_s
            + decode_rows * self.decode_row_s
            + kv_tokens * self.kv_token_s
        )

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """From `{"coefficients": {"step_s": …, …}}` or `{"samples": [{"prefill_tokens": …, "decode_rows": …,
        "kv_tokens": …, "seconds": …}, …]}`, which are fitted; either may have a `"host_s"` beside it.

        Raises `InvalidInputError` naming the key or the sample and the value.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"CostModel.from_json: not JSON ({error}).") from None
        if not isinstance(data, dict) or ("coefficients" in data) == ("samples" in data):
            raise InvalidInputError(
                "CostModel.from_json needs an object with 'coefficients' or 'samples', one of them."
            )
        _refuse_unknown("CostModel.from_json", data, ("coefficients", "samples", "host_s"))
        host_s = check_number("CostModel", "host_s", data.get("host_s", 0.0))
        if "samples" in data:
            return dataclasses.replace(cls.fit(data["samples"]), host_s=host_s)
        _refuse_unknown("CostModel.from_json.coefficients", data["coefficients"], _TERMS)
        given = {key: check_number("CostModel", key, value) for key, value in data["coefficients"].items()}
        return cls(**dict.fromkeys(_TERMS, 0.0) | given, host_s=host_s)

    @classmethod
    def fit(cls, samples: Sequence[Mapping[str, Any]]) -> CostModel:
        """The model with coefficients ≥ 0 whose relative errors on measured steps have the least sum of squares.

        Raises `InvalidInputError` for fewer than four samples or one that lacks a value.
        """
        if not isinstance(samples, (list, tuple)) or len(samples) < len(_TERMS):
            raise InvalidInputError(
                f"CostModel.fit: {len(_TERMS)} coefficients need at least as many samples, got {show(samples)}."
            )
        rows = np.array([_measured(i, sample) for i, sample in enumerate(samples)])
        seconds = rows[:, 3]
        terms = np.column_stack([np.ones(len(rows)), rows[:, :3]]) / seconds[:, None]
        best, least = np.zeros(len(_TERMS)), np.inf
        # Least squares under "none negative": some terms are zero and the others free. Four terms are 15 choices.
        for used in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(1, 5)):
            found = np.linalg.lstsq(terms[:, used], np.ones(len(rows)), rcond=None)[0]
            error = float(((terms[:, used] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(len(_TERMS)), error
                best[list(used)] = found
        return cls(**dict(zip(_TERMS, best.tolist())))


def sample_of(outcome: StepOutcome, seconds: float) -> dict[str, float]:
    """A sample for `CostModel.fit`: what a step was made of, and how long it took."""
    decode = float(np.count_nonzero(outcome.query_lens == 1))
    return {
        "prefill_tokens": float(outcome.query_lens.sum()) - decode,
        "decode_rows": decode,
        "kv_tokens": float((outcome.cached + outcome.query_lens).sum()),
        "seconds": seconds,
    }


def _measured(index: int, sample: object) -> list[float]:
    where = f"CostModel.fit: sample {index}"
    if not isinstance(sample, dict) or sample.keys() != set(_MEASURED):
        raise InvalidInputError(f"{where} must have exactly the keys {', '.join(_MEASURED)}; got {show(sample)}.")
    values = [check_number(where, key, sample[key], positive=key == "seconds") for key in _MEASURED]
    if min(values) < 0:
        raise InvalidInputError(f"{where} has a negative value: {show(sample)}.")
    return values


def _refuse_unknown(where: str, data: object, known: Sequence[str]) -> None:
    if not isinstance(data, dict) or not data.keys() <= set(known):
        raise InvalidInputError(f"{where} may have the keys {', '.join(known)}; got {show(data)}.")
