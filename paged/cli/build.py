"""`paged build flashinfer` compiles the kernels of the installed `flashinfer-python` and needs nvcc and no GPU; `paged
build cpu` compiles the project's own kernels for this machine's CPU, which otherwise happens when they are first used.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from paged.cli.arguments import count
from paged.cli.certify import LEVELS

if TYPE_CHECKING:
    from paged.backends.flashinfer.module_spec import ModuleSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's arguments: a provider, and then its own."""
    providers = parser.add_subparsers(dest="provider", metavar="PROVIDER", required=True)
    for name, add, summary in (
        ("cpu", _add_cpu, "The project's own kernels, for this machine's CPU."),
        ("flashinfer", _add_flashinfer, "FlashInfer's kernels, for NVIDIA GPUs."),
    ):
        add(providers.add_parser(name, help=summary, description=summary))


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", metavar="DIR", help="where to put the libraries (default: where they are looked for)"
    )


def _add_cpu(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)


def _add_flashinfer(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)
    parser.add_argument("--arch", default="9.0a", help="compute capability, e.g. 9.0a, 8.0 (default: 9.0a)")
    parser.add_argument("--dtypes", default="bfloat16", metavar="NAMES", help="of queries, separated by commas")
    parser.add_argument("--kv-dtypes", default="same", metavar="NAMES", help="of pools; `same` is the query's dtype")
    parser.add_argument("--head-dims", default="128", metavar="INTS", help="separated by commas: 64,128,256")
    parser.add_argument("--options", default="none", metavar="NAMES", help="none,window,cap,window+cap")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--module", action="append", default=[], metavar="NAME", help="build this module; repeatable")
    instead.add_argument(
        "--for-certify",
        choices=LEVELS,
        metavar="LEVEL",
        help=f"instead what `paged certify flashinfer --level LEVEL` asks for, in both tiers: {', '.join(LEVELS)}",
    )
    parser.add_argument("--jobs", type=count, metavar="N", help="compilers at a time (default: one per core)")
    parser.add_argument("--list", action="store_true", help="print the names of the modules and build nothing")


def run(args: argparse.Namespace) -> int:
    """Build what is asked for, and print the directory that it is in."""
    return _run_cpu(args) if args.provider == "cpu" else _run_flashinfer(args)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run_cpu(args: argparse.Namespace) -> int:
    import pathlib

    from paged.backends.cpu.library import build, default_directory

    directory = pathlib.Path(args.output).absolute() if args.output else default_directory()
    build(directory, progress=_progress)
    print(directory)
    return 0


def _run_flashinfer(args: argparse.Namespace) -> int:
    """Build, or list, the modules asked for."""
    import pathlib

    from paged.backends.flashinfer.build import build
    from paged.backends.flashinfer.module_spec import matrix
    from paged.backends.flashinfer.modules import default_directory
    from paged.common.errors import InvalidInputError

    try:
        head_dims = [int(x) for x in args.head_dims.split(",")]
    except ValueError:
        raise InvalidInputError(f"--head-dims must be ints separated by commas, got {args.head_dims!r}.") from None
    specs = matrix(
        dtypes=args.dtypes.split(","),
        kv_dtypes=args.kv_dtypes.split(","),
        head_dims=head_dims,
        options=args.options.split(","),
        hopper=args.arch == "9.0a",
    )
    if args.module:
        known = {spec.name: spec for spec in matrix()}
        if unknown := [name for name in args.module if name not in known]:
            raise InvalidInputError(f"--module {unknown[0]!r} is not a module; see paged build flashinfer --list.")
        specs = [known[name] for name in args.module]
    elif args.for_certify:
        specs = _for_certify(args.for_certify, hopper=args.arch == "9.0a")
    if args.list:
        print("\n".join(spec.name for spec in specs))
        return 0
    directory = pathlib.Path(args.output) if args.output else default_directory()
    build(specs, directory, arch=args.arch, jobs=args.jobs, progress=_progress)
    print(directory)
    return 0


def _for_certify(level: str, *, hopper: bool) -> list[ModuleSpec]:
    """The modules that cases of a level ask for, found by tracing them."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing is run, and the device belongs to others
    from conformance.catalogue import load
    from conformance.programs import trace
    from paged.backends.flashinfer.backend import TIERS, FlashInferBackend
    from paged.backends.flashinfer.modules import asked

    cases = load().select(level)
    prefill, decode = ("fa3", "paged") if hopper else ("fa2", "flashinfer")
    with asked() as found:
        for tier in TIERS:
            trace(FlashInferBackend(tier=tier, prefill=prefill, decode=decode, sm_count=1), cases)
    return sorted(found)
