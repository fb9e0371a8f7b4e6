"""Parameters of generators: a closed list of names, each with a type and bounds (requirement X5).

A case may come from a file that a stranger sent, so everything that decides a size is bounded here, before any array
is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from conformance.formats import FORMATS
from paged.common.errors import InvalidInputError

MAX_POOL_ELEMENTS = 1 << 24
MAX_QUERY_ELEMENTS = 1 << 21
MAX_LOGITS = 1 << 23
"""Logits that an oracle evaluates: tokens × query heads × tokens seen."""

Check = Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter: its check, and its default; `...` means that it must be given."""

    check: Check
    default: Any = ...


def integer(low: int, high: int) -> Check:
    """An int in low .. high."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidInputError(f"params.{name} must be an int in {low}..{high}, got {value!r}.")
        return value

    return check


def number(low: float, high: float) -> Check:
    """A number in low .. high, as a float."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise InvalidInputError(f"params.{name} must be a number in {low}..{high}, got {value!r}.")
        return float(value)

    return check


def boolean(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"params.{name} must be true or false, got {value!r}.")
    return value


def one_of(*choices: str) -> Check:
    """One of some words."""

    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise InvalidInputError(f"params.{name} must be one of {', '.join(choices)}; got {value!r}.")
        return value

    return check


def optional(check: Check) -> Check:
    """None, or what `check` takes."""
    return lambda name, value: None if value is None else check(name, value)


def integers(low: int, high: int, *, most: int) -> Check:
    """A list of at most `most` ints in low .. high."""
    each = integer(low, high)

    def check(name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > most:
            raise InvalidInputError(f"params.{name} must be a list of at most {most} ints, got {value!r}.")
        return tuple(each(f"{name}[{i}]", v) for i, v in enumerate(value))

    return check


def mapping(fields: Mapping[str, Check]) -> Check:
    """An object with exactly these fields."""

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or set(value) != set(fields):
            raise InvalidInputError(f"params.{name} must be an object with {', '.join(sorted(fields))}; got {value!r}.")
        return {key: fields[key](f"{name}.{key}", value[key]) for key in fields}

    return check


def several(check: Check, *, most: int) -> Check:
    """A list of at most `most` values that `check` takes."""

    def checked(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= most:
            raise InvalidInputError(f"params.{name} must be a list of 1 to {most}, got {value!r:.80}.")
        return tuple(check(f"{name}[{i}]", v) for i, v in enumerate(value))

    return checked


def triples(name: str, value: Any) -> tuple[tuple[int, int, int], ...]:
    """A list of at most 64 [row, row, count]."""
    if not isinstance(value, (list, tuple)) or len(value) > 64:
        raise InvalidInputError(f"params.{name} must be a list of at most 64 triples, got {value!r:.80}.")
    each = integers(0, 4096, most=3)
    out = tuple(each(f"{name}[{i}]", entry) for i, entry in enumerate(value))
    if any(len(entry) != 3 for entry in out):
        raise InvalidInputError(f"params.{name} must hold [row, of, pages], got {value!r:.80}.")
    return out  # type: ignore[return-value]


def _anything(name: str, value: Any) -> Any:
    return value


_COUNT = integer(1, 1 << 17)
_DTYPE = one_of(*FORMATS)
_GEOMETRY = {
    "dtype": Param(_DTYPE),
    "page": Param(integer(1, 1024)),
    "num_pages": Param(integer(2, 1 << 18)),
    "kv_heads": Param(integer(1, 64)),
    "head_dim": Param(integer(1, 512)),
    "value_head_dim": Param(optional(integer(1, 512)), None),
    "layers": Param(integer(1, 64), 1),
    "layer": Param(integer(0, 63), 0),
}
RUNG = mapping(
    {"rows": _COUNT, "tokens": _COUNT, "listed_pages": _COUNT, "max_query_len": _COUNT, "max_kv_len": _COUNT}
)
ROWS: Mapping[str, Param] = {
    "query_lens": Param(integers(0, 4096, most=256)),
    "kv_lens": Param(integers(0, 1 << 16, most=256)),
    "rung": Param(optional(RUNG), None),
    "page_order": Param(one_of("shuffled", "descending", "high", "strided"), "shuffled"),
    "share": Param(optional(triples), None),
}
"""Rows of a batch, and where their pages are."""

ATTEND: Mapping[str, Param] = {
    **_GEOMETRY,
    **ROWS,
    "kv_dtype": Param(optional(_DTYPE), None),
    "q_heads": Param(integer(1, 256)),
    "scale": Param(number(2.0**-10, 64.0)),
    "causal": Param(boolean, True),
    "window": Param(optional(integer(1, 1 << 16)), None),
    "soft_cap": Param(optional(number(2.0**-4, 1024.0)), None),
    "sinks": Param(optional(one_of("zero", "random")), None),
    "key_scale": Param(optional(number(2.0**-10, 2.0**10)), None),
    "value_scale": Param(optional(number(2.0**-10, 2.0**10)), None),
}
"""Parameters that every attend generator takes."""

MOVE: Mapping[str, Param] = {**_GEOMETRY, "fill": Param(one_of("bits", "special"), "bits")}
"""Parameters that every mover takes."""

RUNNER = ("relation", "mesh", "kv_axes", "check", "ask", "relation_args")
"""Parameters that generators leave to the runner, which validates them."""


def validate(params: Mapping[str, Any], schema: Mapping[str, Param]) -> dict[str, Any]:
    """All parameters of `schema`, checked, defaults filled in.

    Raises `InvalidInputError` naming the parameter and the value for one that is unknown, missing or out of bounds.
    """
    allowed = {**schema, **{name: Param(_anything, None) for name in RUNNER}}
    for name in params:
        if name not in allowed:
            raise InvalidInputError(f"params.{name} is not a parameter of this generator; it has {', '.join(allowed)}.")
    out = {}
    for name, param in schema.items():
        if name not in params and param.default is ...:
            raise InvalidInputError(f"params.{name} is missing.")
        out[name] = param.check(name, params[name]) if name in params else param.default
    _check_sizes(out)
    return out


def _check_sizes(p: Mapping[str, Any]) -> None:
    if p["layer"] >= p["layers"]:
        raise InvalidInputError(f"params.layer must be below layers = {p['layers']}, got {p['layer']}.")
    width = max(p["head_dim"], p["value_head_dim"] or 0)
    pool = p["layers"] * p["num_pages"] * p["page"] * p["kv_heads"] * width
    _at_most("the pool", pool, MAX_POOL_ELEMENTS)
    if "q_heads" not in p:
        return
    if p["q_heads"] % p["kv_heads"]:
        raise InvalidInputError(f"params.q_heads = {p['q_heads']} is not a multiple of kv_heads = {p['kv_heads']}.")
    if "query_lens" not in p:
        return
    if len(p["query_lens"]) != len(p["kv_lens"]):
        raise InvalidInputError(f"params.query_lens has {len(p['query_lens'])} rows, kv_lens {len(p['kv_lens'])}.")
    tokens = max(sum(p["query_lens"]), 0 if p["rung"] is None else p["rung"]["tokens"])
    _at_most("the query", tokens * p["q_heads"] * width, MAX_QUERY_ELEMENTS)
    seen = sum(q * n for q, n in zip(p["query_lens"], p["kv_lens"]))
    _at_most("the logits", seen * p["q_heads"], MAX_LOGITS)


def _at_most(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidInputError(f"params: {what} would have {count} elements, at most {limit}. Use smaller lengths.")


def refuse(p: Mapping[str, Any], family: str, *names: str) -> None:
    """Refuse parameters that a family has no use for."""
    for name in names:
        if p[name] is not None:
            raise InvalidInputError(f"params.{name} must be absent from {family}, got {p[name]!r}.")
