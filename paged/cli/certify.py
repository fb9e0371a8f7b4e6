"""`paged certify BACKEND`: runs the conformance suite and writes a certificate."""

from __future__ import annotations

import argparse
from pathlib import Path

LEVELS = ("move", "core", "sharded", "serving", "all", "long")

EPILOG = """\
levels: move (raw bits), core (exact vectors, certified rounding, a backend against itself), sharded (core on meshes),
serving (core, and an engine's steps over one pool), all (those), long (core, and contexts of 32,768 tokens).
exit status of a whole level: 0 conformant, 1 failed, 2 error (no device is one, a compiler that failed is another), 3
not certifiable: nothing is built, or no case of some tier could be run. Of a part (--quick, --only, --catalogue): 0 no
failure among the cases that were run, which says nothing of what was not touched and certifies nothing; 1 one of them
failed; 2 error, or none could be run. --baseline makes 0 a 1 if a pass or a claim was lost.
--check: 1 the file is not sound; else what its verdict says as above, and 3 where it is sound and certifies nothing (a
part of a level). --replay: 1 if a result, a claim or the numerics differ, 3 if only versions, libraries, device or
flags do. --diff: 1 if anything differs but the library. --mutants: 1 if one is not caught.
--case: 0 pass, 1 fail, 2 error, 3 not claimed. Wrong use is 2.
A run that was interrupted is resumed by the same command. Compiled programs are kept in JAX_COMPILATION_CACHE_DIR, by
default in the user's cache directory.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `paged certify`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("backend", nargs="?", help="name of an entry point in the group paged.backends")
    what = parser.add_argument_group("what to run")
    what.add_argument("--level", choices=LEVELS, default="all", help="default: all")
    what.add_argument(
        "--quick",
        action="store_true",
        help="something of everything the backend claims: a sixth of the level, in a minute; certifies nothing",
    )
    what.add_argument("--only", metavar="GLOB", help="cases whose id matches; certifies nothing")
    what.add_argument("--catalogue", metavar="DIR", type=Path, help="other cases than the suite's; certifies nothing")
    what.add_argument("--list", action="store_true", help="print ids, levels, clauses and needs of cases; runs nothing")
    what.add_argument("--json", action="store_true", help="with --list: as JSON")
    what.add_argument("--case", metavar="FILE", type=Path, help="one case from a repro.json")
    what.add_argument("--mutants", action="store_true", help="run the broken versions of the backend instead")
    what.add_argument("--large-pools", action="store_true", help="also a kit's checks of pools of several GiB")
    how = parser.add_argument_group("how to run it")
    how.add_argument("--device", metavar="PLATFORM[:INDEX]", help="jax device, e.g. cuda:1; default: jax's own choice")
    how.add_argument("--deadline", type=float, default=120.0, metavar="SECONDS", help="for each case; default: 120")
    how.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="passed to the backend")
    how.add_argument(
        "--executor",
        metavar="NAME",
        help="who executes a vendor's targets: native, cpu-handlers, triton-interpreter or lowering-only",
    )
    how.add_argument(
        "--executor-option", action="append", default=[], metavar="NAME=VALUE", help="passed to the executor"
    )
    how.add_argument("--waivers", metavar="TOML", type=Path, help="known failures, with reasons and an end")
    how.add_argument("--fresh", action="store_true", help="do not resume an interrupted run")
    out = parser.add_argument_group("what to write")
    out.add_argument("-o", "--output", metavar="JSON", type=Path, help="the certificate")
    out.add_argument("--html", metavar="HTML", type=Path, help="the certificate as a page")
    out.add_argument("--junit", metavar="XML", type=Path, help="results as JUnit XML")
    out.add_argument("--repro", metavar="DIR", type=Path, help="a repro.json for every failure")
    out.add_argument("--baseline", metavar="JSON", type=Path, help="fail if a pass or a claim of this one was lost")
    out.add_argument("--sign", metavar="PEM", type=Path, help="sign the certificate with this Ed25519 private key")
    read = parser.add_argument_group("about certificates that exist")
    read.add_argument("--check", metavar="JSON", type=Path, help="recompute digests, totals and verdict")
    read.add_argument("--public-key", metavar="PEM", type=Path, help="with --check: who must have signed it")
    read.add_argument("--diff", nargs=2, metavar=("OLD", "NEW"), type=Path, help="what changed between two")
    read.add_argument("--replay", nargs=2, metavar=("N", "JSON"), help="run N random cases again and compare")


def run(args: argparse.Namespace) -> int:
    """Exit status, as the epilog of the help tells it."""
    from conformance.command import certify

    return certify(args)
