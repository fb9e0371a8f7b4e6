"""What the tests of this room share. None of them needs jax."""

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_checks_only():
    """Types here validate themselves, so the run-time type checker that `tests/conftest.py` installs stands aside.

    It would refuse wrong types before our code sees them, and only where jax is installed.
    """
    jaxtyping = sys.modules.get("jaxtyping")
    if jaxtyping is None:
        yield
        return
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
