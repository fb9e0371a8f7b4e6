"""`paged certify BACKEND`: runs the conformance suite and writes a certificate."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `paged certify`."""
    parser.add_argument("backend", help="name of an entry point in the group paged.backends")
    parser.add_argument("--level", choices=("move", "core", "sharded", "all"), default="all", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0 conformant, 1 failed, 2 error, 3 not certifiable."""
    from conformance.command import certify

    return certify(args)
