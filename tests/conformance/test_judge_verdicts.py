"""The judge's verdicts and what it says: each planted fault is failed, and named by its clause and hint."""

import dataclasses
import functools

import numpy as np
import pytest

from conformance import oracle
from conformance.case import Case
from conformance.formats import encode, format_of, is_nan
from conformance.hypotheses import plain
from conformance.judge import expectation, judge_attend, judge_move
from conformance.vectors import generate
from paged.common.capabilities import NUMERIC_MODELS

BASE = {
    "dtype": "bfloat16",
    "page": 16,
    "num_pages": 24,
    "kv_heads": 2,
    "head_dim": 32,
    "q_heads": 4,
    "query_lens": [7, 3, 1, 0, 2],
    "kv_lens": [53, 9, 130, 0, 0],
    "rung": {"rows": 6, "tokens": 15, "listed_pages": 20, "max_query_len": 8, "max_kv_len": 256},
    "scale": 0.15,
    "layers": 2,
    "layer": 1,
}
MOVE = {"dtype": "bfloat16", "page": 4, "num_pages": 9, "kv_heads": 2, "head_dim": 8, "layers": 3, "layer": 1}


@functools.cache
def prepared(generator: str, *extra):
    params = {**BASE, **dict(extra)}
    params = {k: list(v) if isinstance(v, tuple) else v for k, v in params.items()}
    v = generate(Case(id="v", tier=2, level="core", generator=generator, params=params, clause=("attend.1",)))
    return v, expectation(v, NUMERIC_MODELS["N1"])


def words_of(answer: oracle.Answer, dtype: str) -> np.ndarray:
    words = encode(answer.output, dtype)
    return np.where(words == format_of(dtype).sign_bit, 0, words).astype(words.dtype)


def right(generator: str, *extra):
    v, expected = prepared(generator, *extra)
    answer = oracle.attend(v.problem)
    return v, expected, words_of(answer, v.problem.dtype), answer.lse.astype(np.float32)


LADDER = (("query_lens", (1, 0, 1)), ("kv_lens", (64, 0, 128)))


@pytest.mark.parametrize("generator", ["census", "address", "generic", "dyadic"])
def test_the_right_answer_passes(generator):
    v, expected, words, lse = right(generator)
    result = judge_attend(v.problem, expected, words, lse, id="x/y")
    assert (result.id, result.status, result.clause) == ("x/y", "pass", None), result.diagnosis
    assert result.elements == words.size
    assert result.output.startswith("sha256:")
    assert judge_attend(v.problem, expected, words, None).status == "pass"


def test_the_digest_covers_decided_elements_only():
    v, expected, words, lse = right("generic")
    open_ = np.argwhere(expected.low != expected.high)[0]
    other = words.copy()
    at = tuple(open_)
    other[at] = expected.low[at] if words[at] != expected.low[at] else expected.high[at]
    one, two = (judge_attend(v.problem, expected, w, lse) for w in (words, other))
    assert one.status == two.status == "pass"
    assert one.output == two.output
    assert one.decided < one.elements


PLANTED = [
    ("generic", (("soft_cap", 3.0), ("sinks", "random"), ("temperature", 3.0))),
    ("generic", (("window", 19),)),
    ("generic", (("causal", False),)),
    ("census", (("window", 19),)),
    ("census", ()),
    ("address", ()),
    ("ladder", LADDER),
    ("ladder", (("query_lens", (1, 1)), ("kv_lens", (48, 96)), ("soft_cap", 1.0))),
]
ALIKE = {
    # In rows of one new token, a token that does not see itself and a lost last token are one fault.
    ("ladder", "causal-strict"): {"length-minus-one"},
    # Near its rungs a ladder's capped logits are almost linear.
    ("ladder", "scale-twice"): {"cap-before-scale"},
}


@pytest.mark.parametrize(("generator", "extra"), PLANTED)
def test_known_faults_are_named(generator, extra):
    v, expected = prepared(generator, *extra)
    p = v.problem
    named = 0
    for fault in plain(p):
        with np.errstate(all="ignore"):
            answer = oracle.attend(fault.problem, fault.rules)
        result = judge_attend(p, expected, words_of(answer, p.dtype), answer.lse.astype(np.float32))
        if result.status == "pass" or not result.details["wrong"]:
            continue  # this family cannot see this fault, or in the LSE alone
        assert result.status == "fail"
        named += 1
        wanted = {fault.hint} | ALIKE.get((generator, fault.hint), set())
        assert result.details["hint"] in wanted, f"{fault.hint}: {result.diagnosis}"
        if result.details["hint"] == fault.hint:
            assert result.clause == fault.clause
    assert named >= 6


def test_an_address_says_which_token_was_read():
    v, expected, words, lse = right("address")
    wrong = words.copy()
    wrong[10, 0] = words[0, 0]  # row 2's token gets what a token of row 0 asked for
    result = judge_attend(v.problem, expected, wrong, lse)
    j = int(v.explain["target"][0, 0])
    page = int(v.problem.table.pages_of(0)[j // 16])
    assert result.clause == "attend.12"
    assert f"read page {page}, slot {j % 16}, KV head 0 of row 0, layer 1; wanted page" in result.diagnosis
    assert "(row 2, position" in result.diagnosis


def test_a_census_counts_tokens():
    v, expected, words, _ = right("census")
    counted = oracle.attend(v.problem, oracle.Rules(visible=lambda position, q, n, **k: (1, position + 1)))
    result = judge_attend(v.problem, expected, words_of(counted, "bfloat16"), None)
    assert "left out tokens 0" in result.diagnosis
    assert "must count tokens 0..46 once each, 47 in all; it counted about 46" in result.diagnosis
    past = oracle.attend(v.problem, oracle.Rules(visible=lambda position, q, n, **k: (0, min(n, position + 2))))
    result = judge_attend(v.problem, expected, words_of(past, "bfloat16"), None)
    assert result.clause == "attend.3"
    double = words.copy()
    double[0, 0, 5] = encode(2 * 64 / 47, "bfloat16")
    result = judge_attend(v.problem, expected, double, None)
    assert "token 5 2 times" in result.diagnosis


def test_a_ladder_gives_the_effective_scale():
    v, expected = prepared("ladder", *LADDER)
    halved = dataclasses.replace(v.problem, spec=dataclasses.replace(v.problem.spec, scale=0.15 * 0.7))
    result = judge_attend(v.problem, expected, words_of(oracle.attend(halved), "bfloat16"), None)
    assert result.clause == "attend.2"
    assert "as if logits were 0.7" in result.diagnosis
    assert "effective scale of 0.10" in result.diagnosis


def test_nan_is_poison():
    v, expected, words, lse = right("generic")
    words = words.copy()
    words[4, 2, :3] = 0x7FC0
    result = judge_attend(v.problem, expected, words, lse)
    assert (result.clause, result.details["hint"]) == ("attend.7", "poison")
    assert "3 elements are NaN" in result.diagnosis


@pytest.mark.parametrize(
    ("token", "clause", "text"),
    [(14, "attend.9", "padding token 14"), (12, "attend.8", "token 12 of row 4, which is empty")],
)
@pytest.mark.parametrize("word", [0x3F80, 0x7FC0])
def test_tokens_that_see_nothing_have_output_plus_zero(token, clause, text, word):
    v, expected, words, lse = right("generic")
    words = words.copy()
    words[token, 1, 5] = word
    result = judge_attend(v.problem, expected, words, lse)
    assert (result.status, result.clause) == ("fail", clause)
    assert text in result.diagnosis


@pytest.mark.parametrize("token", [12, 14])
def test_a_zero_of_a_token_that_sees_nothing_is_plus_zero(token):
    v, expected, words, lse = right("generic")
    words = words.copy()
    words[token, 1, 5] = 0x8000
    assert judge_attend(v.problem, expected, words, lse).clause == "attend.10"


def test_extra_weight_in_the_row_sum_is_named():
    """Masked positions with a finite logit and no value: right outputs times one factor, another LSE."""
    for extra, clause, hint in (
        ((), "attend.7", "masked-weight"),
        ((("soft_cap", 2.0),), "attend.5", "mask-before-cap"),
        ((("sinks", "random"),), "attend.1", "sinks"),
    ):
        v, expected = prepared("generic", *extra)
        answer = oracle.attend(v.problem)
        thinner = dataclasses.replace(answer, output=answer.output * 0.73)
        lse = (answer.lse - np.log(0.73)).astype(np.float32)
        result = judge_attend(v.problem, expected, words_of(thinner, "bfloat16"), lse)
        assert (result.clause, result.details["hint"]) == (clause, hint), result.diagnosis
        assert "is the right one times 0.7" in result.diagnosis


def test_too_few_bits_are_named():
    v, expected, words, lse = right("dyadic")
    coarse = (words + 2) & np.uint16(0xFFFC)
    result = judge_attend(v.problem, expected, coarse, lse)
    assert (result.clause, result.details["hint"]) == ("attend.1", "reduced-precision"), result.diagnosis


def test_overflow_is_told_from_poison_by_the_lse():
    v, expected, words, lse = right("generic")
    words, lse = words.copy(), lse.copy()
    words[4, 2], lse[4, 2] = 0x7FC0, np.inf
    result = judge_attend(v.problem, expected, words, lse)
    assert (result.clause, result.details["hint"]) == ("attend.1", "overflow")


def test_a_computed_zero_is_plus_zero():
    v, expected, words, lse = right("census")
    words = words.copy()
    token, head, dim = np.argwhere(words[:10] == 0)[0]
    words[token, head, dim] = 0x8000
    result = judge_attend(v.problem, expected, words, lse)
    assert (result.clause, result.details["hint"]) == ("attend.10", "minus-zero")


@pytest.mark.parametrize(
    ("change", "hint", "clause"),
    [
        (lambda lse: lse * np.float32(1.4426950408889634), "lse-base", "attend.11"),
        (lambda lse: np.where(np.isfinite(lse), -lse, lse), "lse-sign", "attend.11"),
        (lambda lse: lse + np.float32(0.01), "lse", "attend.11"),
        (lambda lse: np.where(np.isneginf(lse), np.float32(np.inf), lse), "lse-empty", "attend.8"),
        (lambda lse: np.where(np.arange(15)[:, None] == 14, np.float32(0), lse), "lse-empty", "attend.9"),
        (lambda lse: np.where(np.arange(15)[:, None] == 2, np.float32(np.nan), lse), "lse", "attend.11"),
    ],
)
def test_a_wrong_lse_is_named(change, hint, clause):
    v, expected, words, lse = right("census")
    result = judge_attend(v.problem, expected, words, change(lse).astype(np.float32))
    assert (result.status, result.details["hint"], result.clause) == ("fail", hint, clause), result.diagnosis
    assert "the output is right" in result.diagnosis


def test_reduced_precision_is_caught_by_the_statistic():
    """Every element within its worst-case range, all of them off by more than honest rounding explains."""
    extra = (("query_lens", (4, 4)), ("kv_lens", (96, 200)), ("statistic", True))
    v, expected, words, lse = right("generic", *extra)
    assert judge_attend(v.problem, expected, words, lse).details["rms_ratio"] < 1.0
    pushed = np.where(expected.exact >= 0, expected.high, expected.low)
    live = (v.problem.table.positions() >= 0)[:, None, None]
    result = judge_attend(v.problem, expected, np.where(live, pushed, words).astype(words.dtype), lse)
    assert (result.status, result.details["hint"], result.details["wrong"]) == ("fail", "reduced-precision", 0)
    assert "times what the numeric model explains" in result.diagnosis


def test_wrong_forms_are_errors():
    v, expected, words, lse = right("generic")
    for out, other in (
        (words[:-1], lse),
        (words.astype(np.uint32), lse),
        (words.tolist(), lse),
        (words, lse.astype(np.float64)),
        (words, lse[:, :2]),
    ):
        result = judge_attend(v.problem, expected, out, other)
        assert result.status == "error"
        assert "expected" in result.diagnosis


@functools.cache
def moved(generator: str, **params):
    return generate(
        Case(id="m", tier=1, level="move", generator=generator, params={**MOVE, **params}, clause=("append.1",))
    ).problem


def changed(problem, edit):
    keys, values = problem.expected_keys.copy(), problem.expected_values.copy()
    edit(keys, values)
    return judge_move(problem, keys, values, storage="words")


def append_problem():
    return generate(
        Case(
            id="m",
            tier=1,
            level="move",
            generator="append_slots",
            params={**MOVE, "tokens": 18},
            clause=("append.1",),
        )
    ).problem


def absolute(problem, token):
    slot = int(problem.slots[token])
    return problem.layer * problem.num_pages + slot // 4, slot % 4


def test_append_verdicts():
    p = append_problem()
    live = np.flatnonzero(p.slots >= 0).tolist()
    pad = int(np.flatnonzero(p.slots < 0)[0])
    a, b = absolute(p, live[0]), absolute(p, live[1])
    free = next((p.num_pages * 2 + page, s) for page in range(1, 9) for s in range(4) if page * 4 + s not in p.slots)

    def edits():
        yield lambda k, v: None, "pass", None, None
        yield lambda k, v: k.__setitem__(a, p.keys[a]), "append.1", "dropped", f"token {live[0]} was not written"
        yield lambda k, v: v.__setitem__(free, p.new_values[pad]), "append.2", "padding", f"padding token {pad} was"
        yield lambda k, v: k.__setitem__(free, p.new_keys[live[0]]), "append.1", "layer", "instead of layer 1, page"
        yield lambda k, v: k.__setitem__((*free, 0, 3), 7), "append.3", "bystander", "was not to be written"
        yield lambda k, v: k.__setitem__(a, k[a][::-1]), "append.1", "heads", "the KV heads of token"
        yield lambda k, v: k.__setitem__(a, p.new_keys[live[1]]), "append.1", "other-token", f"holds token {live[1]}"
        yield lambda k, v: v.__setitem__(b, p.new_values[pad]), "append.2", "other-token", f"padding token {pad}"

    for edit, clause, hint, text in edits():
        result = changed(p, edit)
        if clause == "pass":
            assert result.status == "pass"
            assert result.decided == result.elements
            continue
        assert (result.status, result.clause, result.details["hint"]) == ("fail", clause, hint), result.diagnosis
        assert text in result.diagnosis


def test_append_that_computes():
    case = Case(
        id="m",
        tier=1,
        level="move",
        generator="append_slots",
        params={**MOVE, "tokens": 18, "fill": "special"},
        clause=("append.4",),
    )
    p = generate(case).problem
    live = p.slots >= 0
    rows, offsets = 9 + p.slots[live] // 4, p.slots[live] % 4

    def zero(k, v):
        k[rows, offsets] = np.where(k[rows, offsets] == 0x8000, 0, k[rows, offsets])

    result = changed(p, zero)
    assert (result.clause, result.details["hint"]) == ("append.4", "minus-zero"), result.diagnosis

    def other_nan(k, v):
        at = rows, offsets
        k[at] = np.where(is_nan(k[at], "bfloat16"), k[at] ^ 0x8001, k[at])

    keys, values = p.expected_keys.copy(), p.expected_values.copy()
    other_nan(keys, values)
    assert judge_move(p, keys, values, storage="typed").status == "pass"
    result = judge_move(p, keys, values, storage="words")
    assert (result.clause, result.details["hint"]) == ("append.4", "nan")
    same = judge_move(p, p.expected_keys, p.expected_values, storage="words")
    assert judge_move(p, keys, values, storage="typed").output == same.output


def test_sentinels_are_compared_to_nothing():
    p = append_problem()

    def spoil(k, v):
        k[[0, 9, 18]] = 0x1234

    assert changed(p, spoil).status == "pass"


def test_scrub_verdicts():
    p = generate(
        Case(id="m", tier=1, level="move", generator="scrub", params={**MOVE, "pages": 6}, clause=("pages.1",))
    ).problem
    named = int(p.pages[p.pages >= 0][0])
    other = next(r for r in range(27) if r % 9 and r not in p.pages)
    for edit, hint in (
        (lambda k, v: v.__setitem__(slice(None), p.values), "values-missed"),
        (lambda k, v: k.__setitem__(other, 0), "bystander"),
        (lambda k, v: k.__setitem__((named, 0, 0, 0), 0x8000), "missed"),
    ):
        result = changed(p, edit)
        assert (result.clause, result.details["hint"]) == ("pages.1", hint), result.diagnosis


def test_copy_verdicts():
    p = generate(
        Case(
            id="m",
            tier=1,
            level="move",
            generator="copy_pages",
            params={**MOVE, "pages": 6, "padding": "none"},
            clause=("pages.2",),
        )
    ).problem

    def in_turn(k, v):
        k[:] = p.keys
        for s, t in zip(p.source, p.target):
            k[t] = k[s]

    def backwards(k, v):
        k[:], v[:] = p.keys, p.values
        k[p.source], v[p.source] = p.keys[p.target], p.values[p.target]

    assert p.source[4] not in p.target
    assert changed(p, in_turn).details["hint"] == "order"
    assert changed(p, backwards).details["hint"] == "reversed"
    assert changed(p, lambda k, v: k.__setitem__(p.target[5], p.keys[p.target[5]])).details["hint"] == "missed"
