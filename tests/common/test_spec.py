"""Options of attention: what is a value, what is refused, what does not exist (requirement R2)."""

import dataclasses

import numpy as np
import pytest

from paged.common import AttentionSpec, Capabilities, InvalidInputError, Range


def test_specs_are_hashable_values_of_plain_python_types():
    spec = AttentionSpec(scale=np.float64(0.125), causal=np.bool_(True), window=np.int32(4), soft_cap=np.float32(30))
    assert spec == AttentionSpec(scale=0.125, causal=True, window=4, soft_cap=30.0)
    assert hash(spec) == hash(AttentionSpec(scale=0.125, window=4, soft_cap=30))
    assert [type(getattr(spec, field.name)) for field in dataclasses.fields(spec)] == [float, bool, int, float]


def test_a_scale_has_no_default_and_may_be_zero_or_negative():
    with pytest.raises(TypeError, match="scale"):
        AttentionSpec()  # type: ignore[call-arg]
    assert AttentionSpec(scale=0).scale == 0.0
    assert AttentionSpec(scale=-0.0).to_bytes() == AttentionSpec(scale=0.0).to_bytes()
    assert AttentionSpec(scale=-1).scale == -1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "AttentionSpec.scale must be a number, got None of type NoneType."),
        ({"scale": float("nan")}, "AttentionSpec.scale must be finite, got nan."),
        ({"scale": 10**400}, "AttentionSpec.scale must be finite, got an int of 1329 bits."),
        (
            {"scale": 1e39},
            "AttentionSpec.scale must be within the normal range of float32, 1.17549435e-38..3.40282347e+38 in size, "
            "got 1e+39.",
        ),
        (
            {"soft_cap": 1e-40},
            "AttentionSpec.soft_cap must be within the normal range of float32, 1.17549435e-38..3.40282347e+38 in "
            "size, got 1e-40.",
        ),
        ({"soft_cap": 0.0}, "AttentionSpec.soft_cap must be positive, got 0.0."),
        ({"soft_cap": -30.0}, "AttentionSpec.soft_cap must be positive, got -30.0."),
        ({"window": 0}, "AttentionSpec.window must be in 1..2147483647, got 0."),
        ({"window": 3.0}, "AttentionSpec.window must be an int, got 3.0 of type float. Pass a Python int."),
        ({"causal": 1}, "AttentionSpec.causal must be a bool, got 1 of type int."),
    ],
)
def test_refusals_say_which_field_and_what_it_held(change, message):
    with pytest.raises(InvalidInputError) as caught:
        AttentionSpec(**{"scale": 1.0, **change})
    assert str(caught.value) == message


def test_the_scale_that_float32_can_just_hold_is_taken():
    largest = float(np.finfo(np.float32).max)
    smallest = float(np.finfo(np.float32).tiny)
    assert AttentionSpec(scale=largest, soft_cap=largest).scale == largest
    assert AttentionSpec(scale=-smallest, soft_cap=smallest).soft_cap == smallest


@pytest.mark.parametrize("option", ["alibi", "alibi_slopes", "position_bias"])
def test_scenario_m10_attention_has_no_alibi_to_compute_from_a_local_head(option):
    """No option exists that a kernel could compute from the wrong head; asking is an error, and so is declaring."""
    with pytest.raises(TypeError, match=option):
        AttentionSpec(scale=1.0, **{option: (0.5, 0.25)})
    with pytest.raises(InvalidInputError, match=rf"Capabilities\.features has '{option}', which is not in \["):
        declare(option)


def test_scenario_m11_attention_has_no_alibi_to_be_off_by_one():
    with pytest.raises(TypeError, match="alibi"):
        AttentionSpec(scale=1.0, alibi=True)  # type: ignore[call-arg]
    with pytest.raises(InvalidInputError, match=r"Capabilities\.features has 'alibi'"):
        declare("alibi")


def declare(feature: str) -> Capabilities:
    return Capabilities(
        dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float32"}),
        page_sizes=Range(1, 16),
        head_dims=frozenset({64}),
        group_sizes=Range(1, 8),
        features=frozenset({feature}),
        numerics="N0",
    )
