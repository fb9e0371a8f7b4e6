"""The exceptions, and values shown in their messages."""

import pytest

from paged.common import (
    BackendUnavailableError,
    BuildFailedError,
    DirtyPageError,
    DonatedPoolError,
    InternalError,
    InvalidInputError,
    LateCompileError,
    PagedError,
    PoolExhaustedError,
    StaleHandleError,
    UnsupportedError,
    UseAfterFreeError,
    errors,
)
from paged.common.checks import show

KINDS = {
    InvalidInputError: ValueError,
    UnsupportedError: ValueError,
    BackendUnavailableError: RuntimeError,
    BuildFailedError: RuntimeError,
    StaleHandleError: KeyError,
    UseAfterFreeError: ValueError,
    DirtyPageError: RuntimeError,
    PoolExhaustedError: RuntimeError,
    DonatedPoolError: RuntimeError,
    LateCompileError: RuntimeError,
    InternalError: AssertionError,
}


def test_every_error_of_the_room_is_in_the_list():
    assert set(KINDS) == {kind for kind in vars(errors).values() if isinstance(kind, type)} - {PagedError}


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_ours_and_of_the_kind_that_python_programs_expect(kind):
    error = kind("page 7 is dirty", capability="lse") if kind is UnsupportedError else kind("page 7 is dirty")
    assert isinstance(error, PagedError)
    assert isinstance(error, KINDS[kind])
    assert str(error) == "page 7 is dirty"


def test_a_refused_demand_names_the_capability():
    assert UnsupportedError("no", capability="page_sizes").capability == "page_sizes"
    with pytest.raises(TypeError):
        UnsupportedError("no")  # type: ignore[call-arg]


def test_shown_values_are_short_and_never_fail():
    class Mute:
        def __repr__(self):
            raise RuntimeError("mute")

    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    assert show(7) == "7"
    assert show(True) == "True"
    assert show("x" * 10**6).startswith("'xxx")
    assert show(10**10_000) == "an int of 33220 bits"
    assert show([2**200]) == "[an int of 201 bits]"
    for value in (deep, "x" * 10**6, b"x" * 10**6, list(range(10**5)), Mute(), {1: deep}):
        assert len(show(value)) < 200
