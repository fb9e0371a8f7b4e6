"""Handlers compiled from C++ sources against the FFI headers that jaxlib ships, registered for CPU.

The sources are `*.cc` and `*.h` of a folder: by default `tests/aiter_handlers` of the checkout that this package lies
in, otherwise `--executor-option directory=DIR`. Every `*.cc` there that is not named `broken*` goes into one library. A
library is built once for its sources, its compiler and its headers, and loaded only with the SHA-256 that was written
down when it was built (requirement X5).
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.canonical import digest_files
from paged.backends import native
from paged.common.errors import BackendUnavailableError

DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "tests" / "aiter_handlers"
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w")


@dataclasses.dataclass(frozen=True)
class CpuHandlers:
    """See the module. `compiler` is the name or path of a C++17 compiler; None takes `$CXX`, else `g++`."""

    directory: Path = DEFAULT_DIRECTORY
    compiler: str | None = None
    name: str = "cpu-handlers"
    backend: str = "aiter"
    executes: bool = True

    def start(self) -> Mapping[str, Any]:
        """Build, load and register; the backend then runs on CPU."""
        from paged.backends.aiter.contract import TARGETS
        from paged.backends.aiter.targets import provide

        register_library(self.library(), tuple(TARGETS), provider=f"cpu-handlers {self.directory.name}", to=provide)
        return {"platform": "cpu"}

    def describe(self) -> Mapping[str, Any]:
        """Digests of sources and library, and the compiler's own words about its version."""
        library = self.library()
        return {
            "sources": digest_files((p.name, p) for p in sources(self.directory)),
            "library": f"sha256:{hashlib.sha256(library.read_bytes()).hexdigest()}",
            "compiler": native.compiler_version(find_compiler(self.compiler)),
        }

    def library(self) -> Path:
        """The compiled library, built on first use."""
        units = [p for p in sources(self.directory) if p.suffix == ".cc" and not p.name.startswith("broken")]
        return build(units, self.directory, compiler=self.compiler)


def make_executor(directory: str | None = None, compiler: str | None = None) -> CpuHandlers:
    """The factory; see `CpuHandlers`."""
    return CpuHandlers(DEFAULT_DIRECTORY if directory is None else Path(directory), compiler)


def sources(directory: Path) -> list[Path]:
    """The folder's C++ files, by name. Raises `BackendUnavailableError` if it has no unit to compile."""
    found = native.source_files(directory)
    if not any(p.suffix == ".cc" for p in found):
        raise BackendUnavailableError(
            f"no handler sources (*.cc) in {directory}. They lie in tests/aiter_handlers of a checkout; give the "
            f"folder with --executor-option directory=DIR."
        )
    return found


def find_compiler(name: str | None = None) -> list[str]:
    """The compiler's command. Raises `BackendUnavailableError` without one: that is never a reason to skip."""
    return native.find_compiler(name, among=("g++",), naming="with --executor-option compiler=PATH")


def build(units: Sequence[Path], directory: Path, *, compiler: str | None = None, defines: Sequence[str] = ()) -> Path:
    """The library of `units`, built unless a build of the same sources, headers, compiler and flags is kept.

    Raises `BackendUnavailableError` with the compiler's message.
    """
    from conformance.supervisor import cache_directory

    sources(directory)  # says what is missing
    recipe = native.Recipe(
        title="the handlers",
        sources=directory,
        units=tuple(units),
        flags=(*FLAGS, *defines),
        base=cache_directory() / "aiter-handlers",
        file="handlers.so",
    )
    return native.build(recipe, find_compiler(compiler))


def register_library(library: Path, names: Sequence[str], *, provider: str, to: Any) -> ctypes.CDLL:
    """Register a library's symbols under their names for CPU, through `to`; the loaded library."""
    loaded, capsules = native.load(library, names)
    for name, capsule in capsules.items():
        to(name, platform="cpu", provider=provider, capsule=capsule)
    return loaded
