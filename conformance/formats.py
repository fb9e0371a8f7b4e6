"""Words of narrow floating-point formats, and float64.

A word is the bits of one element as an unsigned integer; numpy cannot name bfloat16 or fp8, and `ml_dtypes` rounds
float64 to bfloat16 twice, so both directions are integer arithmetic here. Every function takes the dtype names of
`paged.common.dtypes` and works on arrays of any shape.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import ArrayLike

from paged.common.errors import InvalidInputError

_WORD_TYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@dataclasses.dataclass(frozen=True)
class Format:
    """One binary format: sign, `exponent_bits`, `fraction_bits`.

    - `max_word`: word of the largest finite value; `infinity`: word of +inf, or None where the format has none.
    - `nan`: word of the NaN that `encode` writes (quiet where the format tells quiet from signalling).
    - `negative_zero`: False for the fnuz formats, whose only NaN sits at the word of −0.
    """

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int
    bias: int
    max_word: int
    infinity: int | None
    nan: int
    negative_zero: bool = True

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding to nearest of a normal number."""
        return 2.0 ** -(self.fraction_bits + 1)

    @property
    def half_subnormal(self) -> float:
        """Largest absolute error of one rounding below the normal range."""
        return 2.0 ** (self.emin - self.fraction_bits - 1)

    @property
    def max_value(self) -> float:
        """Largest finite value."""
        return float(decode(np.array(self.max_word), self.name))

    @property
    def word_type(self) -> type[np.unsignedinteger]:
        """numpy type of a word."""
        return _WORD_TYPES[self.bits]

    @property
    def sign_bit(self) -> int:
        """The word of −0."""
        return 1 << (self.bits - 1)


FORMATS = {
    f.name: f
    for f in (
        Format("bfloat16", 16, 8, 7, 127, 0x7F7F, 0x7F80, 0x7FC0),
        Format("float16", 16, 5, 10, 15, 0x7BFF, 0x7C00, 0x7E00),
        Format("float32", 32, 8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
        Format("float8_e4m3fn", 8, 4, 3, 7, 0x7E, None, 0x7F),
        Format("float8_e5m2", 8, 5, 2, 15, 0x7B, 0x7C, 0x7E),
        Format("float8_e4m3fnuz", 8, 4, 3, 8, 0x7F, None, 0x80, negative_zero=False),
        Format("float8_e5m2fnuz", 8, 5, 2, 16, 0x7F, None, 0x80, negative_zero=False),
    )
}


def format_of(dtype: str) -> Format:
    """The format named `dtype`; raises `InvalidInputError` for a name that is not a floating-point dtype."""
    if dtype not in FORMATS:
        raise InvalidInputError(f"format_of.dtype must be one of {', '.join(FORMATS)}; got {dtype!r}.")
    return FORMATS[dtype]


def as_words(words: ArrayLike, dtype: str) -> np.ndarray:
    """`words` as the unsigned integers of `dtype`; any other element type is refused, never converted."""
    f, array = format_of(dtype), np.asarray(words)
    if array.dtype != f.word_type:
        raise InvalidInputError(
            f"words of {dtype} must be {np.dtype(f.word_type).name}, got {array.dtype}. Pass the bits, not the values."
        )
    return array


def is_nan(words: ArrayLike, dtype: str) -> np.ndarray:
    """Which words are NaN."""
    f = format_of(dtype)
    w = np.asarray(words).astype(np.int64)
    if not f.negative_zero:
        return w == f.nan
    return (w & ~f.sign_bit) > (f.max_word if f.infinity is None else f.infinity)


def quiet(words: np.ndarray, dtype: str) -> np.ndarray:
    """`words` with every signalling NaN made quiet, payloads and signs kept."""
    f = format_of(dtype)
    if f.infinity is None:
        return words
    bit = np.array(1 << (f.fraction_bits - 1), f.word_type)
    return np.where(is_nan(words, dtype), words | bit, words).astype(f.word_type)


def decode(words: ArrayLike, dtype: str) -> np.ndarray:
    """Exact float64 values of `words`; every NaN becomes the one quiet NaN."""
    w = np.asarray(words)
    return _table(dtype)[w] if format_of(dtype).bits <= 16 else _decode(w, dtype)


@functools.cache
def _table(dtype: str) -> np.ndarray:
    table = _decode(np.arange(1 << FORMATS[dtype].bits), dtype)
    table.flags.writeable = False
    return table


def _decode(words: np.ndarray, dtype: str) -> np.ndarray:
    f = FORMATS[dtype]
    w = words.astype(np.int64)
    magnitude = w & (f.sign_bit - 1)
    exponent = magnitude >> f.fraction_bits
    fraction = magnitude & ((1 << f.fraction_bits) - 1)
    significand = fraction + (np.minimum(exponent, 1) << f.fraction_bits)
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - f.bias - f.fraction_bits)
    if f.infinity is not None:
        value = np.where(magnitude == f.infinity, np.inf, value)
    value = np.where(w & f.sign_bit != 0, -value, value)
    return np.where(is_nan(w, dtype), np.nan, value)


def encode(values: ArrayLike, dtype: str) -> np.ndarray:
    """Words of `values` after one rounding to nearest, ties to even; subnormals are kept.

    Overflow gives infinity, or NaN in formats without one. −0 stays −0 where the format has it. NaN becomes `nan`.
    """
    f = format_of(dtype)
    x = np.asarray(values, np.float64)
    size = np.abs(x)
    finite = np.where(np.isfinite(size), size, 0.0)
    exponent = _exponent(finite, f)
    # A significand that rounds up to the next power of two carries into the exponent field by itself.
    word = np.rint(np.ldexp(finite, f.fraction_bits - exponent)).astype(np.int64)
    word += (exponent - f.emin) << f.fraction_bits
    overflow = np.isinf(size) | (word > f.max_word)
    negative = np.signbit(x) & (f.negative_zero | (word > 0) | overflow)
    word = np.where(overflow, f.nan if f.infinity is None else f.infinity, word)
    word = np.where(negative & ~(overflow & (f.infinity is None)), word | f.sign_bit, word)
    return np.where(np.isnan(x), f.nan, word).astype(f.word_type)


def round_to(values: ArrayLike, dtype: str) -> np.ndarray:
    """`values` rounded once to `dtype`, as float64."""
    return decode(encode(values, dtype), dtype)


def ulp(values: ArrayLike, dtype: str) -> np.ndarray:
    """Spacing of the numbers of `dtype` at `values`, as if the exponent had no upper end."""
    f = format_of(dtype)
    return np.ldexp(1.0, _exponent(np.asarray(values, np.float64), f) - f.fraction_bits)


def _exponent(x: np.ndarray, f: Format) -> np.ndarray:
    exponent = np.frexp(x)[1].astype(np.int64) - 1
    return np.where(x == 0, f.emin, np.maximum(exponent, f.emin))  # frexp gives 0 the exponent of 1/2


def ordinal(words: ArrayLike, dtype: str) -> np.ndarray:
    """Place of each word in the order of the values: +0 and −0 are 0, the next number up is 1. NaN has no place."""
    f = format_of(dtype)
    w = np.asarray(words).astype(np.int64)
    magnitude = w & (f.sign_bit - 1)
    return np.where(w & f.sign_bit != 0, -magnitude, magnitude)


def _from_ordinal(place: np.ndarray, dtype: str) -> np.ndarray:
    f = FORMATS[dtype]
    top = f.max_word if f.infinity is None else f.infinity
    place = np.clip(place, -top, top)
    return np.where(place < 0, -place | f.sign_bit, place).astype(f.word_type)


def next_up(words: ArrayLike, dtype: str) -> np.ndarray:
    """Words of the next larger numbers; the largest (infinity where there is one) and NaN stay what they are."""
    w = np.asarray(words, format_of(dtype).word_type)
    return np.where(is_nan(w, dtype), w, _from_ordinal(ordinal(w, dtype) + 1, dtype))


def next_down(words: ArrayLike, dtype: str) -> np.ndarray:
    """Words of the next smaller numbers; the smallest and NaN stay what they are."""
    w = np.asarray(words, format_of(dtype).word_type)
    return np.where(is_nan(w, dtype), w, _from_ordinal(ordinal(w, dtype) - 1, dtype))


def cell(low: ArrayLike, high: ArrayLike, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest word to which a real number in `low` .. `high` can round, a zero always being +0.

    Where the two are equal, the interval decides the bits.
    """
    f = format_of(dtype)
    ends = (encode(low, dtype), encode(high, dtype))
    zero = np.array(0, f.word_type)
    return tuple(np.where(ordinal(w, dtype) == 0, zero, w) for w in ends)  # type: ignore[return-value]


def candidates(low: ArrayLike, high: ArrayLike, dtype: str) -> np.ndarray:
    """How many numbers lie in the closed range of words `low` .. `high`; both zeros count as one."""
    return ordinal(high, dtype) - ordinal(low, dtype) + 1
