"""Lets AITER's Triton modules be imported and interpreted where there is no AMD device. Start it before either.

Everything here is about the surroundings of the vendor's kernels: their files are imported as the wheel ships them, and
run as they are.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import Any

COMPUTE_UNITS = 304
"""Of an MI300X as one device. AITER's choice of kernel and of the number of segments depends on it."""
TARGET = ("hip", "gfx942", 64)
"""What the vendor's modules ask the driver for when they pick fp8 formats and tables. Nothing is compiled for it, and
nothing that is reported may name it."""


class MissingPackageError(RuntimeError):
    """The environment lacks a package; the message says how to make one that has it."""


class _Driver:
    """What stands where Triton looks for a device driver."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGET)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu


class _Properties:
    """What `torch.cuda.get_device_properties` answers."""

    name = "interpreter"
    gcnArchName = TARGET[1]
    major, minor = 9, 4
    warp_size = TARGET[2]

    def __init__(self, compute_units: int):
        self.multi_processor_count = compute_units


_started: dict[str, Any] = {}


def start(*, compute_units: int | None = None, bfloat16: bool | None = None) -> None:
    """Prepare this process; again, it is started already, and only what is given is looked at.

    - `compute_units`: what the vendor's heuristics are told; see `set_compute_units`. By default `COMPUTE_UNITS`.
    - `bfloat16`: install the emulator's patches (`patches.PATCHES`), the default. Without them bfloat16 is wrong;
      float32 and float16 need none. It cannot be changed later.

    Raises `MissingPackageError` with the name of what is not installed.
    """
    if _started:
        if bfloat16 not in (None, _started["bfloat16"]):
            raise RuntimeError(f"the emulator was started with {_started}; the other way needs a process of its own.")
        if compute_units is not None:
            set_compute_units(compute_units)
        return
    for name, package in (("torch", "torch"), ("triton", "triton"), ("aiter", "amd-aiter"), ("packaging", "packaging")):
        if importlib.util.find_spec(name) is None:
            raise MissingPackageError(
                f"{package} is not installed in {sys.prefix}. Make an environment for the vendor's kernels with "
                f"`make .venv-aiter/.ready` and use its Python."
            )
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before the emulator was started; it compiles instead of interpreting.")
    os.environ["TRITON_INTERPRET"] = "1"
    _bare_package()
    import torch
    import triton

    driver: Any = _Driver()
    triton.runtime.driver.set_active(driver)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: 0
    set_compute_units(compute_units or COMPUTE_UNITS)
    _started["bfloat16"] = bfloat16 is not False
    if _started["bfloat16"]:
        from . import patches

        patches.install()


def set_compute_units(count: int) -> None:
    """What the vendor's heuristics are told from now on: 304 for an MI300X, 38 for one of its eight partitions."""
    import torch

    _started["compute_units"] = count
    properties = _Properties(count)
    torch.cuda.get_device_properties = lambda *_, **__: properties


def compute_units() -> int:
    """What they are told now."""
    return _started.get("compute_units", COMPUTE_UNITS)


def _bare_package() -> None:
    """`aiter` as a bare package: its own `__init__` compiles HIP extensions when imported."""
    if "aiter" in sys.modules:
        return
    spec = importlib.util.find_spec("aiter")
    assert spec is not None
    package = types.ModuleType("aiter")
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
    sys.modules["aiter"] = package
