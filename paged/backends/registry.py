"""Backends by name: entry points of the group `paged.backends`, loaded on first use (requirement B1).

An entry point names a factory, `make_backend(**options) -> AttentionBackend`. Neither importing its module nor calling
it touches a device, so a machine without the vendor's stack can still list and refuse.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paged.backends.protocol import AttentionBackend
from paged.common import Capabilities
from paged.common.errors import BackendUnavailableError, InvalidInputError

GROUP = "paged.backends"
BUILT_IN = {
    "reference": "paged.reference.backend:make_backend",
    "xla": "paged.backends.xla:make_backend",
    "cpu": "paged.backends.cpu:make_backend",
    "flashinfer": "paged.backends.flashinfer:make_backend",
    "aiter": "paged.backends.aiter:make_backend",
}
"""Also found without distribution metadata, as in a source tree on PYTHONPATH."""

MEMBERS = tuple(name for name in vars(AttentionBackend) if not name.startswith("_"))
"""Attributes and methods that an object must have to be a backend."""


def list_backends() -> dict[str, str]:
    """Every backend that is registered, name -> `module:factory`, sorted by name. Imports none of them.

    Raises `BackendUnavailableError` if two distributions claim one name.
    """
    return {name: found[name].value for found in (_entry_points(),) for name in sorted(found)}


def get_backend(name: str, **options: Any) -> AttentionBackend:
    """The backend that is registered as `name`, made with `options`; the same object for the same arguments.

    - `options`: passed to the factory, which documents them (tier, build directory, …); hashable values.

    Raises `BackendUnavailableError` if the name is unknown (the message lists the known ones), if its module or
    something that it imports is missing, or if what the factory makes is not an `AttentionBackend` (the message names
    the missing member); `InvalidInputError` if the factory takes no such option.
    """
    try:
        return _make(name, tuple(sorted(options.items())))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        raise InvalidInputError(f"get_backend({name!r}): options must be hashable, got {options!r}.") from None


@functools.lru_cache(maxsize=None, typed=True)
def _make(name: str, options: tuple[tuple[str, Any], ...]) -> AttentionBackend:
    factory = _load(name)
    arguments = dict(options)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise InvalidInputError(f"backend {name!r} does not take these options: {error}. Got {arguments!r}.") from None
    backend = factory(**arguments)
    _check(name, backend)
    return backend


def _load(name: str) -> Callable[..., Any]:
    known = _entry_points()
    if name not in known:
        raise BackendUnavailableError(
            f"no backend is registered as {name!r}; known: {', '.join(sorted(known))}. A package registers one through "
            f"the entry point group {GROUP!r}."
        )
    try:
        return known[name].load()
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"backend {name!r} ({known[name].value}) cannot be loaded: {error}. Install what it needs, or use another "
            f"of {', '.join(sorted(known))}."
        ) from error


def _entry_points() -> dict[str, EntryPoint]:
    importlib.invalidate_caches()
    found = {name: EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise BackendUnavailableError(
                f"two backends are registered as {point.name!r}: {other.value} and {point.value}. Uninstall one."
            )
    return found


def _check(name: str, backend: Any) -> None:
    for member in MEMBERS:
        if not hasattr(backend, member):
            raise BackendUnavailableError(
                f"backend {name!r}: its factory made a {type(backend).__name__}, which has no {member!r}; "
                f"paged.backends.protocol.AttentionBackend describes it."
            )
    if not isinstance(backend.capabilities, Capabilities):
        raise BackendUnavailableError(
            f"backend {name!r}: capabilities must be a Capabilities, got {type(backend.capabilities).__name__}."
        )
    try:
        hash(backend)
    except TypeError:
        raise BackendUnavailableError(
            f"backend {name!r}: its {type(backend).__name__} is not hashable, and it is a static argument of the "
            f"jitted step. A frozen dataclass is."
        ) from None
