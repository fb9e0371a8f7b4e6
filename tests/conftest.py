"""Strictness for every test: warnings are errors, jax promotes nothing, types and shapes are checked at run time.

Tests of the host side need no jax, so this file loads it only where it is installed.
"""

import importlib.util
import os

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

collect_ignore_glob = [] if HAS_JAX else ["backends/*", "reference/*", "models/*", "engine/*", "conformance/*"]
