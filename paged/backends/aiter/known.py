"""Known failures of the vendor's stack, as data: each takes features away from the declaration where it applies.

What is taken away is not claimed, so cases that need it are `not-claimed`, and asking for it is refused by name. An
entry has a reason and a source; it ends when the vendor's fix is in a release that the entry does not match.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """`rocm` is a glob of releases, `architectures` those it was seen on, `without` the features it takes away."""

    id: str
    rocm: str
    architectures: tuple[str, ...]
    without: tuple[str, ...]
    reason: str
    source: str


KNOWN_FAILURES = (
    KnownFailure(
        id="causal-prefill-rocm7.2-gfx950",
        rocm="7.2*",
        architectures=("gfx950",),
        without=("prefill", "mixed", "window"),
        reason="a compiler fault makes causal batch prefill without a soft cap wrong; the vendor's own tests leave the "
        "combination out",
        source="ROCm/aiter, op_tests/test_batch_prefill.py, line 112 (aiter@e4048607)",
    ),
)


def applying(rocm: str | None, architectures: Iterable[str]) -> tuple[KnownFailure, ...]:
    """Entries for a release and the architectures of a machine; a release that is not known matches none."""
    here = set(architectures)
    return tuple(f for f in KNOWN_FAILURES if fnmatch.fnmatchcase(rocm or "", f.rocm) and here & set(f.architectures))
