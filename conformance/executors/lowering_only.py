"""Nothing is executed: programs are lowered for the vendor's platform, on any machine, and read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class LoweringOnly:
    """See the module. Lowering needs no target to be registered."""

    name: str = "lowering-only"
    backend: str = "aiter"
    executes: bool = False

    def start(self) -> Mapping[str, Any]:
        """The backend is made as if every target were there, for lowering alone."""
        return {"lower_only": True}

    def describe(self) -> Mapping[str, Any]:
        """What was lowered for."""
        return {"lowered_for": "rocm"}


def make_executor() -> LoweringOnly:
    """The factory."""
    return LoweringOnly()
