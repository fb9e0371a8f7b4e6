"""What a case demands of a declaration, and what of it is not declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from conformance.case import Case
from paged.common import Capabilities
from paged.common.capabilities import FEATURES, PROMISES, REGIMES
from paged.common.errors import InvalidInputError

_VALUED: dict[str, Callable[[Capabilities, str], bool]] = {
    "dtype": lambda c, v: v in c.dtypes,
    "kv_dtype": lambda c, v: v in c.kv_dtypes,
    "page": lambda c, v: int(v) in c.page_sizes,
    "head_dim": lambda c, v: int(v) in c.head_dims,
    "group": lambda c, v: int(v) in c.group_sizes,
    "promise": lambda c, v: v in c.promises,
    "regime": lambda c, v: v in c.regimes,
    "pool_layout": lambda c, v: c.pool_layout == v,
    "pool_storage": lambda c, v: c.pool_storage == v,
    "poison": lambda c, v: c.poison in ("any_bits", v),
    "max_page_id": lambda c, v: int(v) <= c.max_page_id,
    "pool_bytes": lambda c, v: int(v) <= c.max_pool_bytes,
}
_CHOICES = {"promise": PROMISES, "regime": REGIMES}


def required(case: Case) -> tuple[str, ...]:
    """The case's `needs`, with the kind of batch as a backend meets it: by the bound of the rung, not by the rows.

    A step of single tokens in a rung whose `max_query_len` is above 1 is run by the kernels for mixed batches, so it
    asks nothing of a declaration of `decode`; only a step in a rung of bound 1 does.
    """
    rung, ladder = case.params.get("rung"), case.params.get("ladder")
    if "decode" not in case.needs or not rung or rung["max_query_len"] <= 1 or ladder:
        return case.needs
    return tuple(sorted({*case.needs, "mixed"} - {"decode"}))


def unmet(needs: Iterable[str], capabilities: Capabilities) -> list[str]:
    """Those of `needs` that the backend does not declare. Raises `InvalidInputError` for a need nobody can have."""
    return [need for need in needs if not _declared(need, capabilities)]


def _declared(need: str, capabilities: Capabilities) -> bool:
    name, colon, value = need.partition(":")
    if not colon and name in FEATURES:
        return name in capabilities.features
    if name not in _VALUED or (name in _CHOICES and value not in _CHOICES[name]):
        raise InvalidInputError(
            f"need {need!r} is not one of the features {', '.join(sorted(FEATURES))} or of "
            f"{', '.join(f'{n}:…' for n in _VALUED)}."
        )
    try:
        return _VALUED[name](capabilities, value)
    except ValueError:
        raise InvalidInputError(f"need {need!r}: {value!r} is not an int.") from None
