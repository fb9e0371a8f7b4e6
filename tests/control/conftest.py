"""What the tests of this room share. None of them needs jax."""

import sys

import pytest


@pytest.fixture
def own_checks_only():
    """The run-time type checker stands aside: it would refuse wrong types before our code sees them."""
    jaxtyping = sys.modules.get("jaxtyping")
    if jaxtyping is None:
        yield
        return
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
