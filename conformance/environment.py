"""What a certificate records about where it was made: versions, device, sources, state of the suite's tree."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

from conformance.canonical import digest_files, dumps
from paged.common.errors import InvalidInputError

GROUP = "paged.backends"
ROOT = Path(__file__).parent
SUITE_PARTS = ("conformance", "paged/common", "paged/backends")
"""What a verdict depends on besides the backend: the suite, and what hands it its arguments."""

_IGNORED = {"__pycache__"}
_OPTIONS = ("default_matmul_precision", "enable_x64", "disable_jit")
"""Options of jax that can move bits."""
_PACKAGES = ("jaxlib", "numpy", "equinox", "ml_dtypes", "jaxtyping")


def introduce(backend: Any, name: str, value: str, executor: Any = None) -> dict[str, Any]:
    """What a certificate says of a backend and of where it ran, JSON-able: claims, backend, environment.

    `name`, `value`: the backend's entry point. `executor`: who serves its FFI targets, if it has one. What the backend
    compiles is compiled when this returns; raises what its `prepare` does.
    """
    declared = backend.capabilities
    numerics = dataclasses.asdict(declared.numeric_model)
    build = prepare(backend)
    return {
        "claims": declared.to_json(),
        "backend": describe_backend(name, value) | {"numerics": numerics} | ({} if build is None else {"build": build}),
        "environment": describe() | ({} if executor is None else {"executor": describe_executor(executor)}),
    }


def prepare(backend: Any) -> dict[str, Any] | None:
    """What the backend's optional `prepare` says of its libraries, or None; see `paged.backends.protocol`."""
    method = getattr(backend, "prepare", None)
    found = method() if callable(method) else None
    if found is None:
        return None
    try:
        if not isinstance(found, Mapping):
            raise TypeError(f"it is a {type(found).__name__}")
        return json.loads(dumps(dict(found)))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"backend {backend.name!r}: prepare() must return a mapping that JSON can hold, or None: {error}."
        ) from None


def describe_executor(executor: Any) -> dict[str, Any]:
    """The executor's name and what it says of itself."""
    return {**executor.describe(), "name": executor.name}


def describe() -> dict[str, Any]:
    """Versions and device. Touches the devices of the running process, which must be where the cases run."""
    import jax

    device = current_device()
    version = device.client.platform_version
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": len(all_devices()),
        "driver": " ".join(str(version).split()),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": cpu_model(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_options": {name: str(jax.config.values.get(f"jax_{name}")) for name in _OPTIONS},
        "packages": package_versions(_PACKAGES),
    }


def current_device() -> Any:
    """The device that jax uses by default, however it was chosen."""
    import jax.numpy as jnp

    (device,) = jnp.zeros(()).devices()
    return device


def all_devices() -> list[Any]:
    """Every device of the platform that jax uses by default: what a mesh is made of."""
    import jax

    return jax.devices(current_device().client.platform)


def cpu_model() -> str:
    """Name of the host's processor; its instruction set can decide bits on CPU."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor()


def package_versions(names: tuple[str, ...]) -> dict[str, str]:
    """name -> installed version, for those that are installed."""
    out = {}
    for name in names:
        try:
            out[name] = importlib.metadata.version(name)
        except PackageNotFoundError:
            continue
    return out


def describe_backend(name: str, value: str) -> dict[str, Any]:
    """The backend's entry point, its distribution with what that requires, and a digest of its source files.

    `value` is the entry point's `module:factory`.
    """
    module = value.partition(":")[0]
    distribution, requires = "source tree", {}
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == name and point.dist is not None:
            distribution = f"{point.dist.name} {point.dist.version}"
            requires = package_versions(_required(point))
    return {
        "entry_point": name,
        "factory": value,
        "distribution": distribution,
        "packages": requires,
        "sources": digest_files(module_files(module)),
    }


def _required(point: EntryPoint) -> tuple[str, ...]:
    lines = (point.dist.requires if point.dist else None) or []
    names = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines if "extra ==" not in line)
    return tuple(sorted({match.group(0) for match in names if match}))


def module_files(module: str) -> list[tuple[str, Path]]:
    """Files of the package that holds a backend's module: names relative to the package's parent, and paths.

    That is the module's own folder if it is a package, otherwise the folder that it lies in; a module outside any
    package is one file.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"module {module!r} has no file, so its sources cannot be digested")
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None and "." not in module:
        return [(origin.name, origin)]
    return [(str(p.relative_to(origin.parent.parent)), p) for p in _files(origin.parent)]


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not _IGNORED & set(path.parts) and path.suffix != ".pyc":
            yield path


def describe_suite(version: str, catalogue_version: str, catalogue_digest: str) -> dict[str, Any]:
    """The suite's version, catalogue, source digest and the state of its tree."""
    parent = ROOT.parent
    files = [(str(p.relative_to(parent)), p) for part in SUITE_PARTS for p in _files(parent / part)]
    return {
        "version": version,
        "catalogue_version": catalogue_version,
        "catalogue": catalogue_digest,
        "sources": digest_files(files),
        "tree": tree_state(files),
    }


def tree_state(files: list[tuple[str, Path]]) -> str:
    """`clean`, `dirty` or `unknown`: by git where the suite lies in a checkout, else by the hashes of its install."""
    parent = ROOT.parent
    if _git("ls-files", "--error-unmatch", "conformance/__init__.py") is not None:
        changes = _git("status", "--porcelain", "--untracked-files=all", "--", *SUITE_PARTS)
        return "unknown" if changes is None else "dirty" if changes.strip() else "clean"
    try:
        recorded = importlib.metadata.distribution("paged").files or []
    except PackageNotFoundError:
        return "unknown"
    hashes = {str(f): f.hash.value for f in recorded if f.hash is not None and f.hash.mode == "sha256"}
    if f"{ROOT.name}/__init__.py" not in hashes or not Path(str(recorded[0].locate())).is_relative_to(parent):
        return "unknown"
    return "clean" if all(hashes.get(name) == _record_hash(path) for name, path in files) else "dirty"


def _record_hash(path: Path) -> str:
    """SHA-256 as the RECORD of an installed distribution spells it."""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT.parent), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def envelope() -> dict[str, Any]:
    """What is not part of the statement: when, where, and room for a signature."""
    import datetime

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"time": now, "host": platform.node(), "signature": None}
