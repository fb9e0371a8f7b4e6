"""What a backend must leave alone while the suite looks at it: jax's options, the suite's and numpy's functions.

A backend runs in the process that judges it. This sees a backend that changes its surroundings, by accident or without
much art, and puts them back, so that one case pays for it and not all that follow. It is no wall: code in one process
can deceive other code in it, and a certificate does not say that none did.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

_JUDGES = ("conformance", "paged.common", "paged.backends.step", "paged.backends.moves", "paged.backends.metadata")
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


class Watch:
    """Jax's options and the functions that decide a verdict, as they are when this is made."""

    def __init__(self) -> None:
        # Imported when first needed otherwise, so that a backend could come before them.
        from conformance import diagnose_moves, relations, serving, structure  # noqa: F401

        self._options = dict(jax.config.values)
        modules = [(n, m) for n, m in sys.modules.items() if m is not None and _judges(n)]
        self._kept = [
            (where, owner, name, thing, _parts(thing))
            for module_name, module in sorted(modules)
            for where, owner, name, thing in _callables(module_name, module)
        ]

    def keep_options(self) -> None:
        """Take jax's options as they are now for those of the run: the backend is made, and the certificate says so."""
        self._options = dict(jax.config.values)

    def restore(self) -> list[str]:
        """What was changed since, as sentences; it is as before afterwards."""
        changed = []
        for name, before in self._options.items():
            now = jax.config.values.get(name)
            if now is not before and now != before:
                changed.append(f"it set jax's option {name} to {now!r:.40} (it was {before!r:.40})")
                jax.config.update(name, before)
        for where, owner, name, thing, parts in self._kept:
            if vars(owner).get(name) is not thing:
                changed.append(f"it put something else in the place of {where}")
                setattr(owner, name, thing)
            if parts is not None and (now := _parts(thing)) is not None and any(a is not b for a, b in zip(now, parts)):
                changed.append(f"it changed the code of {where}")
                for part, was in zip(_PARTS, parts):
                    setattr(thing, part, was)
        return changed


@contextlib.contextmanager
def signals_of_interrupt() -> Iterator[list[int]]:
    """A list that is empty until SIGINT comes from outside: a `KeyboardInterrupt` without it is the backend's own."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> Any:
        came.append(number)
        return before(number, frame) if callable(before) else None

    try:
        signal.signal(signal.SIGINT, note if callable(before) else before)
    except (ValueError, TypeError):  # not the main thread, or a handler that is none of Python's
        came.append(0)
        yield came
        return
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _judges(name: str) -> bool:
    return name == "numpy" or any(name == some or name.startswith(some + ".") for some in _JUDGES)


def _parts(thing: Any) -> tuple[Any, ...] | None:
    return tuple(getattr(thing, p) for p in _PARTS) if isinstance(thing, types.FunctionType) else None


def _callables(module_name: str, module: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Every function and class of a module, and every method of its own classes: dotted name, owner, name, itself."""
    for name, thing in list(vars(module).items()):
        if not callable(thing):
            continue
        yield f"{module_name}.{name}", module, name, thing
        if isinstance(thing, type) and thing.__module__ == module_name and module_name != "numpy":
            for inner, method in list(vars(thing).items()):
                if isinstance(method, types.FunctionType):
                    yield f"{module_name}.{name}.{inner}", thing, inner, method
