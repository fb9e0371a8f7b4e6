"""Known faults as rules: which of them, put to the oracle, would have returned this output?

Only asked after a failure. Each hypothesis is an altered problem or altered rules of the oracle; the one that explains
nearly all wrong elements, and explains them far better than the right answer, is named with the clause that it breaks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from conformance.averages import Rule, averages
from conformance.case import AttendProblem
from conformance.formats import decode, format_of, round_to
from conformance.oracle import SEMANTICS, Answer, Rules, Terms, _pages, _visible, attend, terms
from conformance.suspects import suspects
from paged.common import AttentionSpec, PageTable

LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A fault: `hint` names it, `clause` is what it breaks, `text` tells it; `problem`, `rules` reproduce it.

    `average`, if there is one, is asked of each token's terms in place of `problem` and `rules`. `rare`: asked only
    where no plain hypothesis explains all.
    `same_lse`: whether a kernel with this fault returns the LSE of the faulty weights.
    """

    hint: str
    clause: str
    text: str
    problem: AttendProblem
    rules: Rules = SEMANTICS
    same_lse: bool = True
    average: Rule | None = None
    rare: bool = False


_SIBLINGS = {
    "float8_e4m3fnuz": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fnuz",
    "float8_e5m2fnuz": "float8_e5m2",
    "float8_e5m2": "float8_e5m2fnuz",
}
"""8-bit types whose bytes are easily taken for one another's."""

EXPLAINED = 0.9
"""Share of the wrong elements, and of the right ones beside them, that a hypothesis must reproduce."""


LSE_NEAR = 2.0**-8
"""How near LSEs agree where nothing says how exact they are: the row sum may be one of weights in 16 bits."""
ENOUGH = 0.05
"""A plain hypothesis that leaves less than this share of the distance is not held against the rarer ones."""
BETTER = 0.999
"""A later hypothesis must be this much closer than an earlier one: those that are told first are the plainer ones."""
SOME_NUMBERS = 0.02
"""Share of the wrong elements that must be finite for all hypotheses to be asked: NaN alone agrees with anything that
reads poison, so then only the plain ones are."""


def explain(
    problem: AttendProblem,
    output: np.ndarray,
    wrong: np.ndarray,
    lse: np.ndarray | None = None,
    more: Sequence[Hypothesis] = (),
    lse_near: np.ndarray | None = None,
) -> Hypothesis | None:
    """The hypothesis that reproduces the wrong elements and leaves the right ones right, or None.

    If none does both, one that reproduces the wrong elements is taken, and the text says where alone it holds.

    It must lie twice as close to the output as the right answer does, and agree with the LSE if there is one that is
    right or not a number: a poisoned value leaves the LSE right, a poisoned key does not. `more` are hypotheses beside
    the known ones; `lse_near` (t, h) says how near LSEs agree, relative to 1 + |LSE|.
    """
    live = problem.table.positions() >= 0
    faulty = wrong.any((1, 2))
    only = np.concatenate([np.flatnonzero(faulty & live)[:8], np.flatnonzero(~faulty & live)[:8]]).tolist()
    got, bad = decode(output[only], problem.dtype), wrong[only]
    near = max(4 * format_of(problem.dtype).unit_roundoff, 2.0**-14)
    finite = bad & np.isfinite(got)
    numbers = bool(finite.sum() >= SOME_NUMBERS * bad.sum())
    right = attend(problem, only=only)
    apart = np.minimum(_apart(got, right.output[only]), 1.0)
    struck = np.asarray(bad.any(-1))
    best, least = None, 0.5 * float(apart.mean())
    best_struck, least_struck = None, 0.5 * float(apart[struck].mean())
    seen = list(terms(problem, only=only))
    for hypothesis in itertools.chain(plain(problem), more, rarer(problem) if numbers else ()):
        if hypothesis.rare and best is not None and least < ENOUGH * apart.mean():
            break  # a plain fault explains it all
        with np.errstate(all="ignore"):
            try:
                answer = answer_of(problem, hypothesis, seen, only)
            except (IndexError, ValueError):
                continue  # this fault cannot be had here: it leaves the pool
            if answer.output.shape[-1] != got.shape[-1]:
                continue  # nor this: keys and values have other widths
            off = _apart(got, answer.output[only])
            agrees = np.ones(struck.shape, bool)
            if lse is not None and hypothesis.same_lse:
                agrees = _same_lse(lse[only], answer.lse[only], None if lse_near is None else lse_near[only])
            if (agrees[struck] if numbers else agrees).mean() <= EXPLAINED:
                continue
        same = off <= near
        if numbers and same[finite].mean() <= EXPLAINED:
            continue
        shares = float(same[bad].mean()), 1.0 if bad.all() else float(same[~bad].mean())
        distance = float(np.minimum(off, 1.0).mean())
        if min(*shares, agrees.mean()) > EXPLAINED and distance < BETTER * least:
            best, least = hypothesis, distance
        distance = float(np.minimum(off[struck], 1.0).mean())
        if float(same[bad].mean()) > EXPLAINED and distance < BETTER * least_struck:
            best_struck, least_struck = hypothesis, distance
    if best is not None or best_struck is None or struck.all():
        return best
    text = f"Where it is wrong, and only there ({_where(struck, only)}): {best_struck.text}"
    return dataclasses.replace(best_struck, text=text)


def answer_of(problem: AttendProblem, hypothesis: Hypothesis, seen: Sequence[Terms], only: Sequence[int]) -> Answer:
    """What a fault would return for the tokens `only`, whose terms are `seen`; a sum's rule has no error bound."""
    if hypothesis.average is None:
        return attend(hypothesis.problem, hypothesis.rules, only)
    tokens, heads = problem.query.shape[:2]
    output, lse = np.zeros((tokens, heads, problem.values.shape[-1])), np.full((tokens, heads), -np.inf)
    for t in seen:
        output[t.token, t.head], lse[t.token, t.head] = hypothesis.average(t)
    return Answer(output, np.zeros_like(output), lse, np.zeros_like(lse))


def _where(struck: np.ndarray, only: list[int]) -> str:
    """Tokens and heads of which something is wrong, in words."""
    heads = np.flatnonzero(struck.any(0)).tolist()
    if len(heads) < struck.shape[1]:
        return f"heads {', '.join(map(str, heads))}"
    tokens = [only[i] for i in np.flatnonzero(struck.any(1)).tolist()]
    return f"tokens {', '.join(map(str, tokens))} of those looked at"


def _apart(got: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Relative distance; 0 between two that are no numbers, 1 between a number and one that is not."""
    with np.errstate(all="ignore"):
        off = np.abs(answer - got) / (np.maximum(np.abs(answer), np.abs(got)) + 1e-30)
    finite = np.isfinite(answer), np.isfinite(got)
    return np.where(finite[0] & finite[1], off, np.where(finite[0] | finite[1], 1.0, 0.0))


def _same_lse(got: np.ndarray, answer: np.ndarray, near: np.ndarray | None) -> np.ndarray:
    """Where two LSEs agree: close, or neither a finite number."""
    finite = np.isfinite(got), np.isfinite(answer)
    with np.errstate(all="ignore"):
        close = np.abs(got - answer) <= (LSE_NEAR if near is None else near) * (1 + np.abs(answer))
    return np.where(finite[0] & finite[1], close, ~finite[0] & ~finite[1])


def hypotheses(problem: AttendProblem) -> Iterator[Hypothesis]:
    """All known faults that make a difference to this problem, the plain ones first."""
    yield from plain(problem)
    yield from rarer(problem)


def rarer(problem: AttendProblem) -> Iterator[Hypothesis]:
    """Faults that are asked for where no plain one explains all."""
    for hint, clause, text, altered, rules in suspects(problem):
        yield Hypothesis(hint, clause, text, altered, rules, rare=True)
    for one in averages(problem):
        yield Hypothesis(one.hint, one.clause, one.text, problem, average=one.rule, rare=True)


def plain(problem: AttendProblem) -> Iterator[Hypothesis]:
    """Faults that are common enough to be believed of an output that is NaN wherever it is wrong."""
    spec, d = problem.spec, problem.query.shape[-1]

    def with_spec(hint: str, clause: str, text: str, **changes: object) -> Hypothesis:
        altered = AttentionSpec(**{**dataclasses.asdict(spec), **changes})  # type: ignore[arg-type]
        return Hypothesis(hint, clause, text, dataclasses.replace(problem, spec=altered))

    def with_rules(hint: str, clause: str, text: str, **rules: Callable) -> Hypothesis:
        return Hypothesis(hint, clause, text, problem, Rules(**rules))

    scale = spec.scale
    for factor, hint, text in (
        (d**-0.5, "scale-twice", f"The output is that of a scale multiplied by 1/√{d} once more: scaled twice."),
        (scale, "scale-twice", "The output is that of a scale applied twice."),
        (1 / scale, "no-scale", "The output is that of scale 1: the scale was not applied."),
        (LOG2E, "log2e-twice", "The output is that of logits multiplied by log2 e once too often."),
        (1 / LOG2E, "log2e-missing", "The output is that of exp2 of natural logits: log2 e is missing."),
        *(
            (
                (d / padded) ** 0.5,
                "padded-scale",
                f"The output is that of the scale of head dim {padded}: a padded one.",
            )
            for padded in sorted({1 << (d - 1).bit_length(), -(-d // 64) * 64, d + d // 4} - {d})
        ),
    ):
        if abs(factor - 1) > 1e-6:
            yield with_spec(hint, "attend.2", text, scale=scale * factor)
    for dtype in ("bfloat16", "float16"):
        rounded = float(round_to(spec.scale, dtype))
        if rounded != float(np.float32(spec.scale)):
            yield with_spec("rounded-scale", "attend.2", f"The scale was rounded to {dtype}.", scale=rounded)
    if spec.window is not None:
        yield with_spec("no-window", "attend.4", "The output is that of no window at all.", window=None)
        wider = f"The output is that of a window of {spec.window + 1}: the window counts the token itself."
        yield with_spec("window-plus-one", "attend.4", wider, window=spec.window + 1)
        if spec.window > 1:
            narrower = f"The output is that of a window of {spec.window - 1} tokens."
            yield with_spec("window-minus-one", "attend.4", narrower, window=spec.window - 1)
    if spec.soft_cap is not None:
        yield with_spec("no-soft-cap", "attend.5", "The output is that of no soft cap.", soft_cap=None)
        before = "The soft cap came before the scale."
        yield with_spec("cap-before-scale", "attend.5", before, soft_cap=spec.soft_cap * spec.scale)
    yield with_rules("length-minus-one", "pages.3", "The last token of every row was left out.", visible=_shorter)
    if spec.causal:
        yield with_spec("not-causal", "attend.3", "The output is that of no causal mask.", causal=False)
        ignored = "A chunk of a prompt sees its own tokens only: what was cached before it is ignored."
        yield with_rules("prefix-ignored", "attend.3", ignored, visible=_own_chunk)
        whole_pages = functools.partial(_own_pages, page=problem.table.tokens_per_page)
        yield with_rules("prefix-ignored", "attend.3", ignored, visible=whole_pages)
        yield with_rules("causal-strict", "attend.3", "A token does not see itself.", visible=_strict)
        yield with_rules(
            "no-offset", "attend.3", "The causal mask is top-left aligned: n − q is missing.", visible=_top_left
        )
    else:
        yield with_spec("causal", "attend.13", "The output is that of a causal mask.", causal=True)
    if problem.sinks is not None:
        without = dataclasses.replace(problem, sinks=None)
        yield Hypothesis("no-sinks", "attend.1", "The output is that of no sinks.", without)
    for field in ("key_scale", "value_scale"):
        if (given := getattr(problem, field)) not in (None, 1.0):
            name = field.replace("_", " ")
            without, twice = (dataclasses.replace(problem, **{field: x}) for x in (None, given * given))
            yield Hypothesis(field.replace("_", "-"), "attend.14", f"The {name} was ignored.", without)
            yield Hypothesis(f"{field.replace('_', '-')}-twice", "attend.14", f"The {name} was applied twice.", twice)
    if sibling := _SIBLINGS.get(problem.kv_dtype):
        text = f"The bytes of the pool were read as {sibling}."
        yield Hypothesis("encoding", "attend.14", text, dataclasses.replace(problem, kv_dtype=sibling))
    for whole in sorted({d // tile * tile for tile in (16, 32, 64, 128)} - {0, d}):
        cut = problem.query.copy()
        cut[..., whole:] = 0
        text = f"q·k runs over the first {whole} of {d} elements of a head."
        yield Hypothesis("head-dim-cut", "attend.2", text, dataclasses.replace(problem, query=cut))
    modulo = "Query head h reads KV head h mod KV heads instead of h // group."
    yield with_rules("gqa-modulo", "attend.6", modulo, key_head=_modulo, value_head=_modulo)
    if problem.keys.shape[2] > 1:
        for step, what in ((-1, "the next lower"), (1, "the next higher")):
            turned = functools.partial(_turned, step=step)
            text = f"Query heads read {what} KV head, counted around."
            yield with_rules("kv-heads-turned", "attend.6", text, key_head=turned, value_head=turned)
    if problem.keys.shape[2] > 2:
        reverse = "KV heads are read in reverse."
        yield with_rules("kv-heads-reversed", "attend.6", reverse, key_head=_reversed, value_head=_reversed)
    yield with_rules("value-head-0", "attend.6", "Values come from KV head 0.", value_head=lambda h, heads, kv: 0)
    swapped = dataclasses.replace(problem, values=problem.keys)
    yield Hypothesis("k-as-v", "attend.1", "Keys were used as values.", swapped)
    shifted = dataclasses.replace(problem, values=_next_slot(problem))
    yield Hypothesis("value-slot", "pages.3", "Values come from the slot before their keys'.", shifted)
    yield with_rules(
        "page-order", "pages.3", "Pages were read in the order of their ids, not of the list.", pages=_sorted
    )
    if (shifted := _without_idle_rows(problem)) is not None:
        counted = "Rows are counted without those that have no new token, so later rows use another's pages."
        yield Hypothesis("row-shift", "attend.12", counted, shifted)
    for rule, text in (
        (_one_entry_on, "The page list was read one entry further on."),
        (_last_one_on, "In place of a row's last page the entry after it was read."),
        (_last_is_first, "In place of a row's last page its first was read."),
    ):
        yield with_rules("page-entry", "pages.3", text, pages=rule)
    yield with_rules("row-0-table", "attend.12", "Row 0's pages were used for every row.", pages=_row_0)
    ids = problem.table.page_ids[: problem.table.page_offsets[-1]]
    if len(np.unique(ids)) < len(ids):
        for first, what in ((True, "first"), (False, "last")):
            text = f"A page that several rows list is read by the {what} of them only."
            yield with_rules("shared-pages", "steps.2", text, pages=functools.partial(_unshared, first=first))
    for bits in (7, 8, 15, 16):
        if problem.keys.shape[0] > 1 << bits:
            text = f"Page ids were cut to {bits} bits."
            yield with_rules("page-id-width", "pages.4", text, pages=_cut(bits))
    if problem.layer:
        yield with_rules("layer", "pages.4", "Pages of layer 0 were read.", pages=lambda p, r: p.table.pages_of(r))


def _strict(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    first, _ = _visible(position, query_len, kv_len, causal=causal, window=window)
    return (first, position) if position else (0, 1)


def _own_chunk(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    first, end = _visible(position, query_len, kv_len, causal=causal, window=window)
    return (max(first, kv_len - query_len) if query_len > 1 else first), end


def _own_pages(
    position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None, page: int
) -> tuple[int, int]:
    first, end = _visible(position, query_len, kv_len, causal=causal, window=window)
    return (max(first, (kv_len - query_len) // page * page) if query_len > 1 else first), end


def _top_left(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    return _visible(position - kv_len + query_len, query_len, kv_len, causal=causal, window=window)


def _shorter(position: int, query_len: int, kv_len: int, *, causal: bool, window: int | None) -> tuple[int, int]:
    first, end = _visible(position, query_len, kv_len, causal=causal, window=window)
    return first, min(end, max(kv_len - 1, 1))


def _modulo(head: int, heads: int, kv_heads: int) -> int:
    return head % kv_heads


def _turned(head: int, heads: int, kv_heads: int, *, step: int) -> int:
    return (head // (heads // kv_heads) + step) % kv_heads


def _reversed(head: int, heads: int, kv_heads: int) -> int:
    return kv_heads - 1 - head // (heads // kv_heads)


def _sorted(problem: AttendProblem, row: int) -> np.ndarray:
    return np.sort(_pages(problem, row))


def _without_idle_rows(problem: AttendProblem) -> AttendProblem | None:
    """The k-th row that has tokens with the length and pages of row k; None if no row is without tokens."""
    table = problem.table
    used = np.flatnonzero(table.query_lens > 0)
    if np.array_equal(used, np.arange(len(used))):
        return None
    source = np.arange(table.num_rows)
    source[used] = np.arange(len(used))
    pages = [table.pages_of(r) for r in source.tolist()]
    fields = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
    fields |= {
        "page_offsets": np.concatenate([[0], np.cumsum([len(p) for p in pages])]),
        "page_ids": np.concatenate(pages),
        "kv_lens": table.kv_lens[source],
    }
    return dataclasses.replace(problem, table=PageTable.trusted(**fields))


def _entries(problem: AttendProblem, row: int) -> tuple[np.ndarray, int]:
    """Pool rows of every entry of the page list, and where the row's begin."""
    table = problem.table
    return problem.layer * table.num_pages + table.page_ids.astype(np.int64), int(table.page_offsets[row])


def _one_entry_on(problem: AttendProblem, row: int) -> np.ndarray:
    every, begin = _entries(problem, row)
    return np.roll(every, -1)[begin : begin + len(problem.table.pages_of(row))]


def _last_one_on(problem: AttendProblem, row: int) -> np.ndarray:
    pages = _pages(problem, row).copy()
    pages[-1:] = _one_entry_on(problem, row)[-1:]
    return pages


def _last_is_first(problem: AttendProblem, row: int) -> np.ndarray:
    pages = _pages(problem, row).copy()
    pages[-1:] = pages[:1]
    return pages


def _row_0(problem: AttendProblem, row: int) -> np.ndarray:
    need = len(problem.table.pages_of(row))
    pages = _pages(problem, 0)
    return np.resize(pages, need) if len(pages) else pages


def _unshared(problem: AttendProblem, row: int, *, first: bool) -> np.ndarray:
    """The row's pages, the sentinel in place of those that an earlier row lists too, or else a later one."""
    table = problem.table
    others = range(row) if first else range(row + 1, table.num_rows)
    taken = np.concatenate([np.zeros(0, np.int32), *(table.pages_of(r) for r in others)])
    pages = table.pages_of(row)
    return problem.layer * table.num_pages + np.where(np.isin(pages, taken), 0, pages).astype(np.int64)


def _cut(bits: int) -> Callable[[AttendProblem, int], np.ndarray]:
    return lambda problem, row: _pages(problem, row) & ((1 << bits) - 1)


def _next_slot(problem: AttendProblem) -> np.ndarray:
    values = problem.values.copy()
    table = problem.table
    for row in range(table.num_rows):
        n = int(table.kv_lens[row])
        j = np.arange(n)
        page, offset = _pages(problem, row)[j // table.tokens_per_page], j % table.tokens_per_page
        values[page, offset] = np.roll(problem.values[page, offset], 1, axis=0)
    return values
