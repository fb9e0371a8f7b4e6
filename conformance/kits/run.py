"""Runs the checks of a kit: id -> `Result`, in the process where the backend is."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from conformance.case import Result
from conformance.kits import KITS
from paged.common.errors import InvalidInputError

Check = Callable[["Context"], Result]
CHECKS: dict[str, Check] = {}
"""Id -> what it does; filled by the kits' modules when they are imported."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What a check works with: a `conformance.runner.Session`, its backend and the executor; `id` is the check's."""

    id: str
    session: Any
    executor: Any

    @property
    def backend(self) -> Any:
        """The backend under test."""
        return self.session.backend

    def passed(self, elements: int = 1, **details: Any) -> Result:
        """The statement holds; `details` are facts for the certificate."""
        return Result(id=self.id, status="pass", elements=elements, decided=elements, details=details)

    def failed(self, diagnosis: str, **details: Any) -> Result:
        """The statement does not hold."""
        return Result(id=self.id, status="fail", clause="kit", diagnosis=diagnosis, details=details)

    def not_claimed(self, diagnosis: str, **details: Any) -> Result:
        """The statement is about something that the backend does not claim here."""
        return Result(id=self.id, status="not-claimed", diagnosis=diagnosis, details=details)


def run(backend: str, context: Context) -> Result:
    """One check's result; an exception is an `error`."""
    from conformance.execute import ReplicaError
    from conformance.runner import describe_error

    for module in KITS[backend].modules:
        importlib.import_module(module)
    if context.id not in CHECKS:
        raise InvalidInputError(f"the kit of {backend!r} has no check {context.id!r}.")
    try:
        return CHECKS[context.id](context)
    except ReplicaError as error:
        return context.failed(str(error))
    except Exception as error:
        return Result(id=context.id, status="error", diagnosis=describe_error(error))


def check(*ids: str) -> Callable[[Check], Check]:
    """Register a function as what one or more checks do; it finds the id in its context."""

    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(ids, function))
        return function

    return register
