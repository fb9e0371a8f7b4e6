"""Traces and cost models: what they hold, how they are fitted, and what is refused."""

import numpy as np
import pytest
from plane_helpers import make_plane

from paged.common import InvalidInputError
from paged.control import Slice
from paged.control.cost import CostModel
from paged.control.trace import Arrival, generate_trace, read_trace, trace_lines


def test_traces_are_equal_for_equal_seeds_and_have_the_asked_means():
    one = list(generate_trace(9000, rate=4.0, mean_prompt=300.0, mean_output=50.0, seed=5))  # three chunks
    assert one == list(generate_trace(9000, rate=4.0, mean_prompt=300.0, mean_output=50.0, seed=5))
    assert one[:100] == list(generate_trace(100, rate=4.0, mean_prompt=300.0, mean_output=50.0, seed=5))
    assert one != list(generate_trace(9000, rate=4.0, mean_prompt=300.0, mean_output=50.0, seed=6))
    arrivals = np.array([a.arrival_s for a in one])
    assert (np.diff(arrivals) >= 0).all()
    assert arrivals[-1] == pytest.approx(9000 / 4, rel=0.05)
    assert np.mean([a.prompt_tokens for a in one]) == pytest.approx(300, rel=0.03)
    assert np.mean([a.output_tokens for a in one]) == pytest.approx(50, rel=0.03)
    assert min(a.output_tokens for a in one) >= 1
    assert max(a.prompt_tokens for a in generate_trace(500, rate=1.0, max_prompt=200)) == 200


def test_a_written_trace_reads_back():
    trace = [Arrival(0.0, 5, 2), Arrival(1.5, [3, 1, 2], 1, -4), *generate_trace(20, rate=1.0, seed=1)]
    trace.sort(key=lambda a: a.arrival_s)
    lines = list(trace_lines(trace))
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert list(read_trace(lines)) == trace


def test_shared_prefixes_are_few_and_what_follows_is_each_ones_own():
    options = {"rate": 1.0, "mean_prompt": 10.0, "mean_output": 5.0, "seed": 3}
    plain, prefixed = (
        list(generate_trace(200, **options, **more)) for more in ({}, {"shared_prefix": 7, "num_prefixes": 3})
    )
    assert [(a.arrival_s, a.prompt_tokens + 7, a.output_tokens) for a in plain] == [
        (a.arrival_s, len(a.prompt_tokens), a.output_tokens) for a in prefixed
    ]
    assert len({tuple(a.prompt_tokens[:7]) for a in prefixed}) == 3
    assert len({tuple(a.prompt_tokens[7:8]) for a in prefixed}) == 200
    again = list(read_trace(trace_lines(prefixed)))
    assert [a.prompt_tokens for a in again] == [a.prompt_tokens.tolist() for a in prefixed]


GOOD = '{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 2}'


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", r"t, line 3 is not JSON"),
        ("[" * 100_000, r"t, line 3 is not JSON \(maximum recursion"),
        ("[]", r"t, line 3 must be an object with arrival_s, .*; got \[\]"),
        (GOOD[:-1] + ', "size": 3}', r"must be an object with .*'size'"),
        (GOOD.replace("1,", "0.5,"), r"line 3: arrival_s=0\.5 is before the line above \(1\.0\)"),
        (GOOD.replace("1,", "NaN,"), r"line 3\.arrival_s must be finite"),
        (GOOD.replace("1,", "-1,"), r"line 3: arrival_s must not be negative, got -1"),
        (GOOD.replace("4", "0"), r"line 3\.prompt_tokens must be in 1"),
        (GOOD.replace("4", "[]"), r"line 3: prompt_tokens is empty"),
        (GOOD.replace("4", "[1, -1]"), r"line 3\.prompt_tokens must be in 0"),
        (GOOD.replace("4", "true"), r"line 3\.prompt_tokens must be an int, got True"),
        (GOOD.replace("2}", "0}"), r"line 3\.output_tokens must be in 1"),
    ],
)
def test_a_wrong_line_is_named(line, text):
    lines = [GOOD, "", line]
    with pytest.raises(InvalidInputError, match=text):
        list(read_trace(lines, "t"))


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 1.0, "mean_prompt": -1.0}, {"rate": 1.0, "max_output": 0}])
def test_wrong_generator_arguments_are_refused_at_once(options):
    with pytest.raises(InvalidInputError, match=r"generate_trace\.(rate|mean_prompt|max_output) must be"):
        generate_trace(3, **options)


def samples(model: CostModel, noise=None):
    rng = np.random.default_rng(0)
    out = []
    for prefill, rows, kv in rng.integers(0, [2000, 64, 100_000], (40, 3)).tolist():
        seconds = model.step_s + prefill * model.prefill_token_s + rows * model.decode_row_s + kv * model.kv_token_s
        factor = 1 if noise is None else 1 + noise * rng.standard_normal()
        out.append({"prefill_tokens": prefill, "decode_rows": rows, "kv_tokens": kv, "seconds": seconds * factor})
    return out


TERMS = ("step_s", "prefill_token_s", "decode_row_s", "kv_token_s")


def test_a_fit_finds_the_coefficients():
    model = CostModel(step_s=3e-3, prefill_token_s=2e-5, decode_row_s=4e-5, kv_token_s=1e-7)
    fitted = CostModel.fit(samples(model))
    for term in TERMS:
        assert getattr(fitted, term) == pytest.approx(getattr(model, term), rel=1e-9)
    rough = CostModel.fit(samples(model, noise=0.02))
    for term in TERMS:
        assert getattr(rough, term) == pytest.approx(getattr(model, term), rel=0.2)


def test_a_fit_never_has_negative_coefficients():
    model = CostModel(step_s=3e-3, prefill_token_s=2e-5, decode_row_s=0.0, kv_token_s=1e-7)
    measured = [{**s, "seconds": s["seconds"] - s["decode_rows"] * 1e-6} for s in samples(model)]
    fitted = CostModel.fit(measured)
    assert fitted.decode_row_s == 0.0
    assert fitted.prefill_token_s == pytest.approx(2e-5, rel=0.05)


def test_seconds_of_a_padded_step():
    plane = make_plane(num_pages=20)
    a, b, c = plane.open(), plane.open(), plane.open()
    never = lambda pages: None  # noqa: E731
    plane.prepare([Slice(a, 0, 6), Slice(c, 0, 2)], never)
    table = plane.prepare([Slice(a, 6, 1), Slice(b, 0, 5), Slice(c, 2, 1)], never)
    padded = table.pad(rows=8, tokens=16, listed_pages=20, max_query_len=16, max_kv_len=64)
    model = CostModel(step_s=1.0, prefill_token_s=10.0, decode_row_s=100.0, kv_token_s=1000.0)
    expected = 1 + 5 * 10 + 2 * 100 + (7 + 5 + 3) * 1000
    assert model.seconds(table, 3) == model.seconds(padded, 3) == expected


def test_models_from_json():
    text = '{"coefficients": {"step_s": 0.5, "kv_token_s": 1e-6}, "host_s": 0.25}'
    assert CostModel.from_json(text) == CostModel(
        step_s=0.5, prefill_token_s=0.0, decode_row_s=0.0, kv_token_s=1e-6, host_s=0.25
    )
    point = '{"prefill_tokens": %d, "decode_rows": %d, "kv_tokens": %d, "seconds": %d}'
    points = ", ".join(point % p for p in [(0, 0, 0, 1), (1, 0, 0, 2), (0, 1, 0, 3), (0, 0, 1, 4)])
    fitted = CostModel.from_json(f'{{"samples": [{points}]}}')
    assert [getattr(fitted, term) for term in TERMS] == pytest.approx([1, 1, 2, 3])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, r"not JSON \(maximum recursion"),
        ("{}", "needs an object with 'coefficients' or 'samples'"),
        ('{"coefficients": {}, "samples": []}', "one of them"),
        ('{"coefficients": {"a": 1}}', r"may have the keys step_s, .*'a'"),
        ('{"coefficients": {"step_s": -1}}', r"CostModel\.step_s must not be negative, got -1"),
        ('{"coefficients": {"step_s": "1"}}', r"CostModel\.step_s must be a number, got '1'"),
        ('{"coefficients": {}, "hosts": 1}', r"may have the keys .*'hosts'"),
        ('{"samples": [1, 2]}', r"4 coefficients need at least as many samples"),
        ('{"samples": [1, 2, 3, 4]}', r"sample 0 must have exactly the keys prefill_tokens, .*; got 1"),
    ],
)
def test_a_wrong_model_is_named(text, message, own_checks_only):
    with pytest.raises(InvalidInputError, match=message):
        CostModel.from_json(text)


def test_a_wrong_sample_is_named():
    good = {"prefill_tokens": 1, "decode_rows": 1, "kv_tokens": 1, "seconds": 1.0}
    with pytest.raises(InvalidInputError, match=r"sample 2\.seconds must be positive, got 0"):
        CostModel.fit([good, good, {**good, "seconds": 0}, good])
    with pytest.raises(InvalidInputError, match=r"sample 3 has a negative value"):
        CostModel.fit([good, good, good, {**good, "kv_tokens": -1}])
