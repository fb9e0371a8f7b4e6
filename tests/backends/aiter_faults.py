"""The handlers with faults, compiled once and registered for CPU in the test process."""

import ctypes
import functools

import pytest

from conformance.executors.cpu_handlers import DEFAULT_DIRECTORY, build, register_library
from paged.backends.aiter.contract import TARGETS
from paged.backends.aiter.targets import provide
from paged.backends.registry import get_backend


@functools.cache
def library() -> ctypes.CDLL:
    """Honest until `set_fault` is called with a fault's name; XLA keeps the first handlers of a process."""
    built = build([DEFAULT_DIRECTORY / "broken.cc"], DEFAULT_DIRECTORY)
    return register_library(built, tuple(TARGETS), provider="tests", to=provide)


def set_fault(name: str) -> None:
    assert library().set_fault(name.encode()) == 0, name


@pytest.fixture
def aiter():
    """The backend on CPU, its handlers honest."""
    set_fault("")
    yield get_backend("aiter", platform="cpu")
    set_fault("")
