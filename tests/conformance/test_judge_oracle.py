"""The oracle against exact rational arithmetic, and five wrong oracles that this comparison must catch."""

import dataclasses
import functools
from fractions import Fraction

import numpy as np
import pytest

from conformance import oracle
from conformance.case import AttendProblem
from conformance.formats import decode, encode
from paged.common import AttentionSpec, build_page_table

BITS = 240
ONE = 1 << BITS


def exp_bounds(x: Fraction) -> tuple[Fraction, Fraction]:
    """Rational bounds of e^x, by a series whose remainder is at most the last term used, after halving x."""
    halvings = max(0, int(abs(x)).bit_length() + 1)
    y = int(x * ONE) >> halvings  # |y / ONE| <= 1/2, truncated: off by at most one unit
    term, total, k = ONE, ONE, 1
    while term:
        term = term * y // (k * ONE)
        total += term
        k += 1
        if term == -1:  # floor division of a vanishing negative term
            break
    error = k + 4
    low, high = total - error, total + error
    for _ in range(halvings):
        low, high = low * low // ONE, high * high // ONE + 1
    return Fraction(low, ONE), Fraction(high, ONE)


def test_exp_bounds_are_tight_and_right():
    for x in (Fraction(0), Fraction(1), Fraction(-40), Fraction(7, 3), Fraction(-1, 10**9)):
        low, high = exp_bounds(x)
        assert low <= high
        assert high - low < Fraction(1, 2**180) * (1 + high)
        assert float(low) == pytest.approx(np.exp(float(x)), rel=1e-14)


def exact_logit(query, key, factor: Fraction, cap: Fraction | None) -> tuple[Fraction, Fraction]:
    s = factor * sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(query, key))
    if cap is None:
        return s, s
    low, high = exp_bounds(2 * s / cap)
    ends = sorted((cap * (low - 1) / (low + 1), cap * (high - 1) / (high + 1)))
    return ends[0], ends[1]


def rational_attend(p: AttendProblem):
    """For every live (token, head): bounds of each output element and of Σ exp(logit)."""
    t, spec = p.table, p.spec
    heads, kv_heads = p.query.shape[1], p.keys.shape[2]
    as_scale = lambda x: Fraction(1) if x is None else Fraction(float(np.float32(x)))  # noqa: E731
    factor = Fraction(float(np.float32(spec.scale))) * as_scale(p.key_scale)
    value_scale = as_scale(p.value_scale)
    cap = None if spec.soft_cap is None else Fraction(spec.soft_cap)
    for row in range(t.num_rows):
        n, q = int(t.kv_lens[row]), int(t.query_lens[row])
        for i in range(q if n else 0):
            token = int(t.query_offsets[row]) + i
            for head in range(heads):
                kv = head * kv_heads // heads
                x, values = [], []
                for j in range(n):
                    at = n - q + i
                    if (spec.causal and j > at) or (spec.window is not None and j <= at - spec.window):
                        continue
                    page = p.layer * t.num_pages + int(t.pages_of(row)[j // t.tokens_per_page])
                    slot = page, j % t.tokens_per_page, kv
                    low, high = exact_logit(
                        decode(p.query[token, head], p.dtype), decode(p.keys[slot], p.kv_dtype), factor, cap
                    )
                    x.append((exp_bounds(low)[0], exp_bounds(high)[1]))
                    values.append([value_scale * Fraction(float(v)) for v in decode(p.values[slot], p.kv_dtype)])
                total = [sum(b[e] for b in x) for e in (0, 1)]
                if p.sinks is not None:
                    sink = exp_bounds(Fraction(float(p.sinks[head])))
                    total = [total[0] + sink[0], total[1] + sink[1]]
                out = []
                for e in range(len(values[0])):
                    tops = [sum(b[end] * v[e] for b, v in zip(x, values)) for end in (0, 1)]
                    widest = sum((b[1] - b[0]) * abs(v[e]) for b, v in zip(x, values))
                    quotient = [top / tot for top in (tops[0], tops[1]) for tot in total]
                    out.append((min(quotient) - widest, max(quotient) + widest))
                yield token, head, out, total


def random_problem(seed: int, *, dtype="bfloat16", kv_dtype=None, query_lens=(3, 1, 0, 2), kv_lens=(7, 4, 3, 2), **kw):
    g = np.random.default_rng(seed)
    kv_dtype = kv_dtype or dtype
    size, num_pages, d = 3, 12, kw.pop("head_dim", 5)
    layers, layer = kw.pop("num_layers", 2), 1
    ids = iter((1 + g.permutation(num_pages - 1)).tolist())
    pages = [[next(ids) for _ in range(-(-n // size))] for n in kv_lens]
    table = build_page_table(
        query_lens=list(query_lens), kv_lens=list(kv_lens), pages=pages, tokens_per_page=size, num_pages=num_pages
    )
    table = table.pad(rows=6, tokens=9, listed_pages=11, max_query_len=4, max_kv_len=16)
    words = lambda *shape, of: encode(g.standard_normal(shape) * kw.get("spread", 1.5), of)  # noqa: E731
    extras = {k: kw.pop(k) for k in ("sinks", "key_scale", "value_scale") if k in kw}
    kw.pop("spread", None)
    return AttendProblem(
        dtype=dtype,
        kv_dtype=kv_dtype,
        table=table,
        spec=AttentionSpec(**({"scale": d**-0.5} | kw)),
        query=words(table.num_tokens, 4, d, of=dtype),
        keys=words(layers * num_pages, size, 2, d, of=kv_dtype),
        values=words(layers * num_pages, size, 2, d, of=kv_dtype),
        num_layers=layers,
        layer=layer,
        **extras,
    )


def cancelling():
    """Logits of order 1 left over from products of order 10^7: float64 keeps half of its digits."""
    p = random_problem(9, dtype="float32", head_dim=6)
    query, keys = decode(p.query, "float32"), decode(p.keys, "float32")
    query[..., :2] = 4097.0
    keys[..., 0] = np.rint(1e7 * keys[..., 0]) / 1024
    keys[..., 1] = -keys[..., 0] + keys[..., 2] / 4096
    return dataclasses.replace(p, query=encode(query, "float32"), keys=encode(keys, "float32"))


SINKS = np.array([0.5, -1.0, 3.0, 0.0], np.float32)
PROBLEMS = {
    "plain": lambda: random_problem(0),
    "float16 window": lambda: random_problem(1, dtype="float16", window=3),
    "float32 cap": lambda: random_problem(2, dtype="float32", soft_cap=2.0, spread=3.0),
    "sinks": lambda: random_problem(3, sinks=SINKS, window=2),
    "non-causal": lambda: random_problem(4, causal=False),
    "non-causal window": lambda: random_problem(5, causal=False, window=2, soft_cap=5.0),
    "fp8 with scales": lambda: random_problem(6, kv_dtype="float8_e4m3fn", key_scale=0.3, value_scale=1.7),
    "cancelling": cancelling,
    "peaked": lambda: random_problem(7, dtype="float32", spread=9.0, sinks=SINKS),
}


@functools.cache
def solved(name: str):
    problem = PROBLEMS[name]()
    return problem, list(rational_attend(problem))


def disagreement(name: str, rules: oracle.Rules = oracle.SEMANTICS) -> str | None:
    """First element for which the oracle's interval misses the exact value, or None."""
    problem, exact = solved(name)
    got = oracle.attend(problem, rules)
    for token, head, out, total in exact:
        for e, (low, high) in enumerate(out):
            value, error = float(got.output[token, head, e]), float(got.output_error[token, head, e])
            if not Fraction(value) - Fraction(error) <= low <= high <= Fraction(value) + Fraction(error):
                return f"output {token, head, e}: {value} ± {error} against {float(low)}"
        lse, error = float(got.lse[token, head]), float(got.lse_error[token, head])
        if not exp_bounds(Fraction(lse) - Fraction(error))[1] <= total[0]:
            return f"LSE {token, head}: {lse} ± {error} too high"
        if not total[1] <= exp_bounds(Fraction(lse) + Fraction(error))[0]:
            return f"LSE {token, head}: {lse} ± {error} too low"
    live = {token for token, *_ in exact}
    for token in set(range(problem.table.num_tokens)) - live:
        if got.output[token].any() or not np.all(np.isneginf(got.lse[token])):
            return f"token {token} sees nothing and has an answer"
    return None


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_interval_holds_the_exact_answer(name):
    assert disagreement(name) is None


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_interval_is_narrow(name):
    problem, _ = solved(name)
    got = oracle.attend(problem)
    size = max(1.0, float(np.abs(decode(problem.values, problem.kv_dtype)).max()) * (problem.value_scale or 1))
    loss = 1e6 if name == "cancelling" else 1
    assert got.output_error.max() < 1e-13 * size * loss
    assert got.lse_error.max() < 1e-11 * loss


def late(position, query_len, kv_len, **options):
    return oracle._visible(max(position - 1, 0), query_len, kv_len, **options)


def wide(position, query_len, kv_len, *, causal, window):
    return oracle._visible(position, query_len, kv_len, causal=causal, window=window and window + 1)


WRONG_RULES = {
    "causal off by one": ("plain", oracle.Rules(visible=late)),
    "window off by one": ("float16 window", oracle.Rules(visible=wide)),
    "key heads interleaved": ("plain", oracle.Rules(key_head=lambda h, heads, kv: h % kv)),
    "values of head 0": ("sinks", oracle.Rules(value_head=lambda h, heads, kv: 0)),
    "layer's rows not added": ("plain", oracle.Rules(pages=lambda p, row: p.table.pages_of(row))),
}


@pytest.mark.parametrize("fault", WRONG_RULES)
def test_a_wrong_rule_is_caught(fault):
    name, rules = WRONG_RULES[fault]
    assert disagreement(name, rules) is not None


WRONG_ARITHMETIC = {
    "cap left out": ("float32 cap", "_logits", lambda real: lambda q, k, factor, cap: real(q, k, factor, None)),
    "scale kept in float64": ("plain", "_logits", lambda real: lambda q, k, factor, cap: real(q, k, 5**-0.5, cap)),
    "sink left out": (
        "sinks",
        "_softmax_average",
        lambda real: lambda t: real(dataclasses.replace(t, sink=None)),
    ),
    "scales left out": ("fp8 with scales", "_float32_or_one", lambda real: lambda x: 1.0),
    "output off by 1e-12": (
        "plain",
        "_softmax_average",
        lambda real: lambda t: (real(t)[0] * (1 + 1e-12), *real(t)[1:]),
    ),
}


@pytest.mark.parametrize("fault", WRONG_ARITHMETIC)
def test_wrong_arithmetic_is_caught(fault, monkeypatch):
    name, attribute, plant = WRONG_ARITHMETIC[fault]
    monkeypatch.setattr(oracle, attribute, plant(getattr(oracle, attribute)))
    assert disagreement(name) is not None


def test_scenario_l13_an_empty_row_has_output_zero_and_lse_minus_infinity():
    p = random_problem(8, query_lens=(1, 2), kv_lens=(3, 0))
    got = oracle.attend(p)
    alone = oracle.attend(random_problem(8, query_lens=(1,), kv_lens=(3,)))
    assert not got.output[1:].any()
    assert np.all(np.isneginf(got.lse[1:]))
    assert np.all(np.isfinite(alone.lse[0]))


@pytest.mark.parametrize(("window", "want"), [(3, 4.0), (2, 4.5), (None, 2.5)])
def test_scenario_m3_a_window_counts_the_token_itself(window, want):
    table = build_page_table(query_lens=[1], kv_lens=[6], pages=[[1, 2]], tokens_per_page=3, num_pages=4)
    values = np.zeros((4, 3, 1, 1))
    values[1, :, 0, 0], values[2, :, 0, 0] = [0, 1, 2], [3, 4, 5]
    p = AttendProblem(
        dtype="float32",
        kv_dtype="float32",
        table=table,
        spec=AttentionSpec(scale=1.0, window=window),
        query=np.zeros((1, 1, 1), np.uint32),
        keys=encode(values, "float32"),
        values=encode(values, "float32"),
    )
    assert oracle.attend(p).output[0, 0, 0] == pytest.approx(want, abs=1e-12)


def test_scenario_m2_the_cap_comes_after_the_scale():
    table = build_page_table(query_lens=[1], kv_lens=[2], pages=[[1]], tokens_per_page=2, num_pages=2)
    keys, values = np.zeros((2, 2, 1, 1)), np.zeros((2, 2, 1, 1))
    keys[1, 0], values[1, 0] = 4.0, 1.0
    p = AttendProblem(
        dtype="float32",
        kv_dtype="float32",
        table=table,
        spec=AttentionSpec(scale=0.5, soft_cap=1.0),
        query=encode(np.ones((1, 1, 1)), "float32"),
        keys=encode(keys, "float32"),
        values=encode(values, "float32"),
    )
    assert oracle.attend(p).output[0, 0, 0] == pytest.approx(0.7239, abs=1e-4)
