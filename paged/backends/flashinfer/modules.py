"""Finds, checks and loads compiled modules, and registers their functions with XLA, once per process."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import pathlib
from collections.abc import Iterator

from paged.backends.flashinfer.build import MANIFEST, sha256
from paged.backends.flashinfer.generate import module_key
from paged.backends.flashinfer.module_spec import ModuleSpec
from paged.common.errors import BackendUnavailableError

DIRECTORY_VARIABLE = "PAGED_FLASHINFER_DIR"

_FUNCTIONS = {
    "append": ("paged_append", ["args", "attrs.layout"]),
    "decode": ("paged_decode", ["args", "rets", *(f"attrs.{a}" for a in ("plan", "window_left", "soft_cap", "scale"))]),
    "prefill": (
        "paged_prefill",
        ["args", "rets", *(f"attrs.{a}" for a in ("plan", "causal", "window_left", "soft_cap", "scale"))],
    ),
}
_FUNCTIONS["prefill_sm90"] = (_FUNCTIONS["prefill"][0], [*_FUNCTIONS["prefill"][1], "attrs.multiprocessors"])
_DECODE = ("blocks", "split", "window", "has_sinks", "parts", "cap", "scale")
_LAYERS = ("times", "plus", "pool_times", "pool_plus", "count", "num_pages")
_LAYERS += ("blocks", "split", "window", "terms", "cap", "scale", "eps", "overlap")
_OWN_FUNCTIONS = {
    "decode": ("paged_decode", ["args", "rets", *(f"attrs.{a}" for a in _DECODE)]),
    "rotate_append": ("paged_rotate_append", ["args", "rets", "attrs.num_pages"]),
    "layers": ("paged_layers", ["args", "rets", *(f"attrs.{a}" for a in _LAYERS)]),
}
"""Functions of a module of kind `paged`."""


def default_directory() -> pathlib.Path:
    """Where modules are looked for: `$PAGED_FLASHINFER_DIR`, else `flashinfer` under the user's cache of paged."""
    if given := os.environ.get(DIRECTORY_VARIABLE):
        return pathlib.Path(given)
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "paged" / "flashinfer"


@functools.cache
def manifest(directory: pathlib.Path) -> dict:
    """The directory's manifest, or `BackendUnavailableError` with the build command."""
    try:
        return json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        raise BackendUnavailableError(
            f"no FlashInfer modules at {directory}. Build them (nvcc, no GPU needed): paged build flashinfer "
            f"--output {directory}; or set {DIRECTORY_VARIABLE} to a directory that was built elsewhere."
        ) from None


_ASKED: contextvars.ContextVar[set[ModuleSpec] | None] = contextvars.ContextVar("asked", default=None)


@contextlib.contextmanager
def asked() -> Iterator[set[ModuleSpec]]:
    """The modules that are asked for inside, which need not be built: for tracing, nothing traced here can run."""
    found: set[ModuleSpec] = set()
    token = _ASKED.set(found)
    try:
        yield found
    finally:
        _ASKED.reset(token)


def ffi_target(spec: ModuleSpec, directory: pathlib.Path, name: str | None = None) -> str:
    """Name of the XLA FFI target of a module, loaded and registered on first use.

    `name`: which function of a `paged` module.

    The library's bytes must match the manifest's SHA-256, and its key what this release would build (requirement X5):
    adapters and kernels that do not belong together are refused, not called.
    """
    if (found := _ASKED.get()) is None:
        return _loaded(spec, directory, name)
    found.add(spec)
    return f"paged.flashinfer.{spec.name}.asked"


@functools.cache
def _loaded(spec: ModuleSpec, directory: pathlib.Path, name: str | None) -> str:
    found = manifest(directory)
    entry, file = found["modules"].get(spec.name), directory / f"{spec.name}.so"
    if entry is None:
        have = ", ".join(sorted(found["modules"])) or "none"
        raise BackendUnavailableError(
            f"module {spec.name} is not built in {directory} (there: {have}). Run: paged build flashinfer "
            f"--output {directory} --module {spec.name}"
        )
    if entry["key"] != module_key(spec, found["arch"], found["flashinfer"]):
        raise BackendUnavailableError(
            f"module {spec.name} in {directory} was built by another release; build it again."
        )
    if not file.is_file() or sha256(file) != entry["sha256"]:
        raise BackendUnavailableError(f"{file} does not match the SHA-256 of its manifest; it is not loaded.")
    try:
        import jax_tvm_ffi  # pyright: ignore[reportMissingImports]
        import tvm_ffi  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendUnavailableError(
            f"calling FlashInfer needs jax-tvm-ffi ({error}). Run: pip install 'paged[flashinfer]'"
        ) from None
    function, arguments = _FUNCTIONS[spec.kind] if name is None else _OWN_FUNCTIONS[name]
    target = f"paged.flashinfer.{spec.name}.{name or spec.kind}.{entry['key']}"
    module = tvm_ffi.load_module(str(file))
    jax_tvm_ffi.register_ffi_target(
        target, module.get_function(function), arguments, platform="gpu", allow_cuda_graph=True
    )
    return target
