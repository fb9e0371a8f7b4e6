"""Attention in rational and 60-digit decimal arithmetic, and rationals rounded to words: slow, exact, independent."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np

DIGITS = 60
_LAYOUT = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}  # exponent and fraction bits


def decimal(x: Fraction) -> Decimal:
    return Decimal(x.numerator) / Decimal(x.denominator)


def fraction(x) -> Fraction:
    """An element of any dtype as a rational number."""
    return Fraction(float(x))


def tanh(x: Decimal) -> Decimal:
    square = (2 * x).exp()
    return (square - 1) / (square + 1)


def attention(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[list[Fraction], Fraction]:
    """Output and LSE of one query (d,) over the keys (n, d) and values (n, e) that it sees."""
    with localcontext(Context(prec=DIGITS, Emin=-(10**6), Emax=10**6)):
        factor = Fraction(float(np.float32(scale))) * Fraction(key_scale)
        logits = [decimal(factor * _dot(query, key)) for key in keys]
        if soft_cap is not None:
            cap = Decimal(float(np.float32(soft_cap)))
            logits = [cap * tanh(x / cap) for x in logits]
        weights = [x.exp() for x in logits]
        total = sum(weights, Decimal(0) if sink is None else Decimal(sink).exp())
        columns = [[decimal(fraction(v) * Fraction(value_scale)) for v in column] for column in values.T]
        means = [sum((w * v for w, v in zip(weights, column)), Decimal(0)) / total for column in columns]
        # Digits that only the decimal rounding made would hide an exact tie.
        snap = Context(prec=DIGITS - 10)
        return [Fraction(snap.plus(x)) for x in means], Fraction(snap.plus(total.ln()))


def _dot(x: Sequence, y: Sequence) -> Fraction:
    return sum((fraction(a) * fraction(b) for a, b in zip(x, y)), Fraction(0))


def round_to_word(x: Fraction, dtype: str) -> int:
    """The word of `x` rounded to nearest, ties to even; subnormals kept, a zero is +0."""
    exponent_bits, fraction_bits = _LAYOUT[dtype]
    lowest = 2 - (1 << (exponent_bits - 1))
    size, exponent = abs(x), lowest
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    steps = round(size / Fraction(2) ** (exponent - fraction_bits))  # of a Fraction, to even
    word = steps + ((exponent - lowest) << fraction_bits)
    word = min(word, ((1 << exponent_bits) - 1) << fraction_bits)
    return word | (1 << (exponent_bits + fraction_bits)) if x < 0 and word else word
