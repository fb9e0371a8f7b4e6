"""What of jax-aiter is here: a report with a reason for everything that is not. Imports no torch, runs nothing.

Where jax-aiter's own wrappers are installed they are lowered, for which jax starts its default backend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged.backends.aiter import known
from paged.backends.aiter.contract import ROUTE, TARGETS
from paged.backends.aiter.declared import Declaration, in_sources, in_wrappers
from paged.backends.aiter.targets import provide, provided
from paged.common.errors import BackendUnavailableError

ROOT_VARIABLE = "JA_ROOT_DIR"
ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
"""The decode kernel's matrix instructions are those of gfx9; elsewhere nothing may be assumed."""
BUILD = """\
git clone --recursive https://github.com/ROCm/jax-aiter && cd jax-aiter    # at a commit that has Makefile.kv
export JA_ROOT_DIR=$PWD GPU_ARCHS=gfx942                                    # gfx950 on an MI350
make -f Makefile.kv ja_kv GFX=gfx942 -j16 \\
  BP_DEFINES='-DCK_TILE_FMHA_FWD_FAST_EXP2=1 -DCK_TILE_FLOAT_TO_BFLOAT16_DEFAULT=0'
pip install --no-deps -e ."""
"""How to get the targets. Makefile.kv's own BP_DEFINES truncate float32 to bfloat16 where 0 rounds to nearest."""


@dataclasses.dataclass(frozen=True)
class TargetReport:
    """One target: what is known of it and, if it cannot be used, why not.

    - `library`: its file, if one was found; `sha256` of it.
    - `declarations`: every ABI that the installation declares for its name.
    - `registered`: whether XLA has it for the platform; `provider`: who brought it.
    """

    name: str
    registered: bool
    provider: str | None = None
    library: Path | None = None
    sha256: str | None = None
    declarations: tuple[Declaration, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `probe` found. `problems` are about the whole installation, `architectures` those of the machine."""

    platform: str
    targets: Mapping[str, TargetReport]
    problems: tuple[str, ...] = ()
    version: str | None = None
    root: Path | None = None
    architectures: tuple[str, ...] = ()
    rocm: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the route `paged-kv` can be used."""
        return not self.reasons()

    @property
    def failures(self) -> tuple[known.KnownFailure, ...]:
        """Known failures of this ROCm release on these architectures."""
        return known.applying(self.rocm, self.architectures)

    @property
    def without(self) -> frozenset[str]:
        """Features that they take away."""
        return frozenset(feature for failure in self.failures for feature in failure.without)

    def reasons(self) -> list[str]:
        """Why the route cannot be used, one sentence for each reason."""
        lacking = [f"{n}: {self.targets[n].problem}" for n in ROUTE if self.targets[n].problem]
        return [*self.problems, *lacking]

    def require(self) -> None:
        """Raise `BackendUnavailableError` with every reason and the command that builds what is missing."""
        reasons = self.reasons()
        if not reasons:
            return
        step = f"Build jax-aiter's paged targets:\n{BUILD}"
        if self.platform != "rocm":
            step = "Start an executor that provides them: paged certify aiter --executor cpu-handlers."
        raise BackendUnavailableError(
            "backend 'aiter' is unavailable (route paged-kv):\n" + "\n".join(f"- {r}" for r in reasons) + f"\n{step}"
        )


def probe(platform: str = "rocm") -> Report:
    """Look at every target of the contract; on ROCm load and register what jax-aiter has and may be used."""
    if platform != "rocm":
        there = provided(platform)
        return Report(platform, {name: _provided(name, platform, there.get(name)) for name in TARGETS})
    return _probe_rocm()


def _provided(name: str, platform: str, found: Any) -> TargetReport:
    if found is None:
        return TargetReport(name, False, problem=f"nothing is registered under this name for {platform}")
    return TargetReport(name, True, provider=found.provider)


def _probe_rocm() -> Report:
    from paged.backends.aiter import machine

    here: dict[str, Any] = {"architectures": machine.architectures(), "rocm": machine.rocm_version()}
    there = provided("rocm")
    problems = [
        f"the architecture {a} is not one of {', '.join(ARCHITECTURES)}, for which the kernels are written"
        for a in here["architectures"]
        if a not in ARCHITECTURES
    ]
    before = "torch" in sys.modules
    registry, why = _registry()
    if registry is None and any(name not in there for name in ROUTE):
        return Report("rocm", {n: TargetReport(n, n in there) for n in TARGETS}, (*problems, why), **here)
    root = _root()
    declared = [*(in_sources(root) if root else ()), *in_wrappers()]
    if "torch" in sys.modules and not before:
        problems.append("importing jax_aiter imports torch, whose HIP runtime is not the one that jax uses")
    targets = {name: _target(name, registry, root, declared) for name in TARGETS}
    version = getattr(sys.modules.get("jax_aiter"), "__version__", None)
    return Report("rocm", targets, tuple(problems), version=version, root=root, **here)


def _registry() -> tuple[Any, str]:
    """jax-aiter's registry of libraries, or None and the reason."""
    if importlib.util.find_spec("jax_aiter") is None:
        return None, "jax-aiter is not installed"
    try:
        import jax_aiter.ffi.registry as registry  # pyright: ignore[reportMissingImports]
    except Exception as error:  # whatever it does on import; the report says so
        return None, f"jax-aiter cannot be imported: {type(error).__name__}: {error}"
    return registry, ""


def _root() -> Path | None:
    """The source tree of jax-aiter: `$JA_ROOT_DIR`, or where an editable install lies; None for a wheel."""
    if given := os.environ.get(ROOT_VARIABLE):
        return Path(given)
    spec = importlib.util.find_spec("jax_aiter")
    if spec is None or spec.origin is None:
        return None
    parent = Path(spec.origin).parent.parent
    return parent if (parent / "csrc").is_dir() else None


def _target(name: str, registry: Any, root: Path | None, declared: list[Declaration]) -> TargetReport:
    mine = tuple(d for d in declared if d.target == name)
    library = _library(name, root)
    report = TargetReport(
        name,
        registered=name in provided("rocm"),
        library=library,
        sha256=None if library is None else hashlib.sha256(library.read_bytes()).hexdigest(),
        declarations=mine,
    )
    wrong = [d for d in mine if not d.matches]
    if wrong:
        other = "; ".join(f"{d.where} declares {d.contract_id} with {_attributes(d)}" for d in wrong)
        expected = TARGETS[name]
        return dataclasses.replace(
            report,
            problem=f"another ABI under this name: {other}. This release calls {expected.contract_id} with "
            f"{', '.join(f'{n} {k}' for n, k in sorted(expected.attributes)) or 'no attributes'}",
        )
    return report if report.registered else _register(name, registry, report)


def _attributes(declaration: Declaration) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in declaration.attributes) or "no attributes"


def _register(name: str, registry: Any, report: TargetReport) -> TargetReport:
    known_names = {*getattr(registry, "SYMBOL_TO_MODULE_MAP", ()), *getattr(registry, "STANDALONE_SYMBOLS", ())}
    if name not in known_names:
        return dataclasses.replace(report, problem="this jax-aiter has no such target; its paged targets came later")
    available = getattr(registry, "standalone_symbol_available", None)
    if available is not None and not available(name):
        return dataclasses.replace(report, problem=f"{TARGETS[name].library} is not built")
    try:
        registry.register_ffi_target(name, "ROCM")
    except Exception as error:
        return dataclasses.replace(report, problem=f"it does not load: {type(error).__name__}: {error}")
    provide(name, platform="rocm", provider="jax-aiter")
    return dataclasses.replace(report, registered=True, provider="jax-aiter")


def _library(name: str, root: Path | None) -> Path | None:
    """The target's library: below the source tree's build folders, or inside the installed package."""
    folders = [] if root is None else [root / "build" / sub for sub in ("jax_aiter_build", "aiter_build")]
    spec = importlib.util.find_spec("jax_aiter")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        folders += [package, *sorted(p for p in package.rglob("*") if p.is_dir() and p.name.endswith("build"))]
    return next((f / TARGETS[name].library for f in folders if (f / TARGETS[name].library).is_file()), None)
