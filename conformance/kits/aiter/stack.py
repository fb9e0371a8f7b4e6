"""The vendor's stack as a certificate records it: device, driver, mapped runtimes, libraries and their origin."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conformance.environment import package_versions

MAPS = Path("/proc/self/maps")
FORBIDDEN = ("torch", "transformers", "triton")
"""Each brings a HIP runtime or an LLVM of its own into the process."""
PACKAGES = ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-rocm10-plugin", "jax-rocm10-pjrt", "jax-aiter")
VARIABLES = re.compile(
    r"(HIP|HSA|ROCR|ROCM|GPU|NCCL|RCCL|JA|AITER|AMD)_|XLA_(FLAGS|PYTHON_CLIENT)|CUDA_VISIBLE_DEVICES"
)
DRIVER = Path("/sys/module/amdgpu/version")
COMPUTE_NODES = ("simd_count", "cu_count", "gfx_target_version", "num_xcc", "local_mem_size", "device_id")


def describe_stack() -> dict[str, Any]:
    """Everything that the certificate of a run on an AMD device says of its stack."""
    from paged.backends.aiter import machine
    from paged.backends.aiter.probe import probe

    report = probe()
    return {
        "architectures": list(report.architectures),
        "rocm": report.rocm,
        "driver": _text(DRIVER),
        "nodes": [
            {k: n[k] for k in COMPUTE_NODES if k in n} for n in machine.nodes() if n.get("simd_count", "0") != "0"
        ],
        "partition": partitions(),
        "runtimes": mapped(r"libamdhip64\.so"),
        "rccl": mapped(r"librccl\.so"),
        "packages": package_versions(PACKAGES),
        "jax_aiter": {
            "version": report.version,
            **origin(report.root),
            "libraries": {t.library.name: t.sha256 for t in report.targets.values() if t.library is not None},
        },
        "variables": {k: v for k, v in sorted(os.environ.items()) if VARIABLES.match(k)},
        "known_failures": [f.id for f in report.failures],
        "route": "paged-kv",
    }


def mapped(pattern: str, maps: Path = MAPS) -> dict[str, str]:
    """Files mapped into this process whose names match, each once: real path -> SHA-256."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return {}
    found = {line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6}
    real = sorted({os.path.realpath(p) for p in found if re.search(pattern, os.path.basename(p))})
    return {path: digest_of(Path(path)) for path in real}


def digest_of(path: Path) -> str:
    """SHA-256 of a file, or why there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def forbidden(modules: Iterable[str] | None = None) -> list[str]:
    """Modules of this process that bring another runtime with them."""
    loaded = set(sys.modules if modules is None else modules)
    return [name for name in FORBIDDEN if name in loaded]


def partitions() -> dict[str, str]:
    """Compute and memory partition modes (SPX, CPX, NPS1, …) by device, as the driver shows them."""
    out = {}
    for name in ("current_compute_partition", "current_memory_partition"):
        for path in sorted(Path("/sys/class/drm").glob(f"card*/device/{name}")):
            out[f"{path.parent.parent.name}/{name}"] = _text(path) or "unknown"
    return out


def origin(root: Path | None) -> dict[str, Any]:
    """Commits of jax-aiter's tree and of its submodules, and whether it was changed."""
    if root is None:
        return {"root": None}
    modules = _git(root, "submodule", "status", "--recursive") or ""
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "submodules": {
            parts[1]: parts[0].lstrip("+-U") for line in modules.splitlines() if len(parts := line.split()) >= 2
        },
        "filter": _makefile_value(root / "Makefile.kv", "BP_FILTER"),
        "defines": _makefile_value(root / "Makefile.kv", "BP_DEFINES"),
        "kernels": compiled_kernels(root),
    }


def compiled_kernels(root: Path) -> list[str]:
    """Names of the decode kernels in the generated dispatch table, if the build kept it."""
    found = sorted((root / "build").rglob("pa_dispatch_generated.h"))
    return sorted({n for p in found for n in re.findall(r"pa_ragged_[0-9a-f]{32}", p.read_text("utf-8", "replace"))})


def _makefile_value(path: Path, name: str) -> str | None:
    text = _text(path)
    found = re.search(rf"^{name}\s*:?=\s*(.*)$", text or "", re.MULTILINE)
    return found.group(1).strip() if found else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
