"""Inputs made from a case: a closed list of generators, numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.case import Case
from conformance.vectors.address import address
from conformance.vectors.census import census
from conformance.vectors.dyadic import dyadic, ladder
from conformance.vectors.generic import generic, steep
from conformance.vectors.movers import append_slots, append_step, copy_pages, scrub
from conformance.vectors.pools import owned_slots as owned_slots
from conformance.vectors.pools import poison_words as poison_words
from conformance.vectors.trace import trace
from conformance.vectors.vector import Facts as Facts
from conformance.vectors.vector import Trace as Trace
from conformance.vectors.vector import Vector as Vector
from paged.common.errors import InvalidInputError

Generator = Callable[[str, Mapping[str, Any], str], Vector]

GENERATORS: dict[str, Generator] = {
    "append_slots": append_slots,
    "append_step": append_step,
    "scrub": scrub,
    "copy_pages": copy_pages,
    "census": census,
    "address": address,
    "ladder": ladder,
    "dyadic": dyadic,
    "generic": generic,
    "steep": steep,
    "trace": trace,
}
"""Everything a case may name; a case cannot bring code (requirement X5)."""


def generate(case: Case, poison: str = "any_bits") -> Vector:
    """The inputs of `case`, and what is predicted of its answer.

    `poison` is what slots that must not be read hold: the backend's declared capability of that name. It changes no
    answer. Raises `InvalidInputError` naming the parameter that is unknown, missing or out of bounds.
    """
    if case.generator not in GENERATORS:
        raise InvalidInputError(
            f"case {case.id!r}: generator must be one of {', '.join(sorted(GENERATORS))}; got {case.generator!r}."
        )
    return GENERATORS[case.generator](case.id, case.params, poison)
