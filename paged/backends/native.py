"""C++ libraries that are compiled on the machine that runs them, against the FFI headers that jaxlib ships.

A build is kept under `base/WHAT/COMPILER/`. `WHAT` is a digest of what the library is made of: sources, headers, flags
and, if it is for this machine alone, its instruction sets. `COMPILER` is a digest of the compiler's own words about its
version. A library is used only with the SHA-256 that was written beside it when it was built (requirement X5).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paged.backends.compilers import Compilers
from paged.common.errors import BackendUnavailableError, BuildFailedError

COMPILERS = ("c++", "g++", "clang++")
MANIFEST = "manifest.json"
SCRATCH = "scratch-"
BUILD_SECONDS = 600
NATIVE_FLAGS = ("-march=native", "-mcpu=native")
"""The first that a compiler knows; clang for ARM has only the second in some versions."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a library is made of, and where its builds are kept.

    - `title`: what messages call it, e.g. `"the CPU kernels"`; `seconds`: about how long one core takes.
    - `sources`: the folder whose `*.h` and `*.cc` decide what it is; `units`: the files that the compiler is given.
    - `native`: compiled for the instruction sets of this machine, and for no other machine.
    - `variable`: the environment variable that moves `base`, for messages.
    """

    title: str
    sources: Path
    units: tuple[Path, ...]
    flags: tuple[str, ...]
    base: Path
    file: str = "library.so"
    native: bool = False
    seconds: int = 0
    variable: str = "XDG_CACHE_HOME"

    def made_of(self) -> Mapping[str, object]:
        """Digests of everything that decides what the library is, but the compiler."""
        headers = ffi_include() / "xla" / "ffi" / "api"
        return {
            "sources": _digest_files(source_files(self.sources)),
            "units": [path.name for path in self.units],
            "headers": _digest_files(sorted(headers.glob("*.h"))),
            "flags": [*self.flags, *(NATIVE_FLAGS if self.native else ())],
            "machine": machine() if self.native else None,
        }

    def kept_in(self) -> Path:
        """The folder of this library's builds, one a compiler."""
        return self.base / _digest(self.made_of())


def ffi_include() -> Path:
    """The folder of jaxlib's headers."""
    import jax

    return Path(jax.ffi.include_dir())


def source_files(directory: Path) -> list[Path]:
    """The folder's C++ files, by name."""
    return sorted(path for path in directory.glob("*") if path.suffix in (".cc", ".h"))


def machine() -> str:
    """The machine's kind and instruction sets; a library for one value may end in an illegal instruction at another."""
    words: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features", "isa", "cpu"):  # x86, ARM, RISC-V, POWER
                words.update(value.split())
    return " ".join([platform.system(), platform.machine(), *(sorted(words) or [platform.processor()])])


def find_compiler(name: str | None = None, *, among: Sequence[str] = COMPILERS, naming: str = "in $CXX") -> list[str]:
    """The command that compiles C++: `name`, else `$CXX` (which may have arguments), else the first there `among`.

    - `naming`: where a user names another, for the message.

    Raises `BackendUnavailableError` without one.
    """
    given = name or os.environ.get("CXX") or ""
    candidates = [[given], given.split()] if given.strip() else [[program] for program in among]
    for program, *arguments in candidates:
        if found := shutil.which(program):
            return [found, *arguments]
    wanted = given.strip() or " or ".join(among)
    raise BackendUnavailableError(
        f"no C++ compiler {wanted!r} on this machine. Install one (e.g. apt-get install g++), or name one {naming}."
    )


def compiler_version(compiler: Sequence[str]) -> str:
    """The first line of what it says of itself."""
    try:
        done = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"the C++ compiler {shlex.join(compiler)} does not start: {error}") from None
    return (done.stdout.splitlines() or ["unknown"])[0]


def build(recipe: Recipe, compiler: Sequence[str], progress: Callable[[str], None] | None = None) -> Path:
    """The library's path; it is compiled unless a build by this compiler is kept and whole.

    - `compiler`: see `find_compiler`. `progress`: is given one line before anything is compiled.

    Processes that start together compile once; the others wait. Nothing is written where a whole build is kept. Raises
    `BuildFailedError` with the compiler's message, and `BackendUnavailableError` if the folder cannot be written.
    """
    version, made_of = compiler_version(compiler), recipe.made_of()
    folder = recipe.base / _digest(made_of) / _digest([version, *compiler[1:]])
    library = folder / recipe.file
    if _intact(library):
        return library
    try:
        with _locked(folder):
            if not _intact(library):
                if progress is not None:
                    took = f" (about {recipe.seconds} s, once)" if recipe.seconds else ""
                    progress(f"compiling {recipe.title} with {version} into {folder}{took}")
                manifest = {**made_of, "compiler": version, "arguments": compiler[1:]}
                _compile(recipe, compiler, library, manifest)
    except OSError as error:
        raise BackendUnavailableError(
            f"{recipe.title} cannot be kept in {folder}: {error.strerror or error}. Set {recipe.variable} to a "
            f"directory that can be written."
        ) from None
    return library


def kept(recipe: Recipe) -> Path | None:
    """The newest whole build of the same sources, headers, flags and machine, whoever compiled it."""
    found = [library for library in recipe.kept_in().glob(f"*/{recipe.file}") if _intact(library)]
    return max(found, key=lambda library: library.stat().st_mtime, default=None)


def describe(library: Path) -> dict[str, Any]:
    """What a kept library is, JSON-able: its SHA-256, and the manifest that was written when it was built.

    - `library`: "sha256:" and 64 digits; `sources`, `headers`: digests; `units`, `flags`: as they were given.
    - `compiler`: the first line of what it says of itself; `arguments`: what `$CXX` adds to its name.
    - `machine`: words: system, kind, then instruction sets; None for a library that is for no one machine.
    """
    found = json.loads((library.parent / MANIFEST).read_text())
    digest, machine = found.pop("sha256"), found["machine"]
    return {**found, "library": f"sha256:{digest}", "machine": None if machine is None else machine.split()}


def load(library: Path, names: Sequence[str]) -> tuple[ctypes.CDLL, dict[str, Any]]:
    """The loaded library, and the symbols of these names as `jax.ffi.register_ffi_target` takes them.

    Raises `BackendUnavailableError` if it cannot be loaded, or lacks one of them.
    """
    import jax

    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise BackendUnavailableError(f"{library} cannot be loaded: {error}.") from None
    capsules = {}
    for name in names:
        try:
            capsules[name] = jax.ffi.pycapsule(getattr(loaded, name))
        except AttributeError:
            raise BackendUnavailableError(f"{library} defines no handler {name}.") from None
    return loaded, capsules


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone in the folder; what earlier compilations left when they were killed is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _compile(recipe: Recipe, compiler: Sequence[str], library: Path, manifest: Mapping[str, object]) -> None:
    """The library and its manifest, whole or not at all; the compiler and its children end with this call."""
    compilers = Compilers()
    with (
        tempfile.TemporaryDirectory(dir=library.parent, prefix=SCRATCH) as scratch,
        concurrent.futures.ThreadPoolExecutor(1) as pool,  # so that a signal finds the compiler started or not at all
    ):
        fresh, written = Path(scratch) / library.name, Path(scratch) / MANIFEST
        env = {**os.environ, "TMPDIR": scratch}  # a compiler that is killed leaves its files

        def run() -> subprocess.CompletedProcess[str]:
            flags = [*recipe.flags, *_native_flag(recipe, compiler, compilers), "-isystem", str(ffi_include())]
            units = [str(path) for path in recipe.units]
            return compilers.run([*compiler, *flags, *units, "-o", str(fresh)], env)

        try:
            done = pool.submit(run).result(BUILD_SECONDS)
        except concurrent.futures.TimeoutError:
            compilers.stop()
            raise BuildFailedError(f"{recipe.title}: the compiler was at it for {BUILD_SECONDS} s.") from None
        except BaseException as error:
            compilers.stop()
            if isinstance(error, KeyboardInterrupt):
                error.add_note(f"{recipe.title} were being compiled; nothing of it is kept")
            raise
        if done.returncode:
            words = (done.stderr.strip() or done.stdout.strip())[:2000] or f"status {done.returncode}"
            raise BuildFailedError(f"{recipe.title} do not compile with {shlex.join(compiler)}: {words}")
        if any(manifest[name] != value for name, value in recipe.made_of().items()):
            raise BuildFailedError(f"the sources in {recipe.sources} were changed while they were compiled.")
        written.write_text(json.dumps({**manifest, "sha256": _sha256(fresh)}, indent=1, sort_keys=True) + "\n")
        fresh.replace(library)
        written.replace(library.parent / MANIFEST)


def _native_flag(recipe: Recipe, compiler: Sequence[str], compilers: Compilers) -> list[str]:
    if not recipe.native:
        return []
    for flag in NATIVE_FLAGS:
        if not compilers.run([*compiler, flag, "-x", "c++", "-E", os.devnull]).returncode:
            return [flag]
    return [NATIVE_FLAGS[0]]  # refused again, with the compiler's words


def _intact(library: Path) -> bool:
    try:
        return _sha256(library) == json.loads((library.parent / MANIFEST).read_text())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _digest_files(files: Iterable[Path]) -> str:
    return _digest([[path.name, _sha256(path)] for path in files])
