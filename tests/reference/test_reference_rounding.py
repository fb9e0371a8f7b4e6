"""One rounding, and exact widening, against integer arithmetic in numpy."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact_attention import round_to_word
from reference_problem import DTYPES, bits

from paged.common.dtypes import ELEMENT_BYTES
from paged.reference.rounding import FORMATS, round_once, widen

COUNT = 1 << 19
WIDTHS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}


def wide_values(dtype: str) -> np.ndarray:
    """A million float64 values: normal draws, exponents of the whole range and beyond, and planted near-ties."""
    exponent_bits, fraction_bits = WIDTHS[dtype]
    random = np.random.default_rng(7)
    bias = (1 << (exponent_bits - 1)) - 1
    spread = np.ldexp(1 + random.random(COUNT // 2), random.integers(-bias - fraction_bits - 3, bias + 3, COUNT // 2))
    # Halfway between neighbours, and one step of float64 to either side: what a rounding by way of float32 gets wrong.
    odd = np.ldexp(1 + (2 * random.integers(0, 1 << fraction_bits, COUNT // 8) + 1) * 2.0 ** -(fraction_bits + 1), 0)
    odd = np.ldexp(odd, random.integers(1 - bias, bias, COUNT // 8))
    ties = np.concatenate([odd, np.nextafter(odd, np.inf), np.nextafter(odd, 0), odd * (1 + 2.0**-40)])
    small = 2.0 ** (1 - bias - fraction_bits)  # the smallest subnormal
    low = small * (random.integers(0, 1 << fraction_bits, COUNT // 8) + 0.5)
    low = np.concatenate([low, np.nextafter(low, np.inf), np.nextafter(low, 0)])
    top = (2 - 2.0 ** -(fraction_bits + 1)) * 2.0**bias  # from here on, infinity
    edges = [0.0, small / 2, small / 4, top, np.nextafter(top, 0), np.nextafter(top, np.inf), 1e300, 5e-324, np.inf]
    values = np.concatenate([random.standard_normal(COUNT // 2), spread, ties, low, edges])
    return values * np.where(random.random(values.shape) < 0.5, -1, 1)


def rounded_words(values: np.ndarray, dtype: str) -> np.ndarray:
    """Nearest, ties to even, by integers: the significand is scaled to a whole number and rounded once."""
    exponent_bits, fraction_bits = WIDTHS[dtype]
    lowest = 2 - (1 << (exponent_bits - 1))
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    size = np.where(np.isinf(values), 1e300, np.abs(values))
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, lowest), lowest).astype(np.int64)
    steps = np.rint(np.ldexp(size, fraction_bits - exponent)).astype(np.int64)
    word = np.minimum(steps + ((exponent - lowest) << fraction_bits), infinity)
    return np.where((values < 0) & (word > 0), word | (1 << (exponent_bits + fraction_bits)), word)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_of_a_million_values_compiled_or_not(dtype):
    values = wide_values(dtype)
    assert values.shape[0] > 980_000
    expected = rounded_words(values, dtype)
    for run in (jax.jit(round_once, static_argnums=1), round_once):
        with jax.enable_x64(True):
            got = np.asarray(run(jnp.asarray(values), dtype))
        assert got.dtype == jnp.dtype(dtype)
        assert np.count_nonzero(bits(got) != expected) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_expected_rounding_agrees_with_rational_arithmetic(dtype):
    values = np.random.default_rng(3).choice(wide_values(dtype), 300)
    values = values[np.isfinite(values)]
    assert rounded_words(values, dtype).tolist() == [round_to_word(Fraction(x), dtype) for x in values.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_is_positive_and_nan_is_quiet(dtype):
    with jax.enable_x64(True):
        got = np.asarray(round_once(jnp.asarray([0.0, -0.0, -1e-300, np.nan, -np.nan]), dtype)).astype(np.float32)
    np.testing.assert_array_equal(got, np.array([0, 0, 0, np.nan, np.nan], np.float32))
    assert not np.signbit(got[:3]).any()


@pytest.mark.parametrize("dtype", [*sorted(FORMATS), "int8"])
def test_widening_is_exact_for_every_word(dtype):
    assert set(FORMATS) | {"int8"} == set(ELEMENT_BYTES)
    if dtype == "float32":
        random = np.random.default_rng(0)
        words = np.concatenate([random.integers(0, 2**32, 1 << 18), random.integers(0, 1 << 24, 1 << 16)])
        words = words.astype(np.uint32)
    else:
        bits = 8 * ELEMENT_BYTES[dtype]
        words = np.arange(1 << bits, dtype=f"uint{bits}")
    elements = words.view(getattr(ml_dtypes, dtype, None) or dtype)
    with np.errstate(invalid="ignore"):
        expected = elements.astype(np.float32).astype(np.float64)
    with jax.enable_x64(True):
        from_words = np.asarray(jax.jit(widen, static_argnums=1)(jnp.asarray(words), dtype))
        from_elements = np.asarray(widen(jnp.asarray(elements), dtype))
    numbers = ~np.isnan(expected)
    for got in (from_words, from_elements):
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))
