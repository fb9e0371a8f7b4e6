"""What the tests of this room share."""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

from paged.models import random_decoder


@pytest.fixture(autouse=True)
def no_programs_on_disk(monkeypatch):
    monkeypatch.setenv("PAGED_COMPILE_CACHE", "off")


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A random model of 64 positions and 256 byte tokens, as a Hugging Face directory."""
    path = Path(__file__).parents[1] / "models" / "tiny_checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints_of_models", path)
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    model = random_decoder(tiny.CONFIG, jax.random.key(1))
    return str(tiny.write_huggingface(tmp_path_factory.mktemp("models") / "tiny", tiny.hf_tensors(model)))


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
