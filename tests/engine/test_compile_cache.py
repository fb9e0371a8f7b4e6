"""Where compiled programs are kept, and that a second process finds them there."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from paged.engine.compile_cache import use_compile_cache


@pytest.fixture(autouse=True)
def jax_as_it_was(monkeypatch):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    values = [getattr(jax.config, name) for name in names]
    jax.config.update(names[0], None)
    yield
    for name, value in zip(names, values):
        jax.config.update(name, value)


def test_the_directory_is_the_one_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PAGED_COMPILE_CACHE", raising=False)
    assert use_compile_cache() == tmp_path / "home" / "paged" / "programs"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "home" / "paged" / "programs")
    # What jax was told before stays, unless this call says otherwise.
    monkeypatch.setenv("PAGED_COMPILE_CACHE", str(tmp_path / "named"))
    assert use_compile_cache() == tmp_path / "home" / "paged" / "programs"
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compile_cache() == tmp_path / "named"
    assert use_compile_cache(tmp_path / "given") == tmp_path / "given"


@pytest.mark.parametrize("value", ["off", "OFF", "", "0"])
def test_off_is_off(monkeypatch, value):
    monkeypatch.setenv("PAGED_COMPILE_CACHE", value)
    assert use_compile_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


SCRIPT = """
import sys, jax
from paged.engine.compile_cache import use_compile_cache
use_compile_cache(sys.argv[1])
jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((7, 7)))
"""


def test_programs_are_kept_on_disk(tmp_path):
    root = str(Path(__file__).parents[2])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    counts = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, env=environment, timeout=120)
        counts.append(len([f for f in tmp_path.iterdir() if f.name.endswith("-cache")]))
    assert counts[0] == counts[1] > 0
