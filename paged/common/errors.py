"""The few exception types of `paged`.

A message names the field, the row and the value it objects to, and says what to do next. A refusal happens before
anything is changed, so the caller may correct its input and call again.
"""


class PagedError(Exception):
    """Base class of every exception that `paged` raises on purpose."""


class InvalidInputError(PagedError, ValueError):
    """An argument is not of the documented form. Nothing was changed."""


class UnsupportedError(PagedError, ValueError):
    """A backend was asked for more than it declares.

    `capability` is the name of the declared capability that falls short, e.g. `"page_sizes"` or `"soft_cap"`.
    """

    def __init__(self, message: str, *, capability: str):
        super().__init__(message)
        self.capability = capability


class BackendUnavailableError(PagedError, RuntimeError):
    """A backend is not installed, not built, or finds no device; the message says which and how to get it."""


class BuildFailedError(BackendUnavailableError):
    """A backend's kernels were to be compiled here, and the compiler failed; the message has its words."""


class StaleHandleError(PagedError, KeyError):
    """A request handle outlived its request: the row it names was recycled under a later epoch."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UseAfterFreeError(PagedError, ValueError):
    """A page was freed, shared or named although it is not allocated."""


class DirtyPageError(PagedError, RuntimeError):
    """A page table was asked for over pages that were freed and not confirmed overwritten since."""


class PoolExhaustedError(PagedError, RuntimeError):
    """A request needs more pages than the pool can ever give."""


class DonatedPoolError(PagedError, RuntimeError):
    """A pool handle was used after its buffers were donated to a step; use the pool that the step returned."""


class LateCompileError(PagedError, RuntimeError):
    """A step needs a program that the warm-up did not compile, and the engine is strict. Nothing was started."""


class InternalError(PagedError, AssertionError):
    """An invariant of `paged` itself is broken (`ControlPlane.verify`). Always a fault of ours."""
