"""The command `paged`. Each subcommand is a module that is imported only when it is asked for, so help costs nothing.

A subcommand's module has `add_arguments(parser)` and `run(args) -> int` (the exit status), and imports nothing but the
standard library at module level: jax, models and the conformance suite are loaded inside `run`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

COMMANDS = {
    "bench": "Run one of the repository's benchmarks.",
    "build": "Compile a vendor's kernels into a directory of libraries with a manifest.",
    "certify": "Certify a backend bit for bit against the conformance suite.",
    "generate": "Continue prompts with a model on pages.",
    "simulate": "Run a trace of requests through the scheduler on a clock instead of a device.",
}
"""Subcommand -> one line of help. The module is `paged.cli.<name>`."""

EXIT_ERROR = 2


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """The parser; only the arguments of `wanted` are added, and only its module is imported."""
    import paged

    parser = argparse.ArgumentParser(prog="paged", description="Paged KV cache for Equinox models.")
    parser.add_argument("--version", action="version", version=f"paged {paged.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == wanted:
            module = importlib.import_module(f"paged.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Errors that `paged` raises on purpose are one line on stderr, and so is what a command had done when Ctrl-C (status
    130) or SIGTERM (143) ended it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = next((a for a in arguments if not a.startswith("-")), None)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that its encoding lacks must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    args = build_parser(wanted).parse_args(arguments)
    from paged.cli import stopping
    from paged.common.errors import PagedError

    try:
        with stopping.terminable():
            return int(args.run(args))
    except PagedError as error:
        notes = stopping.notes(error)
        words = "; ".join([str(error).removesuffix("."), *notes]) if notes else str(error)
        print(f"paged {args.command}: {words}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as stopped:
        return stopping.say(args.command, stopped)
