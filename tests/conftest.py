"""Strictness for every test: warnings are errors, jax promotes nothing, types and shapes are checked at run time.

Tests of the host side need no jax, so this file loads it only where it is installed.
"""

import importlib.util
import os
from pathlib import Path

HAS_JAX = importlib.util.find_spec("jax") is not None

if HAS_JAX:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    import jax
    from jaxtyping import install_import_hook

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    install_import_hook("paged", "beartype.beartype")

HOST_SIDE = ("common", "control")
# Folders and not what is in them: a folder's own conftest would be imported before its files are left out.
collect_ignore = [
    entry.name
    for entry in Path(__file__).parent.iterdir()
    if entry.is_dir() and entry.name not in HOST_SIDE and not HAS_JAX
]


def pytest_report_header() -> str | None:
    """Says what was left out; a run without jax must not look like a whole one."""
    return None if HAS_JAX else f"jax is not installed: only {', '.join(HOST_SIDE)} and the rules are tested"
