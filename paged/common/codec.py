"""One versioned byte format for the types of this package.

Layout: 4 bytes `PGD1`, little-endian uint32 length of the header, the header as canonical JSON, then the arrays'
little-endian int32 words one after the other. No pickle (requirement X3); every declared size is checked against what
is there before anything is allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged.common.errors import InvalidInputError

MAGIC = b"PGD1"
MAX_HEADER_BYTES = 1 << 20


def encode(kind: str, version: int, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Bytes of one object: JSON-able `fields` and one-dimensional int32 `arrays`, in the order given."""
    header = {
        "kind": kind,
        "version": version,
        "fields": dict(fields),
        "arrays": [[name, int(array.shape[0])] for name, array in arrays.items()],
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    words = b"".join(np.ascontiguousarray(array, dtype="<i4").tobytes() for array in arrays.values())
    return MAGIC + struct.pack("<I", len(text)) + text + words


def decode(kind: str, version: int, data: bytes, array_names: tuple[str, ...]) -> dict[str, Any]:
    """Fields and arrays of one object, or `InvalidInputError` on any byte that is not as `encode` writes it."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"{kind}.from_bytes needs bytes, got {type(data).__name__}.")
    data = bytes(data)
    if data[:4] != MAGIC or len(data) < 8:
        raise InvalidInputError(f"{kind}.from_bytes: not a paged object (it starts with {data[:4]!r}, not {MAGIC!r}).")
    (size,) = struct.unpack_from("<I", data, 4)
    if size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise InvalidInputError(f"{kind}.from_bytes: header of {size} bytes declared, {len(data) - 8} bytes follow.")
    try:
        header = json.loads(data[8 : 8 + size].decode())
        found_kind, found_version = header["kind"], header["version"]
        fields, arrays = header["fields"], header["arrays"]
        lengths = [(str(name), int(length)) for name, length in arrays]
        if not isinstance(fields, dict):
            raise TypeError("fields is not an object")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{kind}.from_bytes: damaged header ({error}).") from None
    if found_kind != kind:
        raise InvalidInputError(f"{kind}.from_bytes: these bytes hold a {found_kind!r}.")
    if found_version != version:
        raise InvalidInputError(f"{kind}.from_bytes: version {found_version!r}; this release reads version {version}.")
    if tuple(name for name, _ in lengths) != array_names:
        raise InvalidInputError(f"{kind}.from_bytes: arrays {[n for n, _ in lengths]}, expected {list(array_names)}.")
    body = len(data) - 8 - size
    if any(length < 0 for _, length in lengths) or 4 * sum(length for _, length in lengths) != body:
        raise InvalidInputError(f"{kind}.from_bytes: arrays of {dict(lengths)} words declared, {body} bytes follow.")
    out, at = dict(fields), 8 + size
    for name, length in lengths:
        if name in out:
            raise InvalidInputError(f"{kind}.from_bytes: {name!r} is both a field and an array.")
        out[name] = np.frombuffer(data, dtype="<i4", count=length, offset=at).astype(np.int32)
        at += 4 * length
    return out


def build(cls: type, kind: str, values: dict[str, Any]) -> Any:
    """`cls(**values)`, with unknown or missing fields reported as damage and not as a `TypeError`."""
    try:
        return cls(**values)
    except TypeError as error:
        raise InvalidInputError(f"{kind}.from_bytes: fields do not fit ({error}).") from None
