"""Why a pool is wrong after append, scrub or copy_pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance.case import MoveProblem
from conformance.formats import decode, format_of, is_nan

_Explained = tuple[str, str, str | None, dict[str, Any]]


def explain_move(problem: MoveProblem, got: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray]) -> _Explained:
    """(clause, text, hint, details) of the first wrong word."""
    name = "keys" if wrong["keys"].any() else "values"
    index = np.argwhere(wrong[name])[0].tolist()
    where = _slot(problem, index[0], index[1])
    before = problem.keys if name == "keys" else problem.values
    want = (problem.expected_keys if name == "keys" else problem.expected_values)[tuple(index)]
    have = got[name][tuple(index)]
    count = {key: int(w.sum()) for key, w in wrong.items()}
    text = f"{problem.operation}: {count['keys']} words of K and {count['values']} of V are wrong, first in {name} at "
    text += f"{where}, KV head {index[2]}, dim {index[3]}: got 0x{int(have):x}, demanded 0x{int(want):x}"
    details = {"first": index, "array": name, **{f"wrong_{k}": v for k, v in count.items()}}
    if problem.operation == "append":
        clause, more, hint = _append(problem, got, wrong, name, index)
    elif problem.operation == "scrub":
        clause, more, hint = "pages.1", *_scrub(problem, wrong, name, index)
    else:
        clause, more, hint = "pages.2", *_copy(problem, got, wrong, name, index)
    if hint is None and bool(have == before[tuple(index)]):
        more = "the word did not change"
    return clause, f"{text}; {more}." if more else f"{text}.", hint, details


def _slot(problem: MoveProblem, row: int, offset: int) -> str:
    return f"layer {row // problem.num_pages}, page {row % problem.num_pages}, slot {offset}"


def _append(
    problem: MoveProblem, got: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray], name: str, index: list[int]
) -> tuple[str, str, str | None]:
    assert problem.slots is not None
    new = problem.new_keys if name == "keys" else problem.new_values
    assert new is not None
    size = problem.keys.shape[1]
    live = problem.slots >= 0
    written = np.zeros(problem.keys.shape[:2], bool)
    rows = problem.layer * problem.num_pages + problem.slots[live] // size
    written[rows, problem.slots[live] % size] = True
    outside = wrong[name] & ~written[:, :, None, None]
    if not outside.any() and (numbers := _numbers_only(problem, got, wrong, name)):
        return numbers
    if outside.any():
        row, offset = np.argwhere(outside.any((2, 3)))[0].tolist()
        where = _slot(problem, row, offset)
        tokens = _same_token(new, got[name][row, offset])
        if not tokens:
            return "append.3", f"{where} was not to be written", "bystander"
        token = tokens[0]
        if not live[token]:
            return "append.2", f"padding token {token} was written to {where}", "padding"
        due = problem.slots[token]
        wanted = _slot(problem, problem.layer * problem.num_pages + due // size, due % size)
        hint = "layer" if row // problem.num_pages != problem.layer else "slot"
        return "append.1", f"token {token} was written to {where} instead of {wanted}", hint
    row, offset = index[0], index[1]
    token = int(np.flatnonzero(problem.slots == (row - problem.layer * problem.num_pages) * size + offset)[0])
    word = got[name][row, offset]
    before = problem.keys if name == "keys" else problem.values
    if np.array_equal(word, before[row, offset]):
        return "append.1", f"token {token} was not written", "dropped"
    for other in _same_token(new, word):
        kind = "padding token" if not live[other] else "token"
        clause = "append.1" if live[other] else "append.2"
        return clause, f"the slot of token {token} holds {kind} {other}", "other-token"
    if word.shape[0] > 1 and np.array_equal(np.sort(word, axis=0), np.sort(new[token], axis=0)):
        return "append.1", f"the KV heads of token {token} are permuted", "heads"
    with np.errstate(invalid="ignore"):
        total = decode(before[row, offset], problem.dtype) + decode(new[token], problem.dtype)
        close = np.abs(decode(word, problem.dtype) - total) <= 2.0**-6 * np.abs(total)
    if close.mean() > 0.9:
        return "append.1", f"token {token} was added to what the slot held", "adds"
    return "append.1", f"the slot of token {token} holds something else", None


def _numbers_only(
    problem: MoveProblem, got: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray], name: str
) -> tuple[str, str, str | None] | None:
    """All wrong words are numerically equal to the demanded ones, or NaN both: something computed on the way."""
    want = problem.expected_keys if name == "keys" else problem.expected_values
    have, due = got[name][wrong[name]], want[wrong[name]]
    zero = due == format_of(problem.dtype).sign_bit
    tiny = (np.abs(decode(due, problem.dtype)) < 2.0 ** format_of(problem.dtype).emin) & ~zero
    if np.all((zero | tiny) & (have & (format_of(problem.dtype).sign_bit - 1) == 0)):
        what = "a −0 or a subnormal" if tiny.any() else "a −0"
        return "append.4", f"every wrong word is {what} that became a zero", "minus-zero"
    if np.all(is_nan(due, problem.dtype)):
        return "append.4", "every wrong word is a NaN whose bits changed", "nan"
    if np.all(zero | tiny | ~np.isfinite(decode(due, problem.dtype))):
        return "append.4", "only zeros, subnormals, infinities and NaN changed", "special"
    return None


def _same_token(new: np.ndarray, word: np.ndarray) -> list[int]:
    return np.flatnonzero((new == word).all((1, 2))).tolist()


def _scrub(
    problem: MoveProblem, wrong: Mapping[str, np.ndarray], name: str, index: list[int]
) -> tuple[str, str | None]:
    assert problem.pages is not None
    if index[0] not in problem.pages.tolist():
        return "the page was not named and changed", "bystander"
    if not wrong["keys"].any() and name == "values":
        return "keys were scrubbed, values were not", "values-missed"
    return "the page was named and is not all +0", "missed"


def _copy(
    problem: MoveProblem, got: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray], name: str, index: list[int]
) -> tuple[str, str | None]:
    assert problem.source is not None
    assert problem.target is not None
    row = index[0]
    source = dict(zip(problem.target.tolist(), problem.source.tolist()))
    changed = [r for r in np.flatnonzero(wrong[name].any((1, 2, 3))).tolist() if r not in source]
    if changed and changed[0] in problem.source.tolist():
        where = _slot(problem, changed[0], 0).rpartition(",")[0]
        return f"source and target are exchanged: the source at {where} changed", "reversed"
    if changed:
        return f"{_slot(problem, changed[0], 0).rpartition(',')[0]} was not named and changed", "bystander"
    before = problem.keys if name == "keys" else problem.values
    if source[row] in problem.target.tolist() and np.array_equal(got[name][row], got[name][source[row]]):
        return "the source had been overwritten before it was read", "order"
    if np.array_equal(got[name][row], before[row]):
        return "the target page did not change", "missed"
    return "the target page is not what the source page was", None
