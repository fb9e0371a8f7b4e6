"""How far an honest kernel may be from the exact answer: certified rounding.

For one output element with exact weights w_j, o = Σ w_j v_j, S = Σ w_j |v_j|, u = 2^-24, a kernel with float32
accumulation commits

- a_j: error of logit j and of its exponential, relative to its weight;
- b_j: what the running maximum adds: each of R rescalings costs one exponential and two roundings;
- P: rounding of the weights to 16 bits, where the model says that they are rounded;
- g: accumulation over n tokens; g_d: over d elements of q·k;
- merging of up to k splits, partial results in 16 bits where the model says so, the final division.

Errors of weights that hit numerator and row sum alike cost |v_j − o|, others |v_j| or |o|. Derivation and measurements:
docs/design/certified-rounding.md. Where the model is `exact`, only the oracle's own error remains.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from conformance.case import AttendExpected, AttendProblem
from conformance.formats import cell, format_of, round_to, ulp
from conformance.oracle import Answer, Terms, attend, terms
from conformance.vectors.vector import Facts
from paged.common.capabilities import NumericModel

U = 2.0**-24
LOG2E = 1.4426950408889634
MIN_SPLITS = 16
"""Splits of one row that every model allows; longer rows may have one for each 128 tokens."""
LOG_ERROR = 2.0**-19
"""Absolute error of an approximate log2 on GPUs (measured 9.9e-7), in base-2 units."""
STATISTIC_LIMIT = 1.25
"""Largest accepted ratio of the root mean square error to its expectation."""
STATISTIC_TOKENS = 4096
"""Above this many tokens matrix units that truncate bias the error, and the statistic is not judged."""


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """Largest distance of an honest output (t, h, e) and LSE (t, h) from the oracle's answer, and the deviation."""

    output: np.ndarray
    lse: np.ndarray
    deviation: np.ndarray


def expect(
    problem: AttendProblem,
    model: NumericModel,
    facts: Facts,
    *,
    predicted: tuple[np.ndarray, np.ndarray] | None = None,
    answer: Answer | None = None,
) -> AttendExpected:
    """What the judge demands of a backend of that numeric model.

    An element whose interval o ± δ rounds to one word is decided. `predicted` words, where the family and the model
    allow them to be demanded, replace the interval. `answer` is the oracle's, if it was asked before.
    """
    answer = attend(problem) if answer is None else answer
    bound = bounds(problem, answer, model, facts)
    low, high = cell(answer.output - bound.output, answer.output + bound.output, problem.dtype)
    if predicted is not None:
        low, high = predicted
    lse_low = np.where(np.isneginf(answer.lse), answer.lse, round_to(answer.lse - bound.lse, "float32"))
    lse_high = np.where(np.isneginf(answer.lse), answer.lse, round_to(answer.lse + bound.lse, "float32"))
    statistic = facts.statistic and not model.exact and problem.dtype != "float32"
    statistic = statistic and int(problem.table.kv_lens.max(initial=0)) <= STATISTIC_TOKENS
    return AttendExpected(
        low=low,
        high=high,
        lse_low=lse_low,
        lse_high=lse_high,
        exact=answer.output if statistic else None,
        deviation=bound.deviation if statistic else None,
    )


def bounds(problem: AttendProblem, answer: Answer, model: NumericModel, facts: Facts) -> Bound:
    """The a-priori bound of every element, the oracle's own error included."""
    output, lse = answer.output_error.copy(), answer.lse_error.copy()
    deviation = np.zeros_like(output)
    if model.exact:
        return Bound(output, lse, deviation)
    for t in terms(problem):
        at = t.token, t.head
        own, own_lse, own_deviation = _one(problem, t, answer.output[at], answer.lse[at], model, facts)
        output[at] += own
        lse[at] += own_lse
        deviation[at] = own_deviation
    return Bound(output, lse, deviation)


def _one(
    problem: AttendProblem, t: Terms, o: np.ndarray, lse: float, model: NumericModel, facts: Facts
) -> tuple[np.ndarray, float, np.ndarray]:
    """Bound of one token under one head: output, LSE, expected deviation of the output."""
    out_format = format_of(problem.dtype)
    rounds_weights = model.weights == "input" and problem.dtype != "float32"
    rounds_partials = model.partials == "output" and problem.dtype != "float32"
    p_unit = out_format.unit_roundoff if rounds_weights else 0.0
    n, d = len(t.logits), problem.query.shape[-1]
    top = float(t.logits.max()) if t.sink is None else max(float(t.logits.max()), t.sink)
    raw = np.exp(t.logits - top)
    total = raw.sum() + (0.0 if t.sink is None else float(np.exp(t.sink - top)))
    w = raw / total
    sink_share = max(0.0, 1.0 - float(w.sum())) if t.sink is not None else 0.0
    size, spread = w @ np.abs(t.values), np.abs(t.values - o)

    exp_error = 2.0**model.exp_error_log2
    peak = np.maximum(np.abs(t.scaled), abs(top))
    a = 5 * U * np.abs(t.scaled) + 3 * U * peak + exp_error
    if problem.key_scale is not None:
        a += 2 * U * np.abs(t.scaled)
    if not facts.exact_logits:
        a += _accumulation(d, 10) * t.absolute
    cap = problem.spec.soft_cap
    if cap is not None:
        a += cap * (2.0**model.tanh_error_log2 + 4 * U)
    rescalings = _rescalings(t.logits, facts)
    per_rescaling = exp_error + 2 * U + 2 * U * LOG2E * np.maximum(np.abs(t.logits), abs(top))
    b = (rescalings + 3) * per_rescaling + 2 * U * (np.log2(max(n, 2)) + 1)
    sink_error = 0.0
    if t.sink is not None:
        sink_error = sink_share * (exp_error + 8 * U * (abs(t.sink) + abs(top)) + 2 * U)

    snaps = rounds_weights and facts.dyadic and not model.normalised
    distance = np.zeros(n)
    if snaps:
        octaves = (t.logits - top) * LOG2E
        distance = np.expm1(np.abs(octaves - np.rint(octaves)) / LOG2E)
        snaps = bool(np.max(a + distance) < p_unit / 2)
    a = np.expm1(a)
    if snaps:
        # The numerator's weights are powers of two: they lose a_j, which an unrounded row sum keeps.
        weights_term = (w * b) @ spread + (w * distance) @ np.abs(t.values)
        weights_term = weights_term + np.abs(o) * (w @ (a + distance))
        weights_sum = float(w @ (a + b + distance))
    else:
        distance = np.zeros(n)
        weights_term = (w * (a + b)) @ spread
        rounding = _weight_rounding(raw, total, p_unit, out_format.half_subnormal, normalised=model.normalised)
        rounded = rounding @ np.abs(t.values)
        if not model.normalised:  # a row sum of rounded weights shifts the error from v to v − o
            rounded = np.maximum(rounded, rounding @ spread)
        weights_term = weights_term + rounded
        weights_sum = float(w @ (a + b)) + float(rounding.sum())

    g = 0.0 if _sums_exactly(t, facts) else _accumulation(n, 16)
    splits = max(MIN_SPLITS, -(-n // 128))
    merging = 8 * U * (splits + 1) * size
    if problem.value_scale is not None:
        merging = merging + 4 * U * size
    partials = 0.0
    if rounds_partials:
        partials = np.where(size > 0, out_format.unit_roundoff * size + out_format.half_subnormal, 0.0)
    slack = 1.0 - (weights_sum + sink_error + g)
    if slack < 0.5:
        infinite = np.full_like(o, np.inf)
        return infinite, np.inf, infinite
    delta = (weights_term + sink_error * np.abs(o) + g * size + g * np.abs(o) + merging + partials) / slack

    lse_error = (weights_sum + sink_error + g + 8 * U * (splits + 1)) / slack
    lse_error += 2 * LOG_ERROR / LOG2E + 4 * U * (abs(top) + abs(lse) + abs(float(np.log(total))))

    variance = ulp(o, problem.dtype) ** 2 / 12 + (8 * U * size) ** 2
    variance += p_unit**2 / 6 * (w**2 @ t.values**2)
    if rounds_partials:
        variance += out_format.unit_roundoff**2 / 6 * (w**2 @ t.values**2 + o**2)
    return delta, float(lse_error), np.sqrt(variance)


def _accumulation(terms_added: int, extra: int) -> float:
    """Relative error of adding that many products in float32, in any order.

    One rounding for each product covers a plain chain of fused multiply-adds; a matrix unit of 16 products that aligns,
    drops and truncates errs by at most 13 u per 16 products (measured: 7.0), which is less.
    """
    return (terms_added + extra) * U


def _sums_exactly(t: Terms, facts: Facts) -> bool:
    """Whether every partial sum of P and of P·v is a float32 number in any order.

    Only with one logit for all, so that P is 1 and no rescaling factor takes the sums off their grid; and only while
    they stay below 2^18 in units of the values' grid, here whole numbers.
    """
    if not facts.exact_logits or np.ptp(t.logits) != 0 or t.sink not in (None, float(t.logits[0])):
        return False
    whole = bool(np.all(t.values == np.rint(t.values)))
    return whole and bool(np.all(np.abs(t.values).sum(0) < 2.0**18))


def _weight_rounding(
    raw: np.ndarray, total: float, unit: float, half_subnormal: float, *, normalised: bool
) -> np.ndarray:
    """Largest absolute error that rounding P to 16 bits puts on each normalised weight."""
    if unit == 0.0:
        return np.zeros_like(raw)
    if normalised:
        return np.maximum(unit * raw / total, half_subnormal)
    error = np.maximum(unit * raw, half_subnormal) / total
    return np.where(raw >= 1.0, 0.0, error)  # the top token's P is exactly 1


def _rescalings(logits: np.ndarray, facts: Facts) -> int:
    """How often the running maximum can change while one token's weight is in the sums.

    Whatever subset of tokens a lane visits in rising or falling order, its maxima form a rising chain of that order; so
    no more than the longest such chain, plus one for every split that is merged in another order. With exact logits no
    more than there are different ones.
    """
    splits = max(MIN_SPLITS, -(-len(logits) // 128))
    chain = max(_longest_rise(logits), _longest_rise(logits[::-1])) + splits
    if facts.exact_logits:
        chain = min(chain, len(np.unique(logits)))
    return min(chain, len(logits))


def _longest_rise(x: np.ndarray) -> int:
    """Length of the longest strictly increasing subsequence."""
    tails: list[float] = []
    for value in x.tolist():
        at = bisect.bisect_left(tails, value)
        if at == len(tails):
            tails.append(value)
        else:
            tails[at] = value
    return len(tails)
