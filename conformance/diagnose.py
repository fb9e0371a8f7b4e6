"""Why an output is wrong, in the words of someone who writes kernels.

Three sources, most specific first: what the vector spells (an address names the token that was read, a census counts
the tokens), which broken rule would have given this output (`conformance.hypotheses` asks the oracle), and where the
wrong elements are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance import oracle
from conformance.case import AttendExpected, AttendProblem, MoveProblem
from conformance.fitting import fitted
from conformance.formats import decode, format_of, is_nan
from conformance.hypotheses import explain
from conformance.lse_causes import explain_lse
from conformance.vectors.address import read_back

LOG2E = 1.4426950408889634
SMALL = 0.03
"""Errors below this share of Σ w |v| look like rounding; a token too many or too few in a short row is more."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """`clause` found broken, `text` for a person, `hint`: name of the kind of fault, or None."""

    clause: str
    text: str
    hint: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def attend(
    problem: AttendProblem,
    expected: AttendExpected,
    output: np.ndarray,
    lse: np.ndarray | None,
    wrong: np.ndarray,
    wrong_lse: np.ndarray,
) -> Finding:
    """Explain wrong elements (t, h, e) and wrong LSEs (t, h) of which there is at least one."""
    positions = problem.table.positions()
    if not wrong.any():
        assert lse is not None
        return _lse(problem, expected, output, lse, wrong_lse, positions)
    zero = output == format_of(problem.dtype).sign_bit
    if not (wrong & ~zero).any():
        where = _where(np.argwhere(wrong)[0])
        text = f"{int(wrong.sum())} elements are −0 where a computed zero must be +0, first at {where}."
        return Finding("attend.10", text, "minus-zero")
    blind = positions < 0
    if wrong[blind].any():
        return _blind(problem, output, wrong, blind)
    first = np.argwhere(wrong)[0]
    parts = [
        f"{int(wrong.sum())} of {wrong.size} elements wrong, first at {_where(first)}: "
        f"{_element(problem, expected, output, first)}."
    ]
    finding = _cause(problem, expected, output, lse, wrong, wrong_lse)
    clause, hint = finding.clause, finding.hint
    parts.append(finding.text)
    if wrong_lse.any():
        parts.append(f"The LSE is wrong for {int(wrong_lse.sum())} of {wrong_lse.size} token heads too.")
    elif lse is not None and expected.lse_low is not None:
        parts.append("The LSE is right.")
    return Finding(clause, " ".join(filter(None, parts)), hint, {"first": first.tolist()})


def _cause(
    problem: AttendProblem,
    expected: AttendExpected,
    output: np.ndarray,
    lse: np.ndarray | None,
    wrong: np.ndarray,
    wrong_lse: np.ndarray,
) -> Finding:
    """The most telling explanation of wrong elements of live tokens."""
    spelled = _spelled(problem, expected, output, wrong)
    # A ladder spells a scale, which any other fault bends too: it is told only where nothing explains more.
    scale = spelled.text if spelled is not None and spelled.hint == "scale" else ""
    said = f"{spelled.text} " if spelled is not None and not scale else ""
    broken = explain(problem, output, wrong, lse, expected.explain.get("recalled", ()), _lse_near(expected))
    skipped = _skipped(problem, output, wrong)
    if broken is not None and not (skipped and broken.text.startswith("Where it is wrong, and only there")):
        if broken.clause == "attend.2" and scale:
            said = f"{scale} "
        return Finding(broken.clause, said + broken.text, broken.hint)
    if skipped:
        return Finding("attend.1", skipped, "skipped")
    if spelled is None or spelled.hint in (None, "token-count", "scale"):
        factor = fitted(problem, output, lse, np.asarray(wrong.any(-1)))
        if factor is not None:
            return Finding(factor.clause, said + factor.text, factor.hint)
    if (shared := _shared(problem, wrong)) is not None:
        return dataclasses.replace(shared, text=said + shared.text)
    nan = is_nan(output, problem.dtype)
    if nan.any():
        if lse is not None and np.all(np.isposinf(lse[nan.any(-1)])):
            text = f"{int(nan.sum())} elements are NaN and their LSE is +∞: weights overflowed, as when the running "
            return Finding("attend.1", f"{said}{text}maximum is not raised or not subtracted.", "overflow")
        text = f"{int(nan.sum())} elements are NaN: bits that the row must not read reached the output."
        return Finding("attend.7", said + text, "poison")
    if spelled is not None and spelled.hint not in (None, "token-count", "scale"):
        return spelled
    measured = _factor(problem, output, wrong)
    if measured is not None:
        return dataclasses.replace(measured, text=said + measured.text)
    if spelled is not None and spelled.hint == "scale" and lse is not None:
        spelled = None  # with an LSE a scale would have been fitted
    if spelled is not None and not (spelled.clause == "pages.3" and lse is not None and not wrong_lse.any()):
        return spelled
    where = ""
    if lse is not None and expected.lse_low is not None:
        where = "Logits and row sum are right, since the LSE is: look at values, at the accumulator and its rescaling."
        where = "" if wrong_lse.any() else where
    return Finding("attend.1", f"{said}{where}".strip(), None)


def _lse_near(expected: AttendExpected) -> np.ndarray | None:
    """How near two LSEs agree: a few widths of the range that the declared arithmetic leaves, relative to 1 + |LSE|."""
    if expected.lse_low is None or expected.lse_high is None:
        return None
    with np.errstate(invalid="ignore"):
        width = (expected.lse_high - expected.lse_low) / (1 + np.abs(expected.lse_low))
    return 8 * np.nan_to_num(width, nan=0.0) + 2.0**-14


def _skipped(problem: AttendProblem, output: np.ndarray, wrong: np.ndarray) -> str:
    """Rows whose wrong tokens all came back as zeros, in words; empty if any did not."""
    tokens = np.flatnonzero(wrong.any((1, 2)))
    if (decode(output[tokens], problem.dtype) != 0).any():
        return ""
    rows = sorted(set((np.searchsorted(problem.table.query_offsets, tokens, side="right") - 1).tolist()))
    which = f"row {rows[0]}" if len(rows) == 1 else f"rows {', '.join(map(str, rows))}"
    return f"Tokens of {which} came back as zeros, all of those that are wrong: skipped, or never written."


def _shared(problem: AttendProblem, wrong: np.ndarray) -> Finding | None:
    """Wrong just where rows list a page that another row lists too, other rows being there and right."""
    table = problem.table
    live = [r for r in range(table.num_rows) if table.query_lens[r] and table.kv_lens[r]]
    listed = [set(table.pages_of(r).tolist()) for r in range(table.num_rows)]
    sharing = {r for r in live if any(listed[r] & listed[s] for s in range(table.num_rows) if s != r)}
    rows = set((np.searchsorted(table.query_offsets, np.flatnonzero(wrong.any((1, 2))), side="right") - 1).tolist())
    struck = np.asarray(wrong.any((1, 2)))
    whole = all(struck[table.query_offsets[r] : table.query_offsets[r + 1]].all() for r in rows)
    if not sharing or not rows <= sharing or not set(live) - rows or not whole:
        return None
    text = f"Wrong are only rows {', '.join(map(str, sorted(rows)))}, which list pages that other rows list too."
    return Finding("steps.2", text, "shared-pages")


def _factor(problem: AttendProblem, output: np.ndarray, wrong: np.ndarray) -> Finding | None:
    """Outputs that are the right ones times one factor per token and head, or the right ones with too few bits."""
    only = np.flatnonzero(wrong.any((1, 2)))[:8].tolist()
    exact, got = oracle.attend(problem, only=only).output[only], decode(output[only], problem.dtype)
    used = wrong[only] & (np.abs(exact) > 0) & np.isfinite(got)
    if not used.any():
        return None
    off = np.abs(got - exact)[used] / np.abs(exact)[used]
    size = _sizes(problem, only)
    if np.quantile(off, 0.9) < 0.02:
        text = f"Nine of ten wrong elements are within {100 * np.quantile(off, 0.9):.2g} % of the exact answer: fewer "
        return Finding("attend.1", f"{text}bits in weights or sums than declared.", "reduced-precision")
    share = float(np.quantile((np.abs(got - exact) / np.where(size > 0, size, np.inf))[used], 0.9))
    if share < SMALL:
        text = f"Nine of ten wrong elements are off by less than {100 * share:.2g} % of Σ w |v|, as of fewer bits in "
        text += "logits, weights or sums than declared, or of a coarse exponential."
        return Finding("attend.1", text, "reduced-precision")
    factors = []
    for at in np.argwhere(used.any(-1)).tolist():
        ratio = (got[tuple(at)] / np.where(exact[tuple(at)] == 0, 1, exact[tuple(at)]))[used[tuple(at)]]
        if np.quantile(np.abs(ratio - np.median(ratio)), 0.8) > 0.02 * abs(np.median(ratio)):
            return None
        factors.append(float(np.median(ratio)))
    if not all(0 < f < 1 for f in factors):
        return None
    text = (
        f"The output is the right one times {np.median(factors):.4g}: the row sum holds weight that no visible token "
    )
    text += "has, "
    if problem.sinks is not None:
        return Finding("attend.1", f"{text}such as sinks scaled or counted twice.", "sinks")
    if problem.spec.soft_cap is not None:
        return Finding("attend.5", f"{text}such as masked logits that the soft cap made finite.", "mask-before-cap")
    return Finding("attend.7", f"{text}such as masked or padding positions with a finite logit.", "masked-weight")


def _sizes(problem: AttendProblem, only: list[int]) -> np.ndarray:
    """Σ w |v| of some tokens (n, h, e): what rounding errors of a sum that cancels are to be held against."""
    out = np.zeros((len(problem.query), problem.query.shape[1], problem.values.shape[-1]))
    for t in oracle.terms(problem, only=only):
        weights = np.exp(t.logits - t.logits.max())
        out[t.token, t.head] = weights @ np.abs(t.values) / weights.sum()
    return out[only]


def _where(index: np.ndarray) -> str:
    return f"token {index[0]}, head {index[1]}, dim {index[2]}"


def _element(problem: AttendProblem, expected: AttendExpected, output: np.ndarray, index: np.ndarray) -> str:
    at = tuple(index)
    got, low, high = (decode(a[at], problem.dtype) for a in (output, expected.low, expected.high))
    words = f"0x{int(output[at]):x}"
    if expected.low[at] == expected.high[at]:
        return f"got {got:.9g} ({words}), demanded {low:.9g} (0x{int(expected.low[at]):x})"
    return f"got {got:.9g} ({words}), demanded {low:.9g} .. {high:.9g}"


def _blind(problem: AttendProblem, output: np.ndarray, wrong: np.ndarray, blind: np.ndarray) -> Finding:
    token, head, dim = np.argwhere(wrong & blind[:, None, None])[0].tolist()
    value = float(decode(output[token, head, dim], problem.dtype))
    rows = np.searchsorted(problem.table.query_offsets, token, side="right") - 1
    if token < int(problem.table.query_offsets[-1]):
        text = f"token {token} of row {rows}, which is empty (n = 0), has output {value!r} at head {head}, dim {dim}"
        return Finding("attend.8", f"{text}; it must be +0.", "empty-row")
    text = f"padding token {token} has output {value!r} at head {head}, dim {dim}"
    return Finding("attend.9", f"{text}; it must be +0.", "padding-token")


def _lse(
    problem: AttendProblem,
    expected: AttendExpected,
    output: np.ndarray,
    lse: np.ndarray,
    wrong: np.ndarray,
    positions: np.ndarray,
) -> Finding:
    assert expected.lse_low is not None
    assert expected.lse_high is not None
    token, head = np.argwhere(wrong)[0].tolist()
    got, low, high = (float(x[token, head]) for x in (lse, expected.lse_low, expected.lse_high))
    text = f"the output is right, the LSE is wrong for {int(wrong.sum())} of {wrong.size} token heads, first at token "
    text += f"{token}, head {head}: got {got!r}, demanded {low!r} .. {high!r}."
    if positions[token] < 0:
        padding = token >= int(problem.table.query_offsets[-1])
        return Finding("attend.9" if padding else "attend.8", f"{text} It must be −∞ there.", "lse-empty")
    middle = (expected.lse_low + expected.lse_high) / 2
    used = wrong & (positions >= 0)[:, None] & np.isfinite(middle) & (np.abs(middle) > 0.1)
    with np.errstate(all="ignore"):
        ratio = (lse / middle)[used]
    if ratio.size and np.all(np.abs(ratio / LOG2E - 1) < 1e-3):
        return Finding("attend.11", f"{text} There it is 1/ln 2 = 1.4427 times too large: base 2.", "lse-base")
    if ratio.size and np.all(np.abs(ratio + 1) < 1e-3):
        return Finding("attend.11", f"{text} There it has the wrong sign.", "lse-sign")
    cause = explain_lse(problem, output, lse, wrong)
    if cause is not None:
        return Finding(cause.clause, f"{text} {cause.text}", cause.hint)
    if (factor := fitted(problem, output, lse, wrong)) is not None:
        return Finding(factor.clause, f"{text} {factor.text}", factor.hint)
    return Finding("attend.11", text, "lse")


def _spelled(problem: AttendProblem, expected: AttendExpected, output: np.ndarray, wrong: np.ndarray) -> Finding | None:
    family = expected.explain.get("family")
    try:
        if family == "address":
            return _address(problem, expected.explain, output, wrong)
        if family == "trace":
            return _trace(problem, expected.explain, output, wrong)
        if family == "census":
            return _census(problem, expected.explain, output, wrong)
        if family == "ladder":
            return _ladder(problem, expected.explain, output, wrong)
    except (FloatingPointError, ZeroDivisionError, ValueError):
        return None  # an output too strange to be read back is described by its place alone
    return None


def _address(problem: AttendProblem, e: Mapping[str, Any], output: np.ndarray, wrong: np.ndarray) -> Finding:
    table = problem.table
    token, head = np.argwhere(wrong.any(-1))[0].tolist()
    row = int(np.searchsorted(table.query_offsets, token, side="right") - 1)
    j = int(e["target"][token, head])
    page, slot = int(table.pages_of(row)[j // table.tokens_per_page]), j % table.tokens_per_page
    kv_head = head // (problem.query.shape[1] // problem.keys.shape[2])
    wanted = f"page {page}, slot {slot}, KV head {kv_head} (row {row}, position {j})"
    got = read_back(decode(output[token, head], problem.dtype) / e["value_scale"], e["fields"], e["base"])
    if got is None:
        return Finding("pages.3", f"Token {token}, head {head} wanted {wanted} and returned no address.", None)
    text = f"Token {token}, head {head} read page {got['page']}, slot {got['slot']}, KV head {got['head']} of row "
    text += f"{got['row']}, layer {got['layer']}; wanted {wanted}, layer {problem.layer}."
    if got["layer"] != problem.layer:
        return Finding("pages.4", text, "layer")
    if got["row"] != row:
        return Finding("attend.12", text, "other-row")
    if got["head"] != kv_head:
        return Finding("attend.6", text, "kv-head")
    if _at_the_window(problem, e["target"], wrong):
        text += " Wrong are only tokens that want what their window just lets them see."
        return Finding("attend.4", text, "window")
    if got["page"] != page or got["slot"] != slot:
        return Finding("pages.3", text, "page-order" if got["page"] != page else "slot")
    return Finding("attend.1", text, None)


def _at_the_window(problem: AttendProblem, target: np.ndarray, wrong: np.ndarray) -> bool:
    """Whether a window is set and just those are wrong whose target is among the oldest that it leaves."""
    if problem.spec.window is None:
        return False
    first = np.maximum(problem.table.positions() - problem.spec.window + 1, 0)[:, None]
    asked = target >= 0
    old = asked & (first > 0) & (target - first < max(1, problem.spec.window // 4))
    return bool(np.all(old[wrong.any(-1)])) and bool((asked & ~old).any())


def _trace(problem: AttendProblem, e: Mapping[str, Any], output: np.ndarray, wrong: np.ndarray) -> Finding:
    """As `_address`, where a value spells whose token it is and not where it lies."""
    table = problem.table
    token, head = np.argwhere(wrong.any(-1))[0].tolist()
    row = int(np.searchsorted(table.query_offsets, token, side="right") - 1)
    j, origins = int(e["target"][token, head]), e["origins"]
    kv_head = head // (problem.query.shape[1] // problem.keys.shape[2])
    page, slot = int(table.pages_of(row)[j // table.tokens_per_page]), j % table.tokens_per_page
    wanted = (
        f"token {j} of request {origins[row][j]}, KV head {kv_head}, layer {problem.layer} (row {row}, page {page}, "
    )
    wanted += f"slot {slot})"
    got = read_back(decode(output[token, head], problem.dtype) / e["value_scale"], e["fields"], e["base"])
    if got is None:
        return Finding("pages.3", f"Token {token}, head {head} wanted {wanted} and returned no token.", None)
    letter = chr(ord("a") + got["request"])
    text = f"Token {token}, head {head} read token {got['position']} of request {letter}, KV head {got['head']}, layer "
    text += f"{got['layer']}; wanted {wanted}."
    if got["layer"] != problem.layer:
        return Finding("pages.4", text, "layer")
    if letter not in origins[row]:
        held = any(letter in names for names in origins)
        return Finding("attend.12" if held else "steps.1", text, "other-row" if held else "former-owner")
    if got["head"] != kv_head:
        return Finding("attend.6", text, "kv-head")
    if got["position"] != j:
        return Finding("pages.3", text, "position")
    return Finding("attend.1", text, None)


def _census(problem: AttendProblem, e: Mapping[str, Any], output: np.ndarray, wrong: np.ndarray) -> Finding | None:
    """The first wrong token and head that shows which token was missed or read twice, or the first wrong one."""
    found = None
    for token, head in np.argwhere(wrong.any(-1))[:256].tolist():
        one = _counted(problem, e, output[token, head], token, head)
        if one is not None and one.hint != "token-count":
            return one
        found = found or one
    return found


def _counted(problem: AttendProblem, e: Mapping[str, Any], words: np.ndarray, token: int, head: int) -> Finding | None:
    table, spec, d = problem.table, problem.spec, len(words)
    row = int(np.searchsorted(table.query_offsets, token, side="right") - 1)
    share = decode(words, problem.dtype) / (e["marks"][row][head // e["group"]] * e["value_scale"])
    if not np.all(np.isfinite(share)):
        return None
    present = np.abs(share[share > 0])
    if not present.size:
        return Finding("attend.1", f"Token {token}, head {head} counted no token of this phase.", "token-count")
    unit = float(np.median(present)) if np.ptp(present) < 0.4 * present.max() else float(present.min())
    times = np.rint(share / unit).astype(int)
    n, position = int(table.kv_lens[row]), int(table.positions()[token])
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    end = position + 1 if spec.causal else n
    seen = e["phase"] * d + np.arange(d)
    due = ((seen >= first) & (seen < end)).astype(int)
    missed, extra = seen[times < due], seen[times > due]
    text = (
        f"Token {token}, head {head} of row {row} (position {position}, n = {n}) must count tokens {first}..{end - 1} "
    )
    text += f"once each, {int(e['counts'][token])} in all; it counted about {1 / unit:.4g} in all"
    if missed.size:
        text += f", left out {_list(missed)}"
    if extra.size:
        text += f", counted {', '.join(f'token {j} {times[j - seen[0]]} times' for j in extra[:4].tolist())}"
        text += f" and {extra.size - 4} more" if extra.size > 4 else ""
    clause, hint = "attend.1", "token-count"
    if np.any(extra >= n):
        clause, hint = "attend.7", "past-length"
    elif np.any(extra >= end):
        clause, hint = "attend.3", "causal"
    elif np.any(extra < first) or (spec.window is not None and missed.size and missed[-1] < first + missed.size):
        clause, hint = "attend.4", "window"  # one too many, or just the oldest left out
    elif missed.size:
        clause, hint = "pages.3", "tokens-missed"
    return Finding(clause, f"{text}.", hint)


def _list(tokens: np.ndarray) -> str:
    shown = ", ".join(str(j) for j in tokens[:6].tolist())
    return f"tokens {shown}" + (f" and {tokens.size - 6} more" if tokens.size > 6 else "")


def _ladder(problem: AttendProblem, e: Mapping[str, Any], output: np.ndarray, wrong: np.ndarray) -> Finding | None:
    """Solve (m0 + 2 x m1) / (1 + 2 x) = output for x; the rung then sits at −ln x nats instead of ln 2."""
    table = problem.table
    token, head = np.argwhere(wrong.any(-1))[0].tolist()
    row = int(np.searchsorted(table.query_offsets, token, side="right") - 1)
    first, second = e["means"][row][:, head // e["group"]]
    got = decode(output[token, head], problem.dtype) / e["value_scale"]
    with np.errstate(all="ignore"):
        x = (first - got) / (2 * (got - second))
    x = x[np.isfinite(x) & (x > 0)]
    if not x.size or np.quantile(x, 0.75) > 1.3 * np.quantile(x, 0.25):
        return None
    factor = float(-np.log2(np.median(x)))
    if abs(factor - 1) < 0.02:
        return None
    effective = problem.spec.scale * factor
    text = f"Token {token}, head {head} weighs its rungs as if logits were {factor:.4g} times what they are: an "
    text += f"effective scale of {effective:.5g} instead of {problem.spec.scale:.5g}."
    return Finding("attend.5" if problem.spec.soft_cap is not None else "attend.2", text, "scale")


def move(problem: MoveProblem, got: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray]) -> Finding:
    """Explain wrong words of a pool after a movement."""
    from conformance.diagnose_moves import explain_move

    clause, text, hint, details = explain_move(problem, got, wrong)
    return Finding(clause, text, hint, details)
