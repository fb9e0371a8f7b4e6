"""Who executes a vendor's FFI targets: the vendor's own libraries on its device, or something else under their names.

A backend over FFI calls targets by name, and XLA finds what is registered under the name for the platform. So the whole
backend, its plans, layouts, masks, aliases and sharding, runs wherever somebody registers a handler. An executor is
that somebody, and a certificate says which one it was (`environment.executor`).

An executor is chosen by `paged certify BACKEND --executor NAME`, made in the worker process with
`--executor-option NAME=VALUE`, and started before the backend is made. None but `native` may let the name of a device
architecture into a certificate.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from paged.common.errors import InvalidInputError

NATIVE = "native"
EXECUTORS: Mapping[str, tuple[str, str]] = {
    NATIVE: ("conformance.executors.native", "the vendor's libraries on the vendor's device"),
    "cpu-handlers": ("conformance.executors.cpu_handlers", "handlers of our own on CPU, from C++ sources"),
    "triton-interpreter": (
        "conformance.executors.triton_interpreter",
        "the vendor's Triton kernels, interpreted on CPU",
    ),
    "lowering-only": ("conformance.executors.lowering_only", "nothing is executed: programs are lowered and read"),
}
"""Name -> module with a factory `make_executor(**options)`, and what it is. A closed list: a name imports nothing."""


class Executor(Protocol):
    """What the worker asks of an executor.

    - `name`: its name in `EXECUTORS`. `backend`: the entry point whose targets it serves.
    - `executes`: whether calls run at all; where not, no case of the catalogue does.
    """

    name: str
    backend: str
    executes: bool

    def start(self) -> Mapping[str, Any]:
        """Register every target of the backend's contract, and return options for the backend's factory.

        Called once, after jax was set up and before the backend is made. Raises `BackendUnavailableError` with the
        next step if something needed is missing.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """What the certificate's `environment.executor` says besides the name: JSON-able, the same for equal runs."""
        ...


def make_executor(name: str, backend: str, options: Mapping[str, Any]) -> Executor:
    """The executor `name` for a backend. Raises `InvalidInputError` for a name, backend or option that it has not."""
    if name not in EXECUTORS:
        raise InvalidInputError(f"executor {name!r} is not one of {', '.join(EXECUTORS)}.")
    module = EXECUTORS[name][0]
    try:
        factory = importlib.import_module(module).make_executor
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InvalidInputError(f"executor {name!r} is not part of this release.") from None
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise InvalidInputError(f"executor {name!r} does not take these options: {error}.") from None
    made = factory(**options)
    if made.backend != backend:
        raise InvalidInputError(f"executor {name!r} serves the backend {made.backend!r}, not {backend!r}.")
    return made
