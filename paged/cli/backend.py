"""The backend that a command's `--backend` and `--option` name, before anything slow is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged.backends.protocol import AttentionBackend


def ready(name: str, options: Sequence[tuple[str, Any]]) -> AttentionBackend:
    """The backend, made and prepared: what it has to compile is compiled when this returns, or said to be missing.

    Raises `BackendUnavailableError` and `InvalidInputError` as `get_backend` and the backend's `prepare` do.
    """
    from paged.backends.registry import get_backend
    from paged.common.errors import InvalidInputError

    given = dict(options)
    if len(given) < len(options):
        names = [key for key, _ in options]
        twice = next(key for key in names if names.count(key) > 1)
        raise InvalidInputError(f"--option {twice} is there {names.count(twice)} times. Give it once.")
    backend = get_backend(name, **given)
    if (prepare := getattr(backend, "prepare", None)) is not None:
        prepare()
    return backend
