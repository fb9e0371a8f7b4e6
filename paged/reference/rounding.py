"""Elements to float64 exactly, and float64 back to elements with one rounding, in integer arithmetic on the bits.

A cast would be shorter and wrong: XLA's CPU compiler rounds float64 to bfloat16 and float16 by way of float32, so twice
(8.3e-6 and 6.1e-5 of values); a GPU compiler removes detours through float32 that would repair it; and a CPU flushes
bfloat16 and float32 subnormals to zero in both directions. On the bits there is nothing to contract, flush or remove.

Call these functions inside `jax.enable_x64(True)`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float64, Shaped

from paged.common.dtypes import element_bytes


class Format(NamedTuple):
    """A sign bit, `exponent_bits`, `fraction_bits`. `specials` says which words are not finite numbers.

    - `ieee`: the largest exponent, infinities and NaN.
    - `fn`: all exponent and fraction bits set, NaN.
    - `fnuz`: the word of −0, NaN; the exponent's bias is one more.
    """

    exponent_bits: int
    fraction_bits: int
    specials: str = "ieee"

    @property
    def bias(self) -> int:
        """What is taken from the exponent field to get the exponent."""
        return (1 << (self.exponent_bits - 1)) - (self.specials != "fnuz")


FORMATS = {
    "bfloat16": Format(8, 7),
    "float16": Format(5, 10),
    "float32": Format(8, 23),
    "float8_e4m3fn": Format(4, 3, "fn"),
    "float8_e5m2": Format(5, 2),
    "float8_e4m3fnuz": Format(4, 3, "fnuz"),
    "float8_e5m2fnuz": Format(5, 2, "fnuz"),
}

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def widen(x: Shaped[Array, "*n"], dtype: str) -> Float64[Array, "*n"]:
    """Exact float64 values of `x`, elements of `dtype` or unsigned words that hold their bits."""
    if dtype == "int8":
        return lax.bitcast_convert_type(x, jnp.int8).astype(jnp.float64)
    form = FORMATS[dtype]
    width = form.exponent_bits + form.fraction_bits
    word = lax.bitcast_convert_type(x, _WORDS[element_bytes(dtype)]).astype(jnp.int64)
    size = (word & ((1 << width) - 1)) << (52 - form.fraction_bits)  # the fields, where float64 has them
    subnormal, negative = size < (1 << 52), (word >> width) != 0
    # A subnormal is read with a leading one, which is then taken away.
    bias = jnp.where(subnormal, np.int64(1024 - form.bias), np.int64(1023 - form.bias)) << 52
    leading = jnp.where(subnormal, np.float64(2.0 ** (1 - form.bias)), np.float64(0))
    value = lax.bitcast_convert_type(size + bias, jnp.float64) - leading
    if form.specials == "ieee":
        special = lax.bitcast_convert_type(size | (0x7FF << 52), jnp.float64)
        value = jnp.where(size >= ((1 << form.exponent_bits) - 1) << 52, special, value)
    elif form.specials == "fn":
        value = jnp.where(size == ((1 << width) - 1) << (52 - form.fraction_bits), np.float64(np.nan), value)
    else:
        value = jnp.where(word == 1 << width, np.float64(np.nan), value)
    return jnp.where(negative, -value, value)


def round_once(x: Float64[Array, "*n"], dtype: str) -> Shaped[Array, "*n"]:
    """`x` rounded to nearest, ties to even, to bfloat16, float16 or float32; subnormals are kept.

    Beyond the largest finite value it is an infinity; a NaN is the quiet NaN; a zero, rounded or not, is +0.
    """
    form = FORMATS[dtype]
    bits = lax.bitcast_convert_type(x, jnp.int64)
    exponent = ((bits >> 52) & 0x7FF) - 1023
    significand = (bits & ((1 << 52) - 1)) | (1 << 52)
    lowest = 1 - form.bias
    # Below the normal range the spacing stays what it is at the lowest exponent: more bits go. From 54 on, all go.
    drop = jnp.minimum(52 - form.fraction_bits + jnp.maximum(lowest - exponent, 0), 54)
    kept = significand >> drop
    rounded = (significand + jnp.left_shift(np.int64(1), drop - 1) - 1 + (kept & 1)) >> drop
    # The leading one, and a carry out of the fraction, add to the exponent field by themselves.
    rounded = rounded + ((jnp.maximum(exponent, lowest) - lowest) << form.fraction_bits)
    infinity = ((1 << form.exponent_bits) - 1) << form.fraction_bits
    rounded = jnp.minimum(rounded, infinity)
    sign = jnp.where((bits < 0) & (rounded > 0), 1 << (form.exponent_bits + form.fraction_bits), 0)
    quiet_nan = infinity | 1 << (form.fraction_bits - 1)
    result = jnp.where(jnp.isnan(x), quiet_nan, rounded | sign)
    return lax.bitcast_convert_type(result.astype(_WORDS[element_bytes(dtype)]), jnp.dtype(dtype))
