"""Options of a backend's factory as they are written on a command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paged.common.errors import InvalidInputError


def parse(pairs: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value is JSON where it reads as JSON, and text otherwise."""
    out: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidInputError(f"a backend option is NAME=VALUE, got {pair!r}.")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out
