"""The one place that turns reserved slices into what a step feeds to the model (requirement E1). Numpy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from paged.common.checks import check_int32_vector, refuse_rows
from paged.common.errors import InvalidInputError
from paged.common.page_table import PageTable

_OWNER = "step_inputs"


@runtime_checkable
class TokenSlice(Protocol):
    """Tokens `start` .. `start + num_tokens − 1` of one request; `paged.control.Slice` is one."""

    @property
    def start(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


@dataclasses.dataclass(frozen=True, eq=False)
class StepInputs:
    """What one step feeds, padded to its page table's shapes; int32 except `samples`.

    - `tokens` (tokens,): token ids, slice after slice; 0 where padded.
    - `positions` (tokens,): absolute positions in the request, start .. start + num_tokens − 1; 0 where padded.
    - `segment_ids` (tokens,): the row that a token belongs to; −1 where padded.
    - `sample_indices` (rows,): index into `tokens` of the row's last token; 0 for rows that do not sample.
    - `samples` (rows,) bool: rows whose slice reaches the end of what is known of the request, so that its last
      token's logits decide the next one. A chunk that stops earlier samples nothing.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    sample_indices: np.ndarray
    samples: np.ndarray


def build_step_inputs(
    slices: Sequence[TokenSlice], known: Sequence[np.ndarray | Sequence[int]], table: PageTable
) -> StepInputs:
    """Inputs of a step whose row i is `slices[i]` of the request with the tokens `known[i]` (prompt and generated).

    A prefill starts at the tokens already cached, a decode at prompt + generated − 1: both are slices, and nothing here
    asks which one it is (scenario H13). `table` is the step's page table, padded or not.

    Raises `InvalidInputError` naming the row if a slice goes past the known tokens or disagrees with the table.
    """
    if len(known) != len(slices) or len(slices) > table.num_rows:
        raise InvalidInputError(
            f"{_OWNER}: {len(slices)} slices, {len(known)} token lists and {table.num_rows} table rows; give one token "
            f"list for each slice, and at most as many slices as rows."
        )
    start = check_int32_vector(_OWNER, "start", [s.start for s in slices])
    count = check_int32_vector(_OWNER, "num_tokens", [s.num_tokens for s in slices])
    length = check_int32_vector(_OWNER, "known tokens", [len(k) for k in known])
    end = start + count
    refuse_rows(_OWNER, "start", start, start < 0, "must not be negative")
    refuse_rows(_OWNER, "num_tokens", count, count < 1, "must be at least 1")
    refuse_rows(_OWNER, "start + num_tokens", end, end > length, "goes past the known tokens")
    rows = len(slices)
    # The attention's masks come from the table and the rotary angles from here: they have to agree.
    query, kv = table.query_lens[:rows], table.kv_lens[:rows]
    refuse_rows(_OWNER, "page table's query lengths", query, query != count, "disagree with num_tokens")
    refuse_rows(_OWNER, "page table's kv_lens", kv, kv != end, "disagree with start + num_tokens")

    first = table.query_offsets[:rows]
    total = int(count.sum())
    segment_ids = np.full(table.num_tokens, -1, np.int32)
    segment_ids[:total] = np.repeat(np.arange(rows, dtype=np.int32), count)
    row = segment_ids[:total]
    positions = np.zeros(table.num_tokens, np.int32)
    positions[:total] = np.arange(total, dtype=np.int32) - first[row] + start[row]
    tokens = np.zeros(table.num_tokens, np.int32)
    for one, k, a, b in zip(first, known, start, end):
        tokens[one : one + b - a] = k[a:b]
    samples = np.zeros(table.num_rows, np.bool_)
    samples[:rows] = end == length
    sample_indices = np.zeros(table.num_rows, np.int32)
    sample_indices[:rows] = np.where(samples[:rows], first + count - 1, 0)
    return StepInputs(tokens, positions, segment_ids, sample_indices, samples)
