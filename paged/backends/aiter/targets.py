"""Which targets are registered with XLA in this process, by whom, and for which platform.

Everything that registers one, jax-aiter's libraries as well as what stands in for them on another platform, says so
here: XLA has no public list, and would name a missing target only when the first step runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from paged.backends.aiter.contract import TARGETS
from paged.common.errors import InvalidInputError

PLATFORMS = ("rocm", "cpu")
_provided: dict[tuple[str, str], Provided] = {}


@dataclasses.dataclass(frozen=True)
class Provided:
    """One registered target: its `platform`, and who brought it (`provider`, e.g. `"jax-aiter"`)."""

    name: str
    platform: str
    provider: str


def provide(name: str, *, platform: str, provider: str, capsule: Any = None) -> None:
    """Register a handler under a target's name, or, without `capsule`, note that the caller registered one.

    `capsule`: what `jax.ffi.pycapsule` gives. Noting again what is there is allowed; another provider for the same name
    and platform is refused, since XLA would keep the first.
    """
    if name not in TARGETS:
        raise InvalidInputError(f"target {name!r} is not one of {', '.join(TARGETS)}.")
    if platform not in PLATFORMS:
        raise InvalidInputError(f"platform must be one of {', '.join(PLATFORMS)}, got {platform!r}.")
    there = _provided.get((platform, name))
    if there is not None:
        if there.provider != provider:
            raise InvalidInputError(
                f"target {name!r} is registered for {platform} by {there.provider}; {provider} comes too late. "
                f"Use a process of its own for each."
            )
        return
    if capsule is not None:
        jax.ffi.register_ffi_target(name, capsule, platform={"rocm": "ROCM"}.get(platform, platform))
    _provided[platform, name] = Provided(name, platform, provider)


def provided(platform: str) -> Mapping[str, Provided]:
    """Targets that are registered for a platform, by name."""
    return {name: found for (where, name), found in _provided.items() if where == platform}
