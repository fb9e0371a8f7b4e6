"""Generates and compiles FlashInfer's kernels from the sources inside the installed `flashinfer-python` package.

Nothing of FlashInfer is imported, at build or at run time (its Python needs torch): its `data/` tree holds headers and
templates, jinja2 renders four of them, nvcc compiles, and adapters of ours put the operands in XLA's order. No GPU is
needed to build. The result is a directory of libraries and a manifest with their SHA-256; see `modules.py` for loading.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable

from paged.backends.compilers import Compilers
from paged.backends.flashinfer.generate import FLAGS, Sources, generate, includes, module_key
from paged.backends.flashinfer.module_spec import ModuleSpec
from paged.common.errors import BackendUnavailableError, InvalidInputError

MANIFEST = "manifest.json"


def find_sources() -> Sources:
    """The installed `flashinfer-python`, found without importing it."""
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise BackendUnavailableError(
            "the package flashinfer-python is not installed, and its sources are what is compiled. "
            "Run: pip install --no-deps flashinfer-python"
        ) from None
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        raise BackendUnavailableError("flashinfer-python is installed but its folder was not found.")
    root = pathlib.Path(spec.origin).parent / "data"
    if not (root / "csrc" / "batch_decode.cu").is_file():
        raise BackendUnavailableError(f"flashinfer-python {version} holds no kernel sources at {root / 'csrc'}.")
    return Sources(root, version)


def find_nvcc() -> str:
    """Path of nvcc: `$NVCC`, then the PATH, then `$CUDA_HOME/bin`."""
    for candidate in (os.environ.get("NVCC"), shutil.which("nvcc"), f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc"):
        if candidate and pathlib.Path(candidate).is_file():
            return candidate
    raise BackendUnavailableError(
        "nvcc was not found on the PATH, in $NVCC or in $CUDA_HOME/bin. Install the CUDA toolkit (12.8 or newer), or "
        "build on another machine and carry the directory."
    )


def build(
    specs: Iterable[ModuleSpec],
    directory: pathlib.Path,
    *,
    arch: str = "9.0a",
    progress: Callable[[str], None] = print,
    jobs: int | None = None,
) -> pathlib.Path:
    """Compile the modules that `directory` lacks, and write its manifest.

    - `arch`: compute capability such as `9.0a`, `8.0`; `prefill_sm90` and `paged` modules need `9.0a`.
    - `jobs`: compilers at a time, by default one per core.
    - Raises `BackendUnavailableError` if nvcc or the sources are missing, or, once the other modules are built, with
      the output of each compilation that failed.
    """
    specs = sorted(set(specs), reverse=True)  # the slow ones, prefill_sm90, first
    sources, nvcc, manifest = find_sources(), find_nvcc(), _read_manifest(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        if spec.kind in ("prefill_sm90", "paged") and arch != "9.0a":
            raise InvalidInputError(f"build: module {spec.name} needs arch 9.0a, got {arch!r}.")
    missing = {
        spec: key
        for spec in specs
        if (key := module_key(spec, arch, sources.version)) != _built(manifest, spec, directory)
    }
    start, failed = time.monotonic(), []
    generated, compilers = directory / "generated", Compilers()
    compile_one = functools.partial(_compile, compilers, nvcc, sources, arch)
    with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        try:
            pending = {
                pool.submit(compile_one, spec, generated / spec.name, directory / f"{spec.name}.so"): spec
                for spec in missing
            }
            for done in concurrent.futures.as_completed(pending):
                spec = pending[done]
                file = directory / f"{spec.name}.so"
                try:
                    done.result()
                except BackendUnavailableError as error:
                    failed.append(error)
                    progress(f"{spec.name}: failed, after {time.monotonic() - start:.0f} s")
                    continue
                manifest["modules"][spec.name] = {
                    "key": missing[spec],
                    "sha256": sha256(file),
                    "spec": dataclasses.asdict(spec),
                }
                manifest.update(arch=arch, flashinfer=sources.version, schema=1)
                _write_manifest(directory, manifest)
                progress(f"{spec.name}: {file.stat().st_size >> 10} KiB, after {time.monotonic() - start:.0f} s")
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.stop()
            if isinstance(error, KeyboardInterrupt):
                kept = sum(_built(manifest, spec, directory) == key for spec, key in missing.items())
                error.add_note(
                    f"{kept} of {len(missing)} modules were built into {directory} and are kept; the same command "
                    f"builds the others"
                )
            raise
    shutil.rmtree(generated, ignore_errors=True)
    if failed:
        raise BackendUnavailableError("\n".join(map(str, failed)))
    return directory


def _built(manifest: dict, spec: ModuleSpec, directory: pathlib.Path) -> str | None:
    """The key that the module in `directory` was built with, if its bytes are those of the manifest."""
    entry, file = manifest["modules"].get(spec.name), directory / f"{spec.name}.so"
    return entry["key"] if entry and file.is_file() and entry["sha256"] == sha256(file) else None


def sha256(file: pathlib.Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read_manifest(directory: pathlib.Path) -> dict:
    file = directory / MANIFEST
    return json.loads(file.read_text()) if file.is_file() else {"modules": {}}


def _write_manifest(directory: pathlib.Path, manifest: dict) -> None:
    """Whole or not at all: an interrupted build keeps what it has built."""
    new = directory / f"{MANIFEST}.new"
    new.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    new.replace(directory / MANIFEST)


def _compile(
    compilers: Compilers,
    nvcc: str,
    sources: Sources,
    arch: str,
    spec: ModuleSpec,
    where: pathlib.Path,
    target: pathlib.Path,
) -> None:
    """Generate, compile and link one module."""
    code = arch.replace(".", "")
    source = generate(spec, sources, where)
    # What is left of host functions that nobody calls goes with its sections.
    link = ["-shared", "-cudart=shared", "-Xlinker", "--gc-sections", "-Xlinker", "-s"]
    command = [nvcc, *FLAGS, f"-gencode=arch=compute_{code},code=sm_{code}", *includes(sources, where), *link]
    done = compilers.run([*command, str(source), "-o", str(target)])
    if done.returncode:
        text = (done.stdout + done.stderr)[-6000:]
        raise BackendUnavailableError(f"nvcc failed on module {spec.name}:\n{text}")
