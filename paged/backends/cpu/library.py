"""Compiles, finds, checks and loads the C++ kernels, and registers them with XLA, once per process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paged.backends import native
from paged.common.errors import BackendUnavailableError, InvalidInputError

TARGETS = ("paged_cpu_append", "paged_cpu_attend", "paged_cpu_layers", "paged_cpu_logits")
"""XLA FFI targets that the library defines, each under a symbol of the same name."""

SOURCES = Path(__file__).parent / "csrc"
UNIT = "handlers.cc"
"""What the compiler is given; it includes everything else."""

FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")
"""Besides the flag for this machine's instruction sets, `native.NATIVE_FLAGS`. No compiler fuses what csrc does not."""

DIRECTORY_VARIABLE = "PAGED_CPU_DIR"
SECONDS = 10
TITLE = "the CPU kernels"

_lock = threading.Lock()
_loaded: Mapping[str, Any] | None = None


def default_directory() -> Path:
    """Where builds are kept: `$PAGED_CPU_DIR`, else `cpu` under the user's cache of paged."""
    if given := os.environ.get(DIRECTORY_VARIABLE):
        return Path(given).absolute()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without an entry, in a container
        raise BackendUnavailableError(
            f"{TITLE} have no place to be kept: there is no home directory. Set {DIRECTORY_VARIABLE}."
        ) from None
    return cache.absolute() / "paged" / "cpu"


def say(line: str) -> None:
    """A line on stderr."""
    print(f"paged: {line}", file=sys.stderr, flush=True)


def build(directory: Path | None = None, *, sources: Path | None = None, progress: Callable[[str], None] = say) -> Path:
    """The path of the library for this machine, compiled unless a build of the same is kept in `directory`.

    - `directory`: None is `default_directory()`. `sources`: the folder of the `*.h` and `*.cc`, None is `SOURCES`.
    - `progress`: is given a line before anything is compiled.

    Where nothing can be compiled (no compiler, a directory that cannot be written, a compiler that fails) a build of
    the same sources, headers, flags and machine by another compiler is taken, and `progress` told why. Without one,
    raises `BackendUnavailableError`, which says what to do; `BuildFailedError` if it was the compiler that failed. Uses
    no device.
    """
    sources = SOURCES if sources is None else sources
    unit = sources / UNIT
    if not unit.is_file():
        raise BackendUnavailableError(f"{TITLE} have no source {unit}; install paged again.")
    recipe = native.Recipe(
        title=TITLE,
        sources=sources,
        units=(unit,),
        flags=FLAGS,
        base=default_directory() if directory is None else directory.absolute(),
        native=True,
        seconds=SECONDS,
        variable=DIRECTORY_VARIABLE,
    )
    try:
        return native.build(recipe, native.find_compiler(), progress)
    except BackendUnavailableError as error:
        library = native.kept(recipe)
        if library is None:
            raise type(error)(
                f"{TITLE} are not built for this machine in {recipe.base}, and cannot be: {error}"
            ) from None
        progress(f"{str(error).splitlines()[0]} Taking {library.parent}, which another compiler built.")
        return library


def ffi_target(name: str) -> str:
    """The name of an XLA FFI target of platform `cpu`, which is registered when this returns.

    `name`: one of `TARGETS`. Raises as `prepare` does.
    """
    if name not in TARGETS:
        raise InvalidInputError(f"target {name!r} is not one of {', '.join(TARGETS)}.")
    prepare()
    return name


def prepare() -> Mapping[str, Any]:
    """What the loaded library is, as `native.describe` says it.

    The first call of a process compiles the library if it has to, loads it and registers all `TARGETS`; threads that
    call at the same time wait for it. Raises as `build` does, and `BackendUnavailableError` if it cannot be loaded.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            import jax

            library = build()
            _, capsules = native.load(library, TARGETS)
            for target, capsule in capsules.items():
                jax.ffi.register_ffi_target(target, capsule, platform="cpu")
            _loaded = native.describe(library)
    return _loaded
