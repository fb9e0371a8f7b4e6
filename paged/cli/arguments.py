"""Types of command line arguments that subcommands share. Standard library only."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any


def count(text: str) -> int:
    """A whole number from 1 up."""
    value = nonnegative(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def nonnegative(text: str) -> int:
    """A whole number from 0 up."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def option(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, of a backend's factory; a value is JSON where it reads as JSON, and text otherwise."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
