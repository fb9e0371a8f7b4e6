"""`paged bench`: run one of the repository's benchmarks. They are no part of the installed package."""

from __future__ import annotations

import argparse
import importlib.util


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A benchmark's name; the options after it are its own."""
    parser.add_argument("name", nargs="?", help="which one; without a name they are listed")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="its options; NAME --help tells them")


def run(args: argparse.Namespace) -> int:
    """Exit status: that of the benchmark, or 2 if there is none of that name."""
    from paged.common.errors import InvalidInputError

    if importlib.util.find_spec("benchmarks") is None:
        raise InvalidInputError(
            "the benchmarks are not here: they are in the folder benchmarks/ of the repository and not part of the "
            "installed package. Run `paged bench` in a checkout's top folder as `python -m paged.cli bench`."
        )
    from benchmarks import harness

    if args.name is None:
        width = max(map(len, harness.NAMES))
        print("\n".join(f"{name:{width}}  {what}" for name, what in harness.NAMES.items()))
        return 0
    if args.name not in harness.NAMES:
        raise InvalidInputError(f"no benchmark is named {args.name!r}; there are {', '.join(harness.NAMES)}.")
    return harness.main(args.name, args.rest, prog=f"paged bench {args.name}")
