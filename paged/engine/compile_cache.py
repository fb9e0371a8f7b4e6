"""Compiled programs on disk, so that a second run of the same model and shapes compiles nothing."""

from __future__ import annotations

import os
from pathlib import Path

import jax

VARIABLE = "PAGED_COMPILE_CACHE"
"""Environment variable that names the directory; `off` does without."""


def use_compile_cache(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs in a directory from now on, and use those that are there; which one, or None for none.

    - `directory`: by default `$PAGED_COMPILE_CACHE`, else `paged/programs` in `$XDG_CACHE_HOME` or `~/.cache`.

    A cache that jax was already told to use stays, `$JAX_COMPILATION_CACHE_DIR` included. jax looks programs up by what
    is compiled, its own version, the options and the device, so a directory may be shared by all of them; who can write
    to it can change what runs.
    """
    if directory is None:
        if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
            return Path(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
        named = os.environ.get(VARIABLE)
        if named is not None and named.lower() in ("", "off", "0"):
            return None
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = named or Path(home) / "paged" / "programs"
    path = Path(directory)
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return path
