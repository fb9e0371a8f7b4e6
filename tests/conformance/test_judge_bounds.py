"""Certified rounding against simulated kernels: no honest one is accused, and broken ones are caught.

A longer run of the same: `python tools/honest_kernels.py 200`.
"""

import dataclasses
import functools

import numpy as np
import pytest
from kernel_simulator import Kernel

from conformance import bounds, oracle
from conformance.case import Case
from conformance.formats import decode, encode, format_of
from conformance.judge import expectation, judge_attend, predicts
from conformance.vectors import generate
from paged.common.capabilities import NUMERIC_MODELS

BASE = {"page": 16, "num_pages": 16, "kv_heads": 2, "head_dim": 32, "q_heads": 4, "scale": 0.17677669529663687}
ROWS = {"query_lens": [3, 1, 1], "kv_lens": [37, 70, 5]}
FAMILIES = {
    "census": {**ROWS},
    "census window": {**ROWS, "window": 19, "sinks": "zero"},
    "address": {**ROWS},
    "address cap": {**ROWS, "soft_cap": 30.0},
    "ladder": {"query_lens": [1, 1], "kv_lens": [64, 32], "scale": 48**-0.5},
    "dyadic": {**ROWS},
    "dyadic integers": {**ROWS, "values": "integers"},
    "generic": {"query_lens": [4, 4], "kv_lens": [96, 40], "statistic": True},
    "generic cap": {**ROWS, "soft_cap": 5.0, "temperature": 3.0, "sinks": "random"},
    "generic peaked": {**ROWS, "temperature": 6.0, "window": 30},
}


@functools.cache
def vector(family: str, dtype: str):
    params = {**BASE, "dtype": dtype, **FAMILIES[family]}
    case = Case(
        id=f"sim/{family}", tier=3, level="core", generator=family.split()[0], params=params, clause=("attend.1",)
    )
    return generate(case)


@functools.cache
def demanded(family: str, dtype: str, model: str):
    return expectation(vector(family, dtype), NUMERIC_MODELS[model])


def verdict(kernel: Kernel, family: str, dtype: str):
    v = vector(family, dtype)
    out, lse = kernel.run(v.problem)
    return judge_attend(v.problem, demanded(family, dtype, kernel.model.name), out, lse)


def suits(model: str, family: str) -> bool:
    """The simulator has no sinks in its normalised form."""
    return not (NUMERIC_MODELS[model].normalised and "sinks" in FAMILIES[family])


def test_the_exact_model_and_the_rest_of_the_menu():
    assert [name for name, m in NUMERIC_MODELS.items() if m.exact] == ["exact"]
    assert set(HONEST) == set(NUMERIC_MODELS) - {"exact"}


HONEST = ("N0", "N0+xla", "N0+tanh", "N0p", "N1", "N1+tanh", "N1n", "N2")


@pytest.mark.parametrize("model", HONEST)
def test_no_honest_kernel_is_accused(model):
    """Twelve kernels a model, 96 in all, each on half of the families; the dtypes turn."""
    for seed in range(12):
        kernel = Kernel.draw(seed, NUMERIC_MODELS[model])
        for at, family in enumerate(FAMILIES):
            if suits(model, family) and (at + seed) % 2:
                dtype = ("bfloat16", "float16", "float32")[(seed // 2 + at) % 3]
                result = verdict(kernel, family, dtype)
                assert result.status == "pass", f"{kernel} on {family} {dtype}: {result.diagnosis}"


FAULTS = {
    "scale_twice": "ladder",
    "mask_zero": "census",
    "no_rescale": "generic peaked",
    "running_max_stale": "address",
    "unweighted_merge": "generic",
    "no_soft_cap": "generic cap",
    "p_4_bits": "generic",
    "bf16_accumulator": "dyadic",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_kernels_are_caught(fault):
    fixed = {"tile": 16, "splits": 3, "order": "up", "merge": "state"}
    family = FAULTS[fault]
    for model in ("N0", "N1"):
        honest = Kernel.draw(1, NUMERIC_MODELS[model], **fixed)
        broken = Kernel.draw(1, NUMERIC_MODELS[model], fault=fault, **fixed)
        assert verdict(honest, family, "bfloat16").status == "pass"
        assert verdict(broken, family, "bfloat16").status == "fail", (fault, model)


def test_a_looser_arithmetic_than_declared_is_caught():
    """The models bite: weights or partial results in 16 bits fail where float32 ones were declared."""
    for actual, declared, family in (("N1", "N0", "generic"), ("N2", "N1", "dyadic"), ("N1n", "N1", "dyadic")):
        v = vector(family, "bfloat16")
        out, lse = Kernel.draw(3, NUMERIC_MODELS[actual], splits=3, merge="lse").run(v.problem)
        assert judge_attend(v.problem, demanded(family, "bfloat16", declared), out, lse).status == "fail", actual
        assert judge_attend(v.problem, demanded(family, "bfloat16", actual), out, lse).status == "pass", actual


def test_the_exact_answer_is_never_outside():
    for family in FAMILIES:
        for dtype in ("bfloat16", "float16", "float32"):
            v = vector(family, dtype)
            exact = oracle.attend(v.problem)
            words = encode(exact.output, dtype)
            words = np.where(words == format_of(dtype).sign_bit, 0, words).astype(words.dtype)
            for model in NUMERIC_MODELS:
                result = judge_attend(v.problem, demanded(family, dtype, model), words, exact.lse.astype(np.float32))
                assert result.status == "pass", (family, dtype, model, result.diagnosis)


DECIDED = {
    ("dyadic", "bfloat16", "N1"): 0.97,
    ("dyadic", "float16", "N1"): 0.90,
    ("generic", "bfloat16", "N0"): 0.70,
    ("census", "bfloat16", "N1"): 1.0,
    ("ladder", "float16", "N1"): 1.0,
}


@pytest.mark.parametrize(("family", "dtype", "model"), DECIDED)
def test_the_decided_share_does_not_shrink(family, dtype, model):
    expected = demanded(family, dtype, model)
    assert np.mean(expected.low == expected.high) >= DECIDED[family, dtype, model]


def test_predictions_are_demanded_only_where_they_bind():
    model = NUMERIC_MODELS
    assert predicts(vector("census", "bfloat16"), model["N1"])
    assert not predicts(vector("census", "bfloat16"), model["N2"])
    assert not predicts(vector("census", "bfloat16"), model["N1n"])
    assert not predicts(vector("census", "float32"), model["N0"])
    assert predicts(vector("ladder", "float16"), model["N1n"])
    assert not predicts(vector("ladder", "float32"), model["N0"])
    assert predicts(vector("address", "bfloat16"), model["N2"])
    assert predicts(vector("address", "float32"), model["N0"])
    assert not predicts(vector("address cap", "float32"), model["N0"])
    assert not predicts(vector("dyadic", "bfloat16"), model["N0"])


def test_a_coarser_tanh_than_declared_is_caught():
    """A large cap over peaked logits: an error of 2^-16 in tanh is 30 times that in a logit."""
    params = {**BASE, **ROWS, "dtype": "float16", "soft_cap": 30.0, "temperature": 12.0}
    v = generate(Case(id="sim/cap", tier=3, level="core", generator="generic", params=params, clause=("attend.5",)))
    out, lse = Kernel.draw(2, NUMERIC_MODELS["N0+tanh"]).run(v.problem)
    for declared, status in (("N0+tanh", "pass"), ("N0", "fail")):
        expected = expectation(v, NUMERIC_MODELS[declared])
        assert judge_attend(v.problem, expected, out, lse).status == status


def test_the_longest_rise():
    assert bounds._longest_rise(np.array([3.0, 1, 2, 2, 5, 4, 6])) == 4
    assert bounds._longest_rise(np.array([5.0, 4, 3])) == 1
    assert bounds._longest_rise(np.array([])) == 0


def test_accumulation_covers_chains_and_truncating_units():
    """More than any simulated order loses, so it is held to its derivation: n u, and 13 u for every 16 products."""
    for n in (1, 16, 70, 4096, 32768):
        assert bounds._accumulation(n, 16) >= max(n, 13 * n / 16 + 16) * 2.0**-24


def test_the_lse_has_a_bound_of_its_own():
    """A row sum of rounded weights moves the LSE by up to 2^-9 in bfloat16, and only that model may."""
    loose, tight = (demanded("generic", "bfloat16", m) for m in ("N1", "N0"))
    live = np.isfinite(loose.lse_low)
    assert np.all((loose.lse_high - loose.lse_low)[live] > 2.0**-9)
    assert np.all((tight.lse_high - tight.lse_low)[live] < 2.0**-12)


def test_steep_sees_a_scale_rounded_to_16_bits_even_where_weights_are():
    """The mutant that tier 2 cannot see (docs: its error is below what a ladder snaps)."""
    for dtype, drop in (("bfloat16", 72.0), ("float16", 8.5)):
        params = {**BASE, "dtype": dtype, "query_lens": [1, 2], "kv_lens": [7, 17], "drop": drop, "scale": 80**-0.5}
        case = Case(id="sim/steep", tier=3, level="core", generator="steep", params=params, clause=("attend.2",))
        v = generate(case)
        expected = expectation(v, NUMERIC_MODELS["N1"])
        for fault, status in ((None, "pass"), ("scale", "fail")):
            problem = v.problem
            if fault:
                scale = float(decode(encode(problem.spec.scale, "bfloat16"), "bfloat16"))
                problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, scale=scale))
            out, _ = Kernel.draw(5, NUMERIC_MODELS["N1"]).run(problem)
            assert judge_attend(v.problem, expected, out, None).status == status, (dtype, fault)
