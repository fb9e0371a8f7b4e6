"""Formats against integer arithmetic: every word of every format of at most 16 bits, samples of float32."""

from fractions import Fraction

import numpy as np
import pytest

from conformance.formats import (
    FORMATS,
    as_words,
    candidates,
    cell,
    decode,
    encode,
    format_of,
    is_nan,
    next_down,
    next_up,
    ordinal,
    quiet,
    ulp,
)
from paged.common import InvalidInputError

NARROW = [name for name, f in FORMATS.items() if f.bits <= 16]


def exact_value(word: int, dtype: str) -> Fraction | str:
    """Value of a word by the definition of the format, in integers."""
    f = FORMATS[dtype]
    sign = -1 if word >> (f.bits - 1) else 1
    exponent = (word >> f.fraction_bits) & ((1 << f.exponent_bits) - 1)
    fraction = word & ((1 << f.fraction_bits) - 1)
    top = (1 << f.exponent_bits) - 1
    if dtype.endswith("fnuz"):
        if word == 0x80:
            return "nan"
    elif dtype == "float8_e4m3fn":
        if exponent == top and fraction == 7:
            return "nan"
    elif exponent == top:
        return ("-inf" if sign < 0 else "inf") if fraction == 0 else "nan"
    if exponent == 0:
        return sign * Fraction(fraction, 1 << f.fraction_bits) * Fraction(2) ** (1 - f.bias)
    return sign * (1 + Fraction(fraction, 1 << f.fraction_bits)) * Fraction(2) ** (exponent - f.bias)


def words_of(dtype: str) -> np.ndarray:
    f = FORMATS[dtype]
    if f.bits <= 16:
        return np.arange(1 << f.bits).astype(f.word_type)
    edges = np.array(
        [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
    )
    spread = np.arange(0, 1 << 32, 1_000_003)
    return np.concatenate([edges, edges | (1 << 31), spread]).astype(np.uint32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_decode_gives_the_value_by_definition(dtype):
    words = words_of(dtype)
    got = decode(words, dtype)
    for word, value in zip(words.tolist(), got.tolist()):
        want = exact_value(word, dtype)
        if isinstance(want, str):
            assert str(value) == want, hex(word)
        else:
            assert Fraction(value) == want, hex(word)
            if want == 0:
                assert np.signbit(value) == bool(word), hex(word)


@pytest.mark.parametrize("dtype", FORMATS)
def test_encode_inverts_decode(dtype):
    words = words_of(dtype)
    words = words[~is_nan(words, dtype)]
    np.testing.assert_array_equal(encode(decode(words, dtype), dtype), words)
    assert encode(np.nan, dtype) == FORMATS[dtype].nan


@pytest.mark.parametrize("dtype", FORMATS)
def test_encode_rounds_once_to_nearest_even(dtype):
    """Midpoints of all neighbours go to the even word; one float64 step off a midpoint decides."""
    f = FORMATS[dtype]
    words = words_of(dtype)
    words = words[(words & np.array(f.sign_bit, f.word_type)) == 0]
    words = words[words < f.max_word]
    low, high = decode(words, dtype), decode(words + 1, dtype)
    middle = low + (high - low) / 2
    for sign in (1, -1):
        bit = f.sign_bit if sign < 0 else 0

        def named(w, bit=bit):
            return np.where((w > 0) | f.negative_zero, w | bit, w)

        even = np.where(words % 2 == 0, words, words + 1)
        np.testing.assert_array_equal(encode(sign * middle, dtype), named(even))
        np.testing.assert_array_equal(encode(sign * np.nextafter(middle, 0.0), dtype), named(words))
        np.testing.assert_array_equal(encode(sign * np.nextafter(middle, np.inf), dtype), named(words + 1))


@pytest.mark.parametrize("dtype", FORMATS)
def test_encode_overflow(dtype):
    f = FORMATS[dtype]
    top = f.max_value
    edge = top + float(ulp(top, dtype)) / 2  # the tie between the largest number and the first that does not exist
    beyond = f.nan if f.infinity is None else f.infinity
    assert encode(np.nextafter(edge, 0.0), dtype) == f.max_word
    assert encode(edge, dtype) == (f.max_word if f.max_word % 2 == 0 else beyond)
    for value in (np.nextafter(edge, np.inf), 1e300, np.inf):
        assert encode(value, dtype) == beyond
        assert encode(-value, dtype) == (f.nan if f.infinity is None else beyond | f.sign_bit)


def test_encode_keeps_what_a_detour_through_float32_loses():
    """1 + 2^-8 + 2^-40 lies above a bfloat16 tie; rounded to float32 first it lies on it and goes to even."""
    value = 1 + 2.0**-8 + 2.0**-40
    assert encode(value, "bfloat16") == 0x3F81
    assert encode(np.float64(np.float32(value)), "bfloat16") == 0x3F80


def test_zeros():
    assert encode(-0.0, "bfloat16") == 0x8000
    assert encode(-0.0, "float8_e4m3fnuz") == 0
    assert encode(-1e-9, "float16") == 0x8000
    assert encode(-1e-9, "float8_e5m2fnuz") == 0


def test_scenario_f1_one_byte_two_encodings():
    assert decode(np.uint8(0x38), "float8_e4m3fn") == 1.0
    assert decode(np.uint8(0x38), "float8_e4m3fnuz") == 0.5
    zero = decode(np.uint8(0x80), "float8_e4m3fn")
    assert zero == 0
    assert np.signbit(zero)
    assert np.isnan(decode(np.uint8(0x80), "float8_e4m3fnuz"))


@pytest.mark.parametrize("dtype", FORMATS)
def test_neighbours_follow_the_order_of_the_values(dtype):
    words = words_of(dtype)
    words = words[~is_nan(words, dtype)]
    words = words[np.argsort(ordinal(words, dtype), kind="stable")]
    value = decode(words, dtype)
    assert np.all(np.diff(value) >= 0)
    up, down = decode(next_up(words, dtype), dtype), decode(next_down(words, dtype), dtype)
    top, bottom = value == value.max(), value == value.min()
    assert np.all(up[~top] > value[~top])
    np.testing.assert_array_equal(up[top], value[top])
    assert np.all(down[~bottom] < value[~bottom])
    if FORMATS[dtype].bits <= 16:
        unique = np.unique(value)
        np.testing.assert_array_equal(np.unique(up), unique[1:])
        np.testing.assert_array_equal(np.unique(down), unique[:-1])
    nan = np.array(FORMATS[dtype].nan, FORMATS[dtype].word_type)
    assert next_up(nan, dtype) == nan == next_down(nan, dtype)


def test_ulp():
    np.testing.assert_array_equal(
        ulp([1.0, 1.99, 2.0, 1e-45, 0.0], "bfloat16"), [2**-7, 2**-7, 2**-6, 2**-133, 2**-133]
    )
    assert ulp(-3.0, "float16") == 2.0**-9


def test_cell_and_candidates():
    low, high = cell([1.0, 1.0, -1e-60, -1.0], [1.001, 1.02, 1e-60, 1.0], "bfloat16")
    assert low.tolist() == [0x3F80, 0x3F80, 0, 0xBF80]
    assert high.tolist() == [0x3F80, 0x3F83, 0, 0x3F80]
    assert candidates(low, high, "bfloat16").tolist() == [1, 4, 1, 2 * 0x3F80 + 1]


def test_quiet_keeps_payload_and_sign():
    words = np.array([0xFF81, 0x7FC5, 0x7F80, 0x0001], np.uint16)
    assert quiet(words, "bfloat16").tolist() == [0xFFC1, 0x7FC5, 0x7F80, 0x0001]
    assert quiet(np.array([0x7F], np.uint8), "float8_e4m3fn").tolist() == [0x7F]


def test_refusals():
    with pytest.raises(InvalidInputError, match="got 'int8'"):
        format_of("int8")
    with pytest.raises(InvalidInputError, match="Pass the bits"):
        as_words(np.zeros(2, np.float32), "float32")
