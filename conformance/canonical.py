"""Canonical JSON and SHA-256 digests: one spelling for every object that is hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def dumps(value: Any) -> str:
    """JSON with sorted keys, no spaces, ASCII only, and no NaN: equal values have equal text on every platform."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """`sha256:…` of bytes as they are, or of the canonical JSON of anything else."""
    data = bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else dumps(value).encode()
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_files(files: Iterable[tuple[str, Path]]) -> str:
    """Digest of named files: names and contents, in the order of the names, independent of where they lie."""
    entries = sorted((name, hashlib.sha256(path.read_bytes()).hexdigest()) for name, path in files)
    return digest([list(entry) for entry in entries])
