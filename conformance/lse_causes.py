"""Why an LSE is wrong where the output is right: which rule would have returned it?

Three kinds: an LSE made from the right weights by the wrong formula, the LSE of a known fault that the output does not
have, and a fault of the sum that this case's output cannot show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from conformance.averages import LOG2E
from conformance.case import AttendProblem
from conformance.formats import decode
from conformance.hypotheses import EXPLAINED, Hypothesis, answer_of, hypotheses
from conformance.oracle import Terms, terms

GAIN = 0.1
"""Share of the right LSE's distance that an explanation may still have."""
NEAR = 2.0**-9


def explain_lse(problem: AttendProblem, output: np.ndarray, lse: np.ndarray, wrong: np.ndarray) -> Hypothesis | None:
    """The best explanation of the LSEs (t, h) that are `wrong`; its clause is attend.11 unless the output, right as it
    is, agrees with that of the fault too."""
    live = problem.table.positions() >= 0
    struck = wrong.any(1)
    only = np.concatenate([np.flatnonzero(struck & live)[:8], np.flatnonzero(~struck & live)[:8]]).tolist()
    seen = list(terms(problem, only=only))
    if not seen:
        return None
    at = tuple(np.array([(t.token, t.head) for t in seen]).T)
    got, bad = lse[at].astype(np.float64), wrong[at]
    right = np.array([_lse(t, t.logits, t.sink) for t in seen])
    best, least = None, GAIN * _distance(got, right)[bad].mean()
    for text, rule in _formulas(problem):
        found = _fits(got, np.array([rule(t) for t in seen]), bad)
        if found is not None and found < least:
            best, least = Hypothesis("lse", "attend.11", text, problem), found
    for one in hypotheses(problem):
        with np.errstate(all="ignore"):
            try:
                answer = answer_of(problem, one, seen, only)
            except (IndexError, ValueError):
                continue
            found = _fits(got, answer.lse[at], bad)
        if found is None or found >= least:
            continue
        mine, theirs = decode(output[at], problem.dtype)[bad], answer.output[at][bad]
        shared = np.abs(mine - theirs) <= NEAR * (np.abs(mine) + np.abs(theirs)) + 1e-30
        text = one.text.replace("The output is that of", "it is that of")
        if shared.mean() < EXPLAINED:
            one = dataclasses.replace(one, clause="attend.11", hint="lse", text=f"In the LSE alone: {text}")
        best, least = one, found
    return best


def _distance(got: np.ndarray, answer: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.minimum(np.nan_to_num(np.abs(got - answer), nan=1e6, posinf=1e6), 1e6)


def _fits(got: np.ndarray, answer: np.ndarray, bad: np.ndarray) -> float | None:
    """Distance of wrong LSEs to an explanation's; None if it leaves too many of them unexplained."""
    off = _distance(got, answer)
    near = off <= NEAR * (1 + np.abs(got))
    return float(off[bad].mean()) if near[bad].mean() > EXPLAINED else None


def _lse(t: Terms, logits: np.ndarray, sink: float | None) -> float:
    top, total = _state(logits, sink)
    return top + float(np.log(total))


def _state(logits: np.ndarray, sink: float | None) -> tuple[float, float]:
    top = float(logits.max()) if sink is None else max(float(logits.max()), sink)
    return top, float(np.exp(logits - top).sum()) + (0.0 if sink is None else float(np.exp(sink - top)))


def _formulas(problem: AttendProblem) -> Iterator[tuple[str, Callable[[Terms], float]]]:
    """Wrong formulas over the right weights, in words."""
    scale = float(np.float32(problem.spec.scale))

    def of(t: Terms) -> tuple[float, float]:
        return _state(t.logits, t.sink)

    yield "It is the maximum alone: ln of the row sum was not added.", lambda t: of(t)[0]
    yield "It is ln of the row sum alone: the maximum was not added.", lambda t: float(np.log(of(t)[1]))
    yield "Its maximum is in base 2 and its row sum natural.", lambda t: of(t)[0] * LOG2E + float(np.log(of(t)[1]))
    yield "Its row sum is in base 2 and its maximum natural.", lambda t: of(t)[0] + float(np.log2(of(t)[1]))
    yield "It is divided by log2 e: ln 2 was applied twice.", lambda t: (of(t)[0] + float(np.log(of(t)[1]))) / LOG2E
    yield "It is the row sum, no logarithm of it.", lambda t: float(np.exp(min(of(t)[0], 80.0))) * of(t)[1]
    if scale != 1.0:
        yield "It lacks the scale: it is that of q·k.", lambda t: _lse(t, t.scaled / scale, t.sink)
        yield "It is multiplied by the scale.", lambda t: _lse(t, t.logits, t.sink) * scale
        yield (
            "Its maximum lacks the scale, its row sum has it.",
            lambda t: float(t.scaled.max()) / scale + float(np.log(of(t)[1])),
        )
    if problem.spec.soft_cap is not None:
        yield "It is that of the logits before the soft cap.", lambda t: _lse(t, t.scaled, t.sink)
    if problem.sinks is not None:
        yield "It lacks the sink's term.", lambda t: _lse(t, t.logits, None)
        yield (
            "It has the sink's term twice.",
            lambda t: _lse(t, t.logits, None if t.sink is None else t.sink + float(np.log(2))),
        )
