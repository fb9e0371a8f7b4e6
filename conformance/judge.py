"""Output and expectation in, verdict out. Pure functions of arrays; no backend, no jax.

Decided elements must have the demanded bits, the others must lie in their closed range; what fails is explained by
`conformance.diagnose` in terms of a kernel: which token was read instead, which rule was followed instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from conformance import diagnose
from conformance.bounds import STATISTIC_LIMIT, expect
from conformance.case import AttendExpected, AttendProblem, MoveProblem, Result
from conformance.diagnose import Finding
from conformance.formats import candidates, decode, format_of, is_nan, ordinal
from conformance.oracle import Answer
from conformance.vectors.vector import Vector
from paged.common.capabilities import NumericModel


def expectation(vector: Vector, model: NumericModel, answer: Answer | None = None) -> AttendExpected:
    """What a backend of that numeric model must return for an attend vector.

    Predicted bits are demanded where the family and the model allow it (`predicts`); the certified interval elsewhere.
    `answer` is the oracle's, if it was asked before.
    """
    assert isinstance(vector.problem, AttendProblem)
    predicted = vector.predicted if predicts(vector, model) else None
    expected = expect(vector.problem, model, vector.facts, predicted=predicted, answer=answer)
    return dataclasses.replace(expected, explain={"family": vector.family, **vector.explain})


def predicts(vector: Vector, model: NumericModel) -> bool:
    """Whether the bits that the family predicts bind a backend of that numeric model.

    - address, trace: always, since the only weight is 1; but a soft cap leaks, which float32 shows.
    - census: 16-bit outputs of kernels with float32 partial results and unnormalised weights.
    - ladder: 16-bit outputs, float32 partial results, tanh exact enough; normalised weights need row sums 2^m.
    - The exact model is held to the oracle instead, which decides the same bits.
    """
    assert isinstance(vector.problem, AttendProblem)
    p = vector.problem
    if vector.predicted is None or model.exact:
        return False
    if vector.family in ("address", "trace"):
        return p.dtype != "float32" or p.spec.soft_cap is None
    if p.dtype == "float32" or model.partials == "output":
        return False
    if vector.family == "census":
        return not model.normalised
    if p.spec.soft_cap is not None:
        error = p.spec.soft_cap * 2.0**model.tanh_error_log2
        return error < format_of(p.dtype).unit_roundoff / 16 and not model.normalised
    halves = p.table.kv_lens[p.table.kv_lens > 0] // 2
    return not model.normalised or bool(np.all(halves & (halves - 1) == 0))


def judge_move(
    problem: MoveProblem, keys: np.ndarray, values: np.ndarray, *, storage: str = "typed", id: str = ""
) -> Result:
    """Verdict on a pool after a movement: every word outside the sentinel pages must be the expected one.

    `keys`, `values` are words of all layers. Where `storage` is `"typed"`, any NaN equals any NaN.
    """
    arrays = (("keys", keys, problem.expected_keys), ("values", values, problem.expected_values))
    elements = 2 * int(problem.expected_keys.size)
    for name, got, want in arrays:
        if error := _form_error(name, got, want.shape, want.dtype):
            return Result(id=id, status="error", diagnosis=error, elements=elements)
    sentinel = np.arange(problem.expected_keys.shape[0]) % problem.num_pages == 0
    wrong = {}
    for name, got, want in arrays:
        differs = got != want
        if storage == "typed":
            differs &= ~(is_nan(got, problem.dtype) & is_nan(want, problem.dtype))
        differs[sentinel] = False
        wrong[name] = differs
    digest = _digest(problem.dtype, *(_canonical(a, sentinel, problem.dtype) for _, a, _ in arrays))
    count = sum(int(w.sum()) for w in wrong.values())
    if count == 0:
        return Result(id=id, status="pass", elements=elements, decided=elements, output=digest)
    finding = diagnose.move(problem, {"keys": keys, "values": values}, wrong)
    return _failure(id, finding, count, elements, elements)


def _canonical(words: np.ndarray, sentinel: np.ndarray, dtype: str) -> np.ndarray:
    """Words for a digest: sentinels blank, and one NaN for all, since a typed pool may change their bits."""
    nan = np.array(format_of(dtype).nan, words.dtype)
    return np.where(sentinel[:, None, None, None], 0, np.where(is_nan(words, dtype), nan, words)).astype(words.dtype)


def judge_attend(
    problem: AttendProblem, expected: AttendExpected, output: np.ndarray, lse: np.ndarray | None, *, id: str = ""
) -> Result:
    """Verdict on one attend call: `output` words (t, h, e), `lse` float32 (t, h) or None where none was returned."""
    elements = int(expected.low.size)
    decided = expected.low == expected.high
    error = _form_error("output", output, expected.low.shape, expected.low.dtype)
    if error is None and lse is not None:
        error = _form_error("lse", lse, problem.query.shape[:2], np.dtype(np.float32))
    if error is not None:
        return Result(id=id, status="error", diagnosis=error, elements=elements)
    digest = _digest(problem.dtype, np.where(decided, output, 0).astype(output.dtype), decided)
    dtype = problem.dtype
    outside = ordinal(output, dtype) < ordinal(expected.low, dtype)
    outside |= ordinal(output, dtype) > ordinal(expected.high, dtype)
    minus_zero = output == format_of(dtype).sign_bit if format_of(dtype).negative_zero else np.zeros_like(outside)
    wrong = outside | minus_zero  # a NaN lies beyond the infinities of its sign, so outside any range
    details: dict[str, Any] = {"candidates": int(candidates(expected.low, expected.high, dtype).max(initial=1))}
    wrong_lse = np.zeros(problem.query.shape[:2], bool)
    if lse is not None and expected.lse_low is not None and expected.lse_high is not None:
        wrong_lse = ~((lse >= expected.lse_low) & (lse <= expected.lse_high))
        details["lse_judged"] = True
    if wrong.any() or wrong_lse.any():
        finding = diagnose.attend(problem, expected, output, lse, wrong, wrong_lse)
        return _failure(id, finding, int(wrong.sum()), elements, int(decided.sum()), details)
    if expected.exact is not None and expected.deviation is not None:
        ratio, worst = _statistic(problem, expected, output)
        details["rms_ratio"] = round(ratio, 4)
        if ratio > STATISTIC_LIMIT:
            finding = Finding(
                "attend.1",
                f"every element lies in its certified range, but the root mean square error is {ratio:.2f} times what "
                f"the numeric model explains (limit {STATISTIC_LIMIT}): something computes in less precision than "
                f"declared, such as a 16-bit accumulator. Largest error over expectation at {worst}.",
                "reduced-precision",
            )
            return _failure(id, finding, 0, elements, int(decided.sum()), details)
    return Result(id=id, status="pass", elements=elements, decided=int(decided.sum()), output=digest, details=details)


def _statistic(problem: AttendProblem, expected: AttendExpected, output: np.ndarray) -> tuple[float, str]:
    assert expected.exact is not None
    assert expected.deviation is not None
    used = expected.deviation > 0
    error = (decode(output, problem.dtype) - expected.exact)[used] / expected.deviation[used]
    worst = np.argwhere(used)[int(np.argmax(np.abs(error)))].tolist()
    return float(np.sqrt(np.mean(error**2))), f"token {worst[0]}, head {worst[1]}, dim {worst[2]}"


def _form_error(name: str, got: object, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    if not isinstance(got, np.ndarray):
        return f"{name} is a {type(got).__name__}, expected an array."
    if got.shape != shape or got.dtype != dtype:
        return f"{name} has shape {got.shape} and element type {got.dtype}, expected {shape} and {dtype}."
    return None


def _failure(
    id: str, finding: Finding, wrong: int, elements: int, decided: int, details: dict[str, Any] | None = None
) -> Result:
    details = {**(details or {}), "wrong": wrong, "hint": finding.hint, **finding.details}
    return Result(
        id=id,
        status="fail",
        diagnosis=finding.text,
        clause=finding.clause,
        elements=elements,
        decided=decided,
        details=details,
    )


def _digest(dtype: str, *arrays: np.ndarray) -> str:
    """`sha256:…` of arrays with their dtype name and shapes; bool and unsigned arrays only."""
    h = hashlib.sha256(dtype.encode())
    for a in arrays:
        h.update(f"|{a.dtype.kind}{a.dtype.itemsize}{a.shape}|".encode())
        h.update(np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<")).tobytes())
    return f"sha256:{h.hexdigest()}"
