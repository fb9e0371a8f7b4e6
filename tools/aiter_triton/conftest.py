"""Eight virtual devices and the vendor's kernels as targets, once for all tests."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def executor():
    from conformance.executors import make_executor

    made = make_executor("triton-interpreter", "aiter", {})
    assert made.start() == {"platform": "cpu"}
    return made


@pytest.fixture(scope="session")
def session(executor):
    from conformance.runner import Session
    from paged.backends.registry import get_backend

    return Session(get_backend("aiter", platform="cpu"))
