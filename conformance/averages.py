"""Faults of the sum itself as rules: tokens left out or counted twice, splits merged wrongly, sinks in the wrong place.

Each is a function of one token's `Terms` (what it sees through one head), so a diagnosis asks the oracle once and tries
them all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from conformance.case import AttendProblem
from conformance.oracle import Terms

Rule = Callable[[Terms], tuple[np.ndarray, float]]
"""Output (e,) and natural-log LSE of one token under one head."""
Factor = Callable[[np.ndarray, int, int], np.ndarray]
"""(positions, row length, tokens per page) -> what the weights at those positions are multiplied by."""

TILES = (16, 32, 64, 128, 256)
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Average:
    """A fault of the sum: `hint` names it, `clause` is what it breaks, `text` tells it, `rule` reproduces it."""

    hint: str
    clause: str
    text: str
    rule: Rule


def averages(problem: AttendProblem) -> Iterator[Average]:
    """All that make a difference to this problem's shapes."""
    table = problem.table
    longest, page = int(table.kv_lens.max(initial=0)), table.tokens_per_page
    for text, factor in _left_out(longest, page):
        yield Average("left-out", "pages.3", text, functools.partial(_times, problem, factor))
    for text, factor in _twice(longest, page):
        yield Average("counted-twice", "attend.1", text, functools.partial(_times, problem, factor))
    for tile in dict.fromkeys((*TILES[:4], page)):
        if tile < longest:
            yield from _running(tile)
    for parts in (2, 3, 4, 8):
        for unit in dict.fromkeys((1, 16, page)):
            if longest >= parts * unit:
                yield from _merged(problem, parts, unit)
    if problem.sinks is not None:
        yield from _sinks(problem)
    if problem.spec.soft_cap is not None:
        yield from _caps(float(np.float32(problem.spec.soft_cap)))


def _softmax(logits: np.ndarray, values: np.ndarray, sink: float | None, factor: np.ndarray | float = 1.0):
    top = max(float(logits.max()), -np.inf if sink is None else sink)
    weights = np.exp(logits - top) * factor
    total = float(weights.sum()) + (0.0 if sink is None else float(np.exp(sink - top)))
    with np.errstate(all="ignore"):
        return weights @ values / total if total else np.zeros(values.shape[1]), float(top + np.log(total))


def _times(problem: AttendProblem, factor: Factor, t: Terms) -> tuple[np.ndarray, float]:
    table = problem.table
    at = t.first + np.arange(len(t.logits))
    found = np.asarray(factor(at, int(table.kv_lens[t.row]), table.tokens_per_page), np.float64)
    return _softmax(t.logits, t.values, t.sink, found if found.any() or t.sink is not None else 1.0)


def _left_out(longest: int, page: int) -> Iterator[tuple[str, Factor]]:
    """Which tokens may be left out, in words, and the factors that leave them out."""
    yield "The first token of every row was left out.", lambda j, n, p: j >= 1
    if page > 1:
        yield "The last page of every row was left out.", lambda j, n, p: (j < (n - 1) // p * p) | (n <= p)
        yield "The first page of every row was left out.", lambda j, n, p: (j >= p) | (n <= p)
        yield (
            "A last page that is not full was left out.",
            lambda j, n, p: (j < n // p * p) | (n < p),
        )
        yield (
            "A last page that is full was left out.",
            lambda j, n, p: (j < n - p) | (n % p > 0) | (n <= p),
        )
    for tile in TILES:
        if tile >= longest:
            break
        if tile != page:
            yield f"Tokens that do not fill a tile of {tile} at the end of a row were left out.", _partial(tile)
            yield f"The first {tile} tokens of every row were left out.", _head(tile)
            yield f"The last {tile} tokens of a row that fills tiles of {tile} were left out.", _full(tile)
        yield f"The last token of a row that does not fill a tile of {tile} was left out.", _last_of_partial(tile)
        yield f"The last token of a row that fills tiles of {tile} was left out.", _last_of_full(tile)
        yield f"Only the first {tile} tokens of a row were read.", _only(tile)
        yield f"Only the last {tile} tokens of a row were read.", _only_last(tile)
    for every in (2, 4, 8, 16, 32):
        if every < longest:
            yield f"Every {every}th token was left out.".replace("2th", "2nd"), _every(every, 1)
        if page > 1 and every * page < longest + page:
            yield f"Every {every}th page was left out.".replace("2th", "2nd"), _every(every, page)


def _partial(tile: int) -> Factor:
    return lambda j, n, p: (j < n // tile * tile) | (n < tile)


def _full(tile: int) -> Factor:
    return lambda j, n, p: (j < n - tile) | (n % tile > 0) | (n <= tile)


def _head(tile: int) -> Factor:
    return lambda j, n, p: (j >= tile) | (n <= tile)


def _last_of_partial(tile: int) -> Factor:
    return lambda j, n, p: (j < n - 1) | (n % tile == 0)


def _last_of_full(tile: int) -> Factor:
    return lambda j, n, p: (j < n - 1) | (n % tile > 0)


def _only(tile: int) -> Factor:
    return lambda j, n, p: j < tile


def _only_last(tile: int) -> Factor:
    return lambda j, n, p: j >= n - tile


def _every(every: int, unit: int) -> Factor:
    return lambda j, n, p: j // unit % every != every - 1


def _twice(longest: int, page: int) -> Iterator[tuple[str, Factor]]:
    yield "The last token of every row was counted twice.", lambda j, n, p: 1 + (j == n - 1)
    yield "The first token of every row was counted twice.", lambda j, n, p: 1 + (j == 0)
    for tile in dict.fromkeys((*TILES, page)):
        if 1 < tile < longest:
            yield f"The first token of every tile of {tile} was counted twice.", _first_twice(tile)
            yield f"The first token of every tile of {tile} but the first was counted twice.", _border_twice(tile)
            yield f"The last tile of {tile} was counted twice.", _last_twice(tile)


def _first_twice(tile: int) -> Factor:
    return lambda j, n, p: 1 + (j % tile == 0)


def _border_twice(tile: int) -> Factor:
    return lambda j, n, p: 1 + ((j % tile == 0) & (j > 0))


def _last_twice(tile: int) -> Factor:
    return lambda j, n, p: 1 + (j >= (n - 1) // tile * tile)


def _running(tile: int) -> Iterator[Average]:
    """Online softmax whose running maximum rises, and what is not rescaled then."""
    what = f"when the running maximum rises from one tile of {tile} to the next"
    for hint, text, sum_too, acc_too in (
        ("sum-not-rescaled", f"The row sum is not rescaled {what}.", True, False),
        ("accumulator-not-rescaled", f"The accumulator is not rescaled {what}.", False, True),
        ("running-max", f"Neither row sum nor accumulator is rescaled {what}.", True, True),
    ):
        yield Average(hint, "attend.1", text, functools.partial(_unscaled, tile, sum_too, acc_too))


def _unscaled(tile: int, sum_too: bool, acc_too: bool, t: Terms) -> tuple[np.ndarray, float]:
    at = (t.first + np.arange(len(t.logits))) // tile
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    running = np.maximum.accumulate(np.maximum.reduceat(t.logits, starts))
    own = np.repeat(running, np.diff(np.append(starts, len(at))))
    top = float(running[-1])
    right, raw = np.exp(t.logits - top), np.exp(t.logits - own)
    total = float((raw if sum_too else right).sum()) + (0.0 if t.sink is None else float(np.exp(t.sink - top)))
    return (raw if acc_too else right) @ t.values / total, float(top + np.log(total))


def _merged(problem: AttendProblem, parts: int, unit: int) -> Iterator[Average]:
    where = f"{parts} splits of a row" + (f", cut at multiples of {unit}" if unit > 1 else "")
    for hint, text, power in (
        ("merge-not-rescaled", f"The states of {where} are merged without rescaling to one maximum.", 1),
        ("merge-inverse", f"The states of {where} are rescaled by the inverse factor when they are merged.", 2),
    ):
        yield Average(hint, "attend.1", text, functools.partial(_split, problem, parts, unit, power))
    mean = f"The results of {where} are merged without their weights."
    yield Average("merge-unweighted", "attend.1", mean, functools.partial(_split, problem, parts, unit, 0))


def _split(problem: AttendProblem, parts: int, unit: int, power: int, t: Terms) -> tuple[np.ndarray, float]:
    units = -(-int(problem.table.kv_lens[t.row]) // unit)
    cuts = np.arange(parts) * -(-units // parts) * unit
    index = np.searchsorted(cuts, t.first + np.arange(len(t.logits)), side="right") - 1
    starts = np.flatnonzero(np.diff(index, prepend=-1))
    own = np.repeat(np.maximum.reduceat(t.logits, starts), np.diff(np.append(starts, len(index))))
    top = float(t.logits.max()) if t.sink is None else max(float(t.logits.max()), t.sink)
    if power:
        return _softmax(t.logits, t.values, t.sink, np.exp(np.minimum(power * (top - own), 80.0)))
    weights = np.exp(t.logits - own)
    sums = np.repeat(np.add.reduceat(weights, starts), np.diff(np.append(starts, len(index))))
    return (weights / sums) @ t.values / len(starts), _softmax(t.logits, t.values, t.sink)[1]


def _sinks(problem: AttendProblem) -> Iterator[Average]:
    def rescaled(t: Terms) -> tuple[np.ndarray, float]:
        out, lse = _softmax(t.logits, t.values, t.sink)
        sink = -np.inf if t.sink is None else t.sink
        return out * np.exp(max(0.0, sink - float(t.logits.max()))), lse

    def numerator(at: int) -> Rule:
        def rule(t: Terms) -> tuple[np.ndarray, float]:
            out, lse = _softmax(t.logits, t.values, t.sink)
            return out + (0.0 if t.sink is None else np.exp(t.sink - lse)) * t.values[at], lse

        return rule

    text = "The accumulator is not rescaled where a sink is above every logit."
    yield Average("sink-not-rescaled", "attend.1", text, rescaled)
    text = "The sink has a value: its weight times the {} visible token's value is in the sum."
    yield Average("sink-in-numerator", "attend.1", text.format("first"), numerator(0))
    yield Average("sink-in-numerator", "attend.1", text.format("last"), numerator(-1))


def _caps(cap: float) -> Iterator[Average]:
    def rule(tanh: Callable[[np.ndarray], np.ndarray], t: Terms) -> tuple[np.ndarray, float]:
        return _softmax(cap * tanh(t.scaled / cap), t.values, t.sink)

    def rational(x: np.ndarray) -> np.ndarray:
        x = np.clip(x, -3, 3)
        return x * (27 + x * x) / (27 + 9 * x * x)

    for text, tanh in (
        ("The soft cap's tanh is a rational approximation, x (27 + x²) / (27 + 9 x²), too coarse.", rational),
        ("The soft cap clips logits instead of bending them by tanh.", lambda x: np.clip(x, -1, 1)),
        ("The soft cap is x / (1 + |x|) and not tanh.", lambda x: x / (1 + np.abs(x))),
    ):
        yield Average("soft-cap-tanh", "attend.5", text, functools.partial(rule, tanh))
