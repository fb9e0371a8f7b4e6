"""Handlers compiled from C++ sources against the FFI headers that jaxlib ships, registered for CPU.

The sources are `*.cc` and `*.h` of a folder: by default `tests/aiter_handlers` of the checkout that this package lies
in, otherwise `--executor-option directory=DIR`. Every `*.cc` there that is not named `broken*` goes into one library. A
library is built once for its sources, its compiler and its headers, and loaded only with the SHA-256 that was written
down when it was built (requirement X5).
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.canonical import digest, digest_files
from paged.common.errors import BackendUnavailableError

DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "tests" / "aiter_handlers"
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w")
BUILD_SECONDS = 300


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
            "compiler": compiler_version(find_compiler(self.compiler)),
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
    found = sorted(p for p in directory.glob("*") if p.suffix in (".cc", ".h"))
    if not any(p.suffix == ".cc" for p in found):
        raise BackendUnavailableError(
            f"no handler sources (*.cc) in {directory}. They lie in tests/aiter_handlers of a checkout; give the "
            f"folder with --executor-option directory=DIR."
        )
    return found


def find_compiler(name: str | None = None) -> str:
    """Path of the compiler. Raises `BackendUnavailableError` without one: that is never a reason to skip."""
    wanted = name or os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise BackendUnavailableError(
            f"no C++ compiler {wanted!r} on this machine. Install one (e.g. apt-get install g++), or name one with "
            f"--executor-option compiler=PATH."
        )
    return found


def compiler_version(compiler: str) -> str:
    """The first line of what it says of itself."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout.splitlines() or ["unknown"])[0]


def build(units: Sequence[Path], directory: Path, *, compiler: str | None = None, defines: Sequence[str] = ()) -> Path:
    """The library of `units`, built unless a build of the same sources, headers, compiler and flags is kept.

    Raises `BackendUnavailableError` with the compiler's message.
    """
    import jax

    found, include = find_compiler(compiler), jax.ffi.include_dir()
    headers = Path(include) / "xla" / "ffi" / "api"
    made_of = [
        digest_files((p.name, p) for p in sources(directory)),
        digest_files((p.name, p) for p in sorted(headers.glob("*.h"))),
        [p.name for p in units],
        [compiler_version(found), *FLAGS, *defines],
    ]
    folder = _cache() / digest(made_of)[7:31]
    library, manifest = folder / "handlers.so", folder / "manifest.json"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together compile once
        if not _intact(library, manifest):
            _compile([found, *FLAGS, *defines, "-I", include], units, library, manifest)
    return library


def _compile(command: Sequence[str], units: Sequence[Path], library: Path, manifest: Path) -> None:
    """The library and its manifest, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        fresh, written = Path(scratch) / library.name, Path(scratch) / manifest.name
        whole = [*command, "-o", str(fresh), *map(str, units)]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
        if done.returncode:
            raise BackendUnavailableError(f"the handlers do not compile: {done.stderr.strip()[:2000]}")
        written.write_text(json.dumps({"sha256": hashlib.sha256(fresh.read_bytes()).hexdigest()}))
        fresh.replace(library)
        written.replace(manifest)


def _intact(library: Path, manifest: Path) -> bool:
    try:
        recorded = json.loads(manifest.read_text())["sha256"]
        return hashlib.sha256(library.read_bytes()).hexdigest() == recorded
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _cache() -> Path:
    from conformance.supervisor import cache_directory

    return cache_directory() / "aiter-handlers"


def register_library(library: Path, names: Sequence[str], *, provider: str, to: Any) -> ctypes.CDLL:
    """Register a library's symbols under their names for CPU, through `to`; the loaded library."""
    import jax

    loaded = ctypes.CDLL(str(library))
    for name in names:
        try:
            symbol = getattr(loaded, name)
        except AttributeError:
            raise BackendUnavailableError(f"{library} defines no handler {name}.") from None
        to(name, platform="cpu", provider=provider, capsule=jax.ffi.pycapsule(symbol))
    return loaded
