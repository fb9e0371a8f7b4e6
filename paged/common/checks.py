"""Argument checks shared by the types of this package. Each error names the field, the row if any, and the value."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection

import numpy as np

from paged.common.errors import InvalidInputError

INT32_LIMIT = 2**31
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126


class _Shown(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"an int of {x.bit_length()} bits"


_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlevel = 3


def show(value: object) -> str:
    """`repr(value)`, short, for a message: never fails, whatever the length, the depth or the class of `value`."""
    return _SHOWN.repr(value)


def check_int(owner: str, field: str, value: object, *, minimum: int, maximum: int = INT32_LIMIT - 1) -> int:
    """`value` as a Python int in `minimum` .. `maximum`. Booleans and floats are refused, numpy integers are not."""
    # np.timedelta64 is an np.integer, and a length in seconds is not a length.
    if isinstance(value, (bool, np.timedelta64)) or not isinstance(value, (int, np.integer)):
        raise InvalidInputError(
            f"{owner}.{field} must be an int, got {show(value)} of type {type(value).__name__}. Pass a Python int."
        )
    number = int(value)
    if not minimum <= number <= maximum:
        raise InvalidInputError(f"{owner}.{field} must be in {minimum}..{maximum}, got {show(number)}.")
    return number


def check_number(owner: str, field: str, value: object, *, positive: bool = False, float32: bool = False) -> float:
    """`value` as a finite Python float, positive if asked; a zero becomes +0.

    With `float32`, it must be zero or within the normal range of float32, so that rounding it there gives neither an
    infinity nor a zero nor a subnormal, which devices flush.
    """
    if isinstance(value, (bool, np.timedelta64)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidInputError(f"{owner}.{field} must be a number, got {show(value)} of type {type(value).__name__}.")
    try:
        number = float(value) + 0.0
    except OverflowError:  # an int beyond float64
        number = math.inf
    if not math.isfinite(number):
        raise InvalidInputError(f"{owner}.{field} must be finite, got {show(value)}.")
    if positive and number <= 0:
        raise InvalidInputError(f"{owner}.{field} must be positive, got {number!r}.")
    if float32 and number != 0 and not FLOAT32_TINY <= abs(number) <= FLOAT32_MAX:
        raise InvalidInputError(
            f"{owner}.{field} must be within the normal range of float32, {FLOAT32_TINY:.9g}..{FLOAT32_MAX:.9g} in "
            f"size, got {number!r}."
        )
    return number


def check_bool(owner: str, field: str, value: object) -> bool:
    """`value` as a Python bool; integers are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInputError(f"{owner}.{field} must be a bool, got {show(value)} of type {type(value).__name__}.")
    return bool(value)


def check_choice(owner: str, field: str, value: object, choices: Collection[str]) -> str:
    """`value` as one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInputError(f"{owner}.{field} must be one of {', '.join(sorted(choices))}; got {show(value)}.")
    return str(value)


def check_names(owner: str, field: str, value: object, vocabulary: Collection[str] | None = None) -> frozenset[str]:
    """`value`, a set or sequence of strings, as a frozenset; non-empty strings if there is no `vocabulary`."""
    if not isinstance(value, (frozenset, set, list, tuple)):
        raise InvalidInputError(
            f"{owner}.{field} must be a set of names, got {show(value)} of type {type(value).__name__}."
        )
    for name in value:
        if vocabulary is None and (not isinstance(name, str) or not name):
            raise InvalidInputError(f"{owner}.{field} must hold non-empty strings, got {show(name)}.")
        if vocabulary is not None and (not isinstance(name, str) or name not in vocabulary):
            raise InvalidInputError(f"{owner}.{field} has {show(name)}, which is not in {sorted(vocabulary)}.")
    return frozenset(str(name) for name in value)


def check_int32_vector(owner: str, field: str, value: object, length: int | None = None) -> np.ndarray:
    """`value` as a contiguous one-dimensional int32 array, copied and made read-only.

    Sequences of ints and arrays of other integer types are cast only if every value fits, so that no length is ever
    cut to 32 bits (scenario L5); booleans, floats and everything else are refused.
    """
    try:
        array = np.asarray(value)
    except Exception as error:  # ragged lists, traced arrays, objects whose conversion fails
        raise InvalidInputError(
            f"{owner}.{field} must be a one-dimensional int32 array, and this {type(value).__name__} cannot be read as "
            f"one ({type(error).__name__})."
        ) from None
    if array.ndim != 1:
        raise InvalidInputError(f"{owner}.{field} must be one-dimensional, got shape {array.shape} from {show(value)}.")
    if array.size == 0 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)  # an empty list has no dtype of its own
    if isinstance(value, (list, tuple)):  # numpy reads [1, True] as two ints, and ints beyond 64 bits as objects
        for i, item in enumerate(value):
            if isinstance(item, (bool, np.bool_)) or array.dtype.kind == "O":
                check_int(owner, f"{field}: row {i}", item, minimum=-INT32_LIMIT)
    if array.dtype.kind not in "iu":
        i = int(np.argmax(array != np.floor(array))) if array.dtype.kind == "f" and array.size else 0
        example = f" (row {i} has {show(array.item(i))})" if array.size else ""
        raise InvalidInputError(
            f"{owner}.{field} must be int32, got dtype {array.dtype}{example}. Cast it exactly first."
        )
    if length is not None and array.shape[0] != length:
        raise InvalidInputError(f"{owner}.{field} must have length {length}, got {array.shape[0]}.")
    if array.dtype != np.int32:
        bad = array >= INT32_LIMIT if array.dtype.kind == "u" else (array >= INT32_LIMIT) | (array < -INT32_LIMIT)
        refuse_rows(owner, field, array, bad, "must fit 32 bits")
    array = np.array(array, dtype=np.int32, order="C", copy=True)
    array.flags.writeable = False
    return array


def refuse_rows(
    owner: str,
    field: str,
    values: np.ndarray,
    bad: np.ndarray,
    rule: str,
    entry: str = "row",
    offsets: np.ndarray | None = None,
) -> None:
    """Raise on the first true element of `bad`, naming `field`, its place and its value.

    The place is `entry` and an index; with `offsets` (rows + 1,) it is the row that the index falls into as well.
    """
    if not bad.any():
        return
    i = int(np.argmax(bad))
    more = int(bad.sum()) - 1
    also = f" ({more} more like it)" if more else ""
    raise InvalidInputError(f"{owner}.{field} {rule}: {place(i, entry, offsets)} has {values[i]}{also}.")


def place(index: int, entry: str, offsets: np.ndarray | None) -> str:
    """Words for where `index` is: `"row 2, entry 7"`, or `"padding entry 9"` past the last offset."""
    if offsets is None:
        return f"{entry} {index}"
    row = int(np.searchsorted(offsets, index, side="right")) - 1
    return f"row {row}, {entry} {index}" if row < len(offsets) - 1 else f"padding {entry} {index}"


def per_field(check: Callable[..., object], owner: object, *fields: str, **kwargs: object) -> None:
    """Run `check` on several fields of a frozen dataclass and store what it returns."""
    for field in fields:
        object.__setattr__(owner, field, check(type(owner).__name__, field, getattr(owner, field), **kwargs))
