"""What ran: versions, and digests of the vendor's kernel sources as they lie in this environment."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import platform
from pathlib import Path
from typing import Any

from . import emulator, patches, targets

PACKAGES = ("amd-aiter", "triton", "torch", "jax", "jaxlib", "numpy")
MODULES = (
    "unified_attention",
    "fused_kv_cache",
    "rope",
    "chunked_pa_prefill",
    "pa_prefill",
    "_triton_kernels/unified_attention",
    "_triton_kernels/fused_kv_cache",
    "_triton_kernels/rope",
    "_triton_kernels/chunked_pa_prefill",
    "_triton_kernels/pa_prefill",
)
"""The vendor's files that are run, in `aiter/ops/triton`."""


def describe() -> dict[str, Any]:
    """What the certificate says of the executor, JSON-able, the same for equal environments."""
    folder = vendor_folder()
    return {
        "packages": versions(),
        "python": platform.python_version(),
        "sources": {f"{m}.py": f"sha256:{digest_of(folder / f'{m}.py')}" for m in MODULES},
        "as_shipped": not changed(),
        "interpreter": f"sha256:{digest_of(interpreter_source())}",
        "targets": dict(targets.SERVES),
        "compute_units": emulator.compute_units(),
        "patches": {p.name: p.reason for p in patches.PATCHES},
    }


def changed() -> list[str]:
    """Those of `MODULES` whose digest is not the one that the installed wheel's RECORD has."""
    recorded = {str(f): f.hash.value for f in importlib.metadata.files("amd-aiter") or () if f.hash is not None}
    out = []
    for module in MODULES:
        digest = hashlib.sha256((vendor_folder() / f"{module}.py").read_bytes()).digest()
        if recorded.get(f"aiter/ops/triton/{module}.py") != base64.urlsafe_b64encode(digest).rstrip(b"=").decode():
            out.append(module)
    return out


def versions() -> dict[str, str]:
    """Package -> installed version."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def vendor_folder() -> Path:
    """Where the vendor's Triton modules lie."""
    spec = importlib.util.find_spec("aiter")
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or ()))) / "ops" / "triton"


def interpreter_source() -> Path:
    """The file of Triton that interprets."""
    import triton.runtime.interpreter as interpreter

    return Path(interpreter.__file__)


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
