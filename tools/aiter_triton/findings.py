"""What the vendor's kernels do that a caller must know of, each with a reproducer that shows it again.

A finding is about the vendor's source at the version of requirements.txt, whose arithmetic the interpreter carries out
step by step. That a compiled kernel does the same on a device is likely and was not seen here.

    python tools/aiter_triton --findings             # the list
    python tools/aiter_triton --finding NAME         # reproduce one: what is claimed, and what was measured
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

VENDOR = "aiter/ops/triton"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Whether a finding was seen again, and the numbers that say so, JSON-able."""

    reproduced: bool
    measured: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One behaviour.

    - `what`: the claim, in a sentence. `where`: file and line in the vendor's wheel.
    - `known`: an issue or a source that told of it before; empty if it was found here.
    - `consequence`: what the backend does about it.
    """

    name: str
    what: str
    where: str
    consequence: str
    known: str = ""
    show: Callable[[], Evidence]

    def describe(self) -> dict[str, str]:
        """The finding as data, with the command that reproduces it."""
        fields = {name: getattr(self, name) for name in ("name", "what", "where", "known", "consequence")}
        return {**fields, "reproduce": f"python tools/aiter_triton --finding {self.name}"}


FINDINGS: dict[str, Finding] = {}
"""Name -> finding; filled by the modules that hold the reproducers."""


def finding(**fields: Any) -> Callable[[Callable[[], Evidence]], Callable[[], Evidence]]:
    """Register a reproducer under the fields of `Finding`."""

    def register(show: Callable[[], Evidence]) -> Callable[[], Evidence]:
        found = Finding(**fields, show=show)
        assert found.name not in FINDINGS
        FINDINGS[found.name] = found
        return show

    return register


def load() -> Mapping[str, Finding]:
    """All findings."""
    from . import findings_numbers, findings_shapes  # noqa: F401 (they register theirs)

    return FINDINGS
