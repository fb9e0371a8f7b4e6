"""AITER's own Triton kernels, interpreted on CPU, under jax-aiter's target names.

The code that touches torch, Triton and AITER lies outside this package, in the folder `tools/aiter_triton` of the
checkout or where `--executor-option directory=DIR` says, and is loaded when the executor is started, in the worker
process alone. It needs an environment of its own, which `make .venv-aiter/.ready` builds; nothing here or in `paged`
imports torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.canonical import digest_files
from paged.common.errors import BackendUnavailableError, InvalidInputError

PACKAGE = "aiter_triton"
DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "tools" / PACKAGE
NEEDED = ("torch", "triton", "aiter")
"""Modules that the folder's code imports, besides jax and numpy."""


@dataclasses.dataclass(frozen=True)
class TritonInterpreter:
    """See the module.

    - `directory`: the folder of the vendor's side.
    - `compute_units`: what the vendor's heuristics are told the device has. They choose kernels and segments by it.
    """

    directory: Path = DEFAULT_DIRECTORY
    compute_units: int = 304
    name: str = "triton-interpreter"
    backend: str = "aiter"
    executes: bool = True

    def start(self) -> Mapping[str, Any]:
        """Start the emulator and register every target; the backend then runs on CPU."""
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise BackendUnavailableError(
                f"the vendor's kernels need {', '.join(missing)}, not installed in {sys.prefix}. Run `make "
                f"certify-aiter`, which makes an environment for them, or use one's Python: see "
                f"{self.directory / 'README.md'}."
            )
        self.vendor("emulator").start(compute_units=self.compute_units)
        self.vendor("targets").register()
        return {"platform": "cpu"}

    def describe(self) -> Mapping[str, Any]:
        """Versions, digests of the vendor's sources and of ours, what serves which target, patches, compute units."""
        files = sorted(p for p in self.directory.glob("*.py"))
        return {
            **self.vendor("provenance").describe(),
            "executor_sources": digest_files((p.name, p) for p in files),
        }

    def vendor(self, module: str) -> Any:
        """A module of the folder, e.g. `"targets"`; the folder is a package under one name, whatever its path."""
        init = self.directory / "__init__.py"
        if PACKAGE not in sys.modules:
            spec = importlib.util.spec_from_file_location(
                PACKAGE, init, submodule_search_locations=[str(self.directory)]
            )
            if spec is None or spec.loader is None or not init.is_file():
                raise BackendUnavailableError(
                    f"no {init}. It lies in tools/{PACKAGE} of a checkout; give the folder with "
                    f"--executor-option directory=DIR."
                )
            package = importlib.util.module_from_spec(spec)
            sys.modules[PACKAGE] = package
            spec.loader.exec_module(package)
        elif Path(sys.modules[PACKAGE].__file__ or "").resolve() != init.resolve():
            raise InvalidInputError(f"{PACKAGE} was loaded from another folder than {self.directory}.")
        return importlib.import_module(f"{PACKAGE}.{module}")


def make_executor(directory: str | None = None, compute_units: int = 304) -> TritonInterpreter:
    """The factory; see `TritonInterpreter`."""
    if isinstance(compute_units, bool) or not isinstance(compute_units, int) or compute_units < 1:
        raise InvalidInputError(f"compute_units must be an int of at least 1, got {compute_units!r}.")
    return TritonInterpreter(DEFAULT_DIRECTORY if directory is None else Path(directory), compute_units)
