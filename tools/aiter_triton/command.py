"""The command: the environment's check, the findings, and one finding again."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from . import emulator

REQUIREMENTS = Path(__file__).parent / "requirements.txt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 as claimed, 1 not as claimed, 2 a wrong call or environment."""
    parser = argparse.ArgumentParser(prog="python tools/aiter_triton", description="AITER's Triton kernels on a CPU.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--environment", action="store_true", help="check versions and import the vendor's kernels")
    what.add_argument("--findings", action="store_true", help="list what was found about the vendor's kernels")
    what.add_argument("--finding", metavar="NAME", action="append", help="reproduce one; may be repeated")
    what.add_argument("--matrix", action="store_true", help="attention against float64, without patches, as JSON")
    options = parser.parse_args(arguments)
    try:
        if options.matrix:
            return _matrix()
        return _environment() if options.environment else _findings(options.finding)
    except emulator.MissingPackageError as error:
        parser.exit(2, f"{error}\n")


def _environment() -> int:
    """Every version of requirements.txt is installed, and the vendor's modules can be imported."""
    wrong = [f"{name} {found} is installed, {wanted} is pinned" for name, wanted, found in pinned() if found != wanted]
    for line in wrong:
        print(line)
    if wrong:
        return 2
    from . import kernels, provenance

    for module in ("unified_attention", "fused_kv_cache", "chunked_pa_prefill"):
        kernels.vendor(module)
    print(", ".join(f"{name} {version}" for name, version in provenance.versions().items()))
    return 0


def pinned() -> list[tuple[str, str, str]]:
    """(package, pinned version, installed version) of requirements.txt; a local label (`+cpu`) does not count."""
    out = []
    for line in REQUIREMENTS.read_text().splitlines():
        if found := re.fullmatch(r"([A-Za-z0-9_.-]+)==(\S+)", line.strip()):
            try:
                version = importlib.metadata.version(found.group(1)).partition("+")[0]
            except importlib.metadata.PackageNotFoundError:
                version = "nothing"
            out.append((found.group(1), found.group(2), version))
    return out


def _matrix() -> int:
    emulator.start(bfloat16=False)
    from . import matrix

    print(json.dumps([dataclasses.asdict(outcome) for outcome in matrix.run()]))
    return 0


def _findings(names: Sequence[str] | None) -> int:
    from .findings import load

    emulator.start()
    known = load()
    for name in names or ():
        if name not in known:
            print(f"no finding {name!r}; known: {', '.join(known)}")
            return 2
    lost = 0
    for found in [known[name] for name in names] if names else known.values():
        print(f"{found.name}\n  {found.what}\n  at {found.where}; {found.consequence}")
        if names:
            before = time.process_time()
            evidence = found.show()
            lost += not evidence.reproduced
            print(f"  {'reproduced' if evidence.reproduced else 'NOT reproduced'}: {json.dumps(evidence.measured)}")
            print(f"  {time.process_time() - before:.1f} s of CPU")
    return 1 if lost else 0
