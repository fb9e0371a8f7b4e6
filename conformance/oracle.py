"""The answers a second time: attention in float64, one token and one head after the other (requirement R3).

Shares nothing with `paged.reference` and asks nothing of jax. Each answer comes with a bound on its own error, so that
an element whose float64 value lies too close to a rounding tie is known to be undecided instead of guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator

import numpy as np

from conformance.case import AttendProblem
from conformance.formats import decode

UNIT = 2.0**-53
FUNCTION_ERROR = 8 * UNIT
"""Assumed relative error of numpy's float64 exp, log and tanh: 4 ulp, several times what libraries document."""


@dataclasses.dataclass(frozen=True, eq=False)
class Terms:
    """What one token sees through one query head. Arrays run over the visible positions, in order.

    - `row`, `token`, `head`, `kv_head`: where it is; `position`: the token's own; `first`: the first visible position.
    - `logits`: after scale and soft cap; `logit_error`: bound on the absolute error of this float64 evaluation.
    - `scaled`: after scale, before the cap; `absolute`: scale · Σ |q_i k_i|, which bounds every rounding of q·k.
    - `values` (n, e): decoded and multiplied by the value scale. `sink`: the sink's logit, or None.
    """

    row: int
    token: int
    head: int
    kv_head: int
    position: int
    first: int
    logits: np.ndarray
    logit_error: np.ndarray
    scaled: np.ndarray
    absolute: np.ndarray
    values: np.ndarray
    sink: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """Float64 output (t, h, e) and natural-log LSE (t, h), each with a bound on its absolute error.

    Tokens that see nothing (padding, empty rows) have output 0 and LSE −∞, both without error.
    """

    output: np.ndarray
    output_error: np.ndarray
    lse: np.ndarray
    lse_error: np.ndarray


def _visible(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    """First visible position and one past the last."""
    first = 0 if window is None else max(0, position - window + 1)
    return first, position + 1 if causal else kv_len


def _kv_head(head: int, heads: int, kv_heads: int) -> int:
    return head // (heads // kv_heads)


def _pages(problem: AttendProblem, row: int) -> np.ndarray:
    """Pool rows of the pages of one row, in the order of its tokens."""
    return problem.layer * problem.table.num_pages + problem.table.pages_of(row).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Who sees what. The defaults are the semantics; a diagnosis asks what a backend with another rule would return.

    - `visible`(position, query_len, kv_len, causal=, window=) -> first visible position and one past the last.
    - `key_head`, `value_head`(head, heads, kv_heads) -> KV head. `pages`(problem, row) -> pool rows.
    """

    visible: Callable[..., tuple[int, int]] = _visible
    key_head: Callable[[int, int, int], int] = _kv_head
    value_head: Callable[[int, int, int], int] = _kv_head
    pages: Callable[[AttendProblem, int], np.ndarray] = _pages


SEMANTICS = Rules()


def attend(problem: AttendProblem, rules: Rules = SEMANTICS, only: Container[int] | None = None) -> Answer:
    """The exact attention of `problem`, up to the stated error; with `only`, of those tokens, 0 for the others."""
    tokens, heads = problem.query.shape[:2]
    output = np.zeros((tokens, heads, problem.values.shape[-1]))
    output_error = np.zeros_like(output)
    lse, lse_error = np.full((tokens, heads), -np.inf), np.zeros((tokens, heads))
    for t in terms(problem, rules, only):
        at = t.token, t.head
        output[at], output_error[at], lse[at], lse_error[at] = _softmax_average(t)
    return Answer(output, output_error, lse, lse_error)


def terms(problem: AttendProblem, rules: Rules = SEMANTICS, only: Container[int] | None = None) -> Iterator[Terms]:
    """One `Terms` for every query head of every token that sees at least one position."""
    table, spec = problem.table, problem.spec
    heads, kv_heads = problem.query.shape[1], problem.keys.shape[2]
    key_scale, value_scale = _float32_or_one(problem.key_scale), _float32_or_one(problem.value_scale)
    factor = float(np.float32(spec.scale)) * key_scale  # 24-bit significands: the product is exact
    for row in range(table.num_rows):
        kv_len, first_token = int(table.kv_lens[row]), int(table.query_offsets[row])
        query_len = int(table.query_offsets[row + 1]) - first_token
        if kv_len == 0 or query_len == 0:
            continue
        keys, values = _gather(problem, rules.pages(problem, row), kv_len)
        values = values * value_scale
        for i in range(query_len):
            position = kv_len - query_len + i
            first, end = rules.visible(position, query_len, kv_len, causal=spec.causal, window=spec.window)
            if first >= end or (only is not None and first_token + i not in only):
                continue
            for head in range(heads):
                kv_head = rules.key_head(head, heads, kv_heads)
                query = decode(problem.query[first_token + i, head], problem.dtype)
                seen = keys[first:end, kv_head]
                logits, error, scaled, absolute = _logits(query, seen, factor, spec.soft_cap)
                yield Terms(
                    row=row,
                    token=first_token + i,
                    head=head,
                    kv_head=kv_head,
                    position=position,
                    first=first,
                    logits=logits,
                    logit_error=error,
                    scaled=scaled,
                    absolute=absolute,
                    values=values[first:end, rules.value_head(head, heads, kv_heads)],
                    sink=None if problem.sinks is None else float(problem.sinks[head]),
                )


def _float32_or_one(x: float | None) -> float:
    return 1.0 if x is None else float(np.float32(x))


def _gather(problem: AttendProblem, pages: np.ndarray, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (n, k, ·) of one row in the order of its tokens."""
    size = problem.table.tokens_per_page

    def tokens(words: np.ndarray) -> np.ndarray:
        flat = words[pages].reshape(len(pages) * size, *words.shape[2:])
        return decode(flat[:kv_len], problem.kv_dtype)

    return tokens(problem.keys), tokens(problem.values)


def _logits(
    query: np.ndarray, keys: np.ndarray, factor: float, soft_cap: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, their error, the logits before the cap, and factor · Σ |q k|."""
    scaled = (keys @ query) * factor
    absolute = (np.abs(keys) @ np.abs(query)) * abs(factor)
    # d products and d additions in any order, then one product; the last factor covers the rounding of `absolute`.
    error = (len(query) + 4) * UNIT * absolute * 1.001
    if soft_cap is None:
        return scaled, error, scaled, absolute
    soft_cap = float(np.float32(soft_cap))
    capped = soft_cap * np.tanh(scaled / soft_cap)
    return capped, error + (FUNCTION_ERROR + 4 * UNIT) * np.abs(scaled), scaled, absolute


def _softmax_average(t: Terms) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Output, its error, LSE, its error, of one token under one head."""
    n = len(t.logits)
    top = t.logits.max() if t.sink is None else max(float(t.logits.max()), t.sink)
    weights = np.exp(t.logits - top)
    sink = 0.0 if t.sink is None else float(np.exp(t.sink - top))
    total = weights.sum() + sink
    output = (weights @ t.values) / total

    relative = np.expm1(t.logit_error + UNIT * np.abs(t.logits - top) + FUNCTION_ERROR)
    shares = weights / total
    sink_error = 0.0 if t.sink is None else (UNIT * abs(t.sink - top) + FUNCTION_ERROR) * sink / total
    sums = (n + 4) * UNIT  # n additions in any order, on numerator and total alike
    size = shares @ np.abs(t.values)
    spread = (shares * relative) @ np.abs(t.values - output) + sink_error * np.abs(output)
    slack = 1.0 - (shares @ relative + sink_error + sums)
    error = (spread + sums * (size + np.abs(output))) / slack + 8 * UNIT * size
    error += 2.0**-960 * np.abs(t.values).max(0)  # weights that float64 cannot hold

    lse = float(top + np.log(total))
    lse_error = float(shares @ relative + sink_error + sums) / slack
    lse_error += FUNCTION_ERROR * abs(float(np.log(total))) + 2 * UNIT * (abs(float(top)) + abs(lse)) + UNIT
    return output, error, lse, float(lse_error)
