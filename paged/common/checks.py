"""Argument checks shared by the types of this package. Each error names the field, the row if any, and the value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paged.common.errors import InvalidInputError

INT32_LIMIT = 2**31


def check_int(owner: str, field: str, value: object, *, minimum: int, maximum: int = INT32_LIMIT - 1) -> int:
    """`value` as a Python int in `minimum` .. `maximum`. Booleans and floats are refused, numpy integers are not."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InvalidInputError(
            f"{owner}.{field} must be an int, got {value!r} of type {type(value).__name__}. Pass a Python int."
        )
    if not minimum <= value <= maximum:
        raise InvalidInputError(f"{owner}.{field} must be in {minimum}..{maximum}, got {value}.")
    return int(value)


def check_number(owner: str, field: str, value: object, *, positive: bool = False) -> float:
    """`value` as a finite Python float, positive if asked."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidInputError(f"{owner}.{field} must be a number, got {value!r} of type {type(value).__name__}.")
    number = float(value)
    if not np.isfinite(number):
        raise InvalidInputError(f"{owner}.{field} must be finite, got {number!r}.")
    if positive and number <= 0:
        raise InvalidInputError(f"{owner}.{field} must be positive, got {number!r}.")
    return number


def check_bool(owner: str, field: str, value: object) -> bool:
    """`value` as a Python bool; integers are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInputError(f"{owner}.{field} must be a bool, got {value!r} of type {type(value).__name__}.")
    return bool(value)


def check_int32_vector(owner: str, field: str, value: object, length: int | None = None) -> np.ndarray:
    """`value` as a contiguous one-dimensional int32 array, copied and made read-only.

    Sequences of ints and int64 arrays are cast only if every value fits, so that no length is ever cut to 32 bits
    (scenario L5); any other dtype is refused.
    """
    array = np.asarray(value)
    if array.size == 0 and array.dtype == np.float64 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)  # an empty list has no dtype of its own
    if array.ndim != 1:
        raise InvalidInputError(f"{owner}.{field} must be one-dimensional, got shape {array.shape}.")
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{owner}.{field} must be int32, got dtype {array.dtype}. Cast it exactly first.")
    if length is not None and array.shape[0] != length:
        raise InvalidInputError(f"{owner}.{field} must have length {length}, got {array.shape[0]}.")
    if array.dtype != np.int32:
        bad = (array >= INT32_LIMIT) if array.dtype.kind == "u" else (array >= INT32_LIMIT) | (array < -INT32_LIMIT)
        refuse_rows(owner, field, array, bad, "must fit 32 bits")
    array = np.array(array, dtype=np.int32, order="C", copy=True)
    array.flags.writeable = False
    return array


def refuse_rows(owner: str, field: str, values: np.ndarray, bad: np.ndarray, rule: str, row: str = "row") -> None:
    """Raise on the first true element of `bad`, naming `field`, its index and its value."""
    if bad.any():
        i = int(np.argmax(bad))
        more = int(bad.sum()) - 1
        also = f" ({more} more like it)" if more else ""
        raise InvalidInputError(f"{owner}.{field} {rule}: {row} {i} has {values[i]}{also}.")


def check_choice(owner: str, field: str, value: object, choices: frozenset[str] | tuple[str, ...]) -> str:
    """`value` as one of `choices`."""
    if value not in choices:
        raise InvalidInputError(f"{owner}.{field} must be one of {', '.join(sorted(choices))}; got {value!r}.")
    return str(value)


def per_field(check: Callable[..., object], owner: object, *fields: str, **kwargs: object) -> None:
    """Run `check` on several fields of a frozen dataclass and store what it returns."""
    for field in fields:
        object.__setattr__(owner, field, check(type(owner).__name__, field, getattr(owner, field), **kwargs))
