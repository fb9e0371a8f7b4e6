"""The vendor's own libraries: nothing is registered here, the backend loads what is installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Native:
    """See the module."""

    name: str = "native"
    backend: str = "aiter"
    executes: bool = True

    def start(self) -> Mapping[str, Any]:
        """No options: the backend's default is the vendor's device."""
        return {}

    def describe(self) -> Mapping[str, Any]:
        """The vendor's stack: versions, libraries and device."""
        from conformance.kits.aiter.stack import describe_stack

        return describe_stack()


def make_executor() -> Native:
    """The factory."""
    return Native()
