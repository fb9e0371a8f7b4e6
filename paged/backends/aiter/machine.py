"""The AMD devices and the ROCm release of this machine, read from files: no device is touched, no runtime loaded."""

from __future__ import annotations

import re
from pathlib import Path

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
VERSION_FILES = (Path("/opt/rocm/.info/version"), Path("/opt/rocm/.info/version-dev"))


def architectures(topology: Path = TOPOLOGY) -> tuple[str, ...]:
    """Architectures of the GPUs that the kernel driver lists, each once, e.g. `("gfx942",)`; empty without any."""
    found = {gfx_name(int(p["gfx_target_version"])) for p in nodes(topology) if int(p.get("gfx_target_version", 0))}
    return tuple(sorted(found))


def nodes(topology: Path = TOPOLOGY) -> list[dict[str, str]]:
    """Properties of every node of the driver's topology, in the order of their numbers; processors are nodes too."""
    out = []
    for path in sorted(topology.glob("*/properties"), key=lambda p: (len(p.parent.name), p.parent.name)):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        out.append(dict(line.split(None, 1) for line in lines if len(line.split(None, 1)) == 2))
    return out


def gfx_name(version: int) -> str:
    """The architecture of a `gfx_target_version`: 90402 is gfx942, 90010 is gfx90a."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor}{step:x}"


def rocm_version(files: tuple[Path, ...] = VERSION_FILES) -> str | None:
    """The ROCm release, e.g. `"7.2.3"`; None where it does not say."""
    for path in files:
        try:
            found = re.match(r"[0-9]+(\.[0-9]+)*", path.read_text().strip())
        except OSError:
            continue
        if found:
            return found.group(0)
    return None
