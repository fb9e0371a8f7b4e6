"""The CPU kernels with one fault each, see `cpu_faults.py`: compiled, registered beside one another, run.

`python tests/backends/broken_cpu.py` runs every case of the catalogue on every fault (or on those named), prints what
caught it, and ends with 1 if one that the catalogue should see is caught by none, or another edit by one. It takes half
an hour of one core.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from cpu_faults import EVERY, FAULTS, Fault

from paged.backends import native
from paged.backends.cpu import CpuBackend, library, ops
from paged.common.errors import BackendUnavailableError

TARGETS = ("paged_cpu_append", "paged_cpu_attend")
FLAGS = (*(flag for flag in library.FLAGS if not flag.startswith(("-O", "-W"))), "-O0", "-fno-gnu-unique")
"""Of the libraries with faults; the last keeps what one of them has built from being taken for another's."""


@dataclasses.dataclass(frozen=True)
class Broken(CpuBackend):
    """The backend over a library with a fault; programs of other faults are not taken for its own."""

    fault: str = ""


def sources(fault: Fault | None, folder: Path) -> Path:
    """A copy of the sources with the edits. Raises `ValueError` if a text to be edited is not there exactly once."""
    for path in native.source_files(library.SOURCES):
        text = path.read_text("utf-8")
        for file, old, new in () if fault is None else fault.edits:
            if file == path.name:
                if text.count(old) != 1:
                    raise ValueError(f"{file} has {text.count(old)} times, not once: {old}")
                text = text.replace(old, new)
        (folder / path.name).write_text(without_layers(text) if path.name == library.UNIT else text, "utf-8")
    return folder


def without_layers(text: str) -> str:
    """The unit without the handlers of whole layers and logits, which take a third of the time to compile."""
    text = re.sub(r"^Error Layers\(.*?^(?=}  // namespace)", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(
        r"^XLA_FFI_DEFINE_HANDLER_SYMBOL\(paged_cpu_(layers|logits).*?\);\n", "", text, flags=re.DOTALL | re.MULTILINE
    )


def build(name: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """The library with the fault `name`, or without one for `""`; kept between runs. Its targets are `TARGETS`."""
    from conformance.supervisor import cache_directory

    with tempfile.TemporaryDirectory() as folder:
        copy = sources(EVERY.get(name), Path(folder))
        recipe = native.Recipe(
            title="the CPU kernels with a fault",
            sources=copy,
            units=(copy / library.UNIT,),
            flags=flags,
            base=cache_directory() / "cpu-faults",
            native=True,
        )
        return native.build(recipe, native.find_compiler())


@contextlib.contextmanager
def broken(name: str, *, alone: bool = False) -> Iterator[Broken]:
    """The backend with a fault, or without one for `""`; registered with XLA beside others of this process.

    `alone`: under the targets' own names, once in a process, so that programs that XLA has kept are of use.
    """
    suffix = re.sub(r"\W+", "_", name) or "sound"
    targets = {target: target if alone else f"{target}.{suffix}" for target in TARGETS}
    if suffix not in _registered:
        _, capsules = native.load(build(name), TARGETS)
        for target, capsule in capsules.items():
            jax.ffi.register_ffi_target(targets[target], capsule, platform="cpu")
        _registered.add(suffix)
    before, ops.ffi_target = ops.ffi_target, targets.__getitem__
    try:
        yield Broken(fault=suffix)
    finally:
        ops.ffi_target = before


_registered: set[str] = set()


def every_case(name: str) -> tuple[str, list[tuple[str, str, str | None]]]:
    """(case, status, clause or diagnosis of an error) of what did not pass. In a process of its own."""
    from conformance.catalogue import by_program, load
    from conformance.runner import Session
    from conformance.worker import prepare_jax

    prepare_jax()
    try:
        with broken(name, alone=True) as backend:
            session = Session(backend)
            results = [session.run(case) for case in by_program(load().select("all"))]
    except (BackendUnavailableError, ValueError) as error:
        return name, [("", "error", str(error))]
    return name, [(r.id, r.status, r.clause or r.diagnosis[:200]) for r in results if r.status != "pass"]


def main() -> int:
    """1 if a fault of `FAULTS` is caught by no case, or another edit by one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help="names; all without")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.faults or ["", *EVERY]
    alive = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context, max_tasks_per_child=1) as pool:
        for name, found in pool.map(every_case, names):
            clauses = collections.Counter(clause if status == "fail" else status for _, status, clause in found)
            told = ", ".join(f"{clause} {count}" for clause, count in clauses.most_common())
            errors = [(case, why) for case, status, why in found if status == "error"]
            told += f"; first error: {errors[0]}" if errors else ""
            caught = any(status == "fail" for _, status, _ in found)
            if caught != (name in FAULTS):
                alive.append(name)
            own = EVERY[name].clause or "harmless" if name else "sound"
            print(f"{name or 'no fault'} | {own} | {len(found)} | {told} | {found[0][0] if found else ''}", flush=True)
    print(f"not as it should be: {', '.join(alive) or 'none'}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
