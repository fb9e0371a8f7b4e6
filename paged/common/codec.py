"""One versioned byte format for the types of this package (docs/design/0002-byte-format.md).

Layout, little-endian: 4 bytes `PGD1`, uint32 length of the header, the header as canonical JSON, the arrays' int32
words one after the other, uint32 CRC-32 of all that. No pickle (requirement X3). Every declared size is checked against
what is there before anything is allocated, and an object is accepted only if it encodes to the very bytes it was read
from, so that there is one encoding of each value.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paged.common.checks import show
from paged.common.errors import InvalidInputError

MAGIC = b"PGD1"
MAX_HEADER_BYTES = 1 << 20
_FRAME = len(MAGIC) + 8
"""Bytes around header and words: magic, header length, checksum."""


def encode(kind: str, version: int, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Bytes of one object: JSON-able `fields` and one-dimensional int32 `arrays`, in the order given."""
    header = {
        "kind": kind,
        "version": version,
        "fields": dict(fields),
        "arrays": [[name, int(array.shape[0])] for name, array in arrays.items()],
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidInputError(f"{kind}.to_bytes: the fields take {len(text)} bytes, more than {MAX_HEADER_BYTES}.")
    words = b"".join(np.ascontiguousarray(array, dtype="<i4").tobytes() for array in arrays.values())
    body = MAGIC + struct.pack("<I", len(text)) + text + words
    return body + struct.pack("<I", zlib.crc32(body))


def load(
    cls: type,
    version: int,
    data: object,
    array_names: tuple[str, ...] = (),
    revive: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """The object of dataclass `cls` that `to_bytes` wrote, or `InvalidInputError` on any byte that it did not write.

    `revive` turns JSON fields into constructor arguments where they differ.
    """
    kind = cls.__name__
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"{kind}.from_bytes needs bytes, got {type(data).__name__}.")
    data = bytes(data)
    values = _decode(kind, version, data, array_names)
    names = [field.name for field in dataclasses.fields(cls)]
    if unknown := sorted(values.keys() - set(names)):
        raise InvalidInputError(f"{kind}.from_bytes: unknown field {show(unknown[0])}; the fields are {names}.")
    if missing := [name for name in names if name not in values]:
        raise InvalidInputError(f"{kind}.from_bytes: field {missing[0]!r} is missing.")
    made = cls(**(revive(values) if revive else values))
    if made.to_bytes() != data:
        raise InvalidInputError(f"{kind}.from_bytes: these bytes are not as {kind}.to_bytes writes the same value.")
    return made


def _decode(kind: str, version: int, data: bytes, array_names: tuple[str, ...]) -> dict[str, Any]:
    found_kind, found_version, fields, lengths, at = _header(kind, data)
    if found_kind != kind:
        raise InvalidInputError(f"{kind}.from_bytes: these bytes hold a {show(found_kind)}.")
    if found_version != version:
        raise InvalidInputError(
            f"{kind}.from_bytes: version {show(found_version)}; this release reads version {version}."
        )
    if tuple(name for name, _ in lengths) != array_names:
        raise InvalidInputError(
            f"{kind}.from_bytes: arrays {show([name for name, _ in lengths])}, expected {list(array_names)}."
        )
    body = len(data) - 4 - at
    if 4 * sum(length for _, length in lengths) != body:
        raise InvalidInputError(
            f"{kind}.from_bytes: arrays of {show([length for _, length in lengths])} words declared, {body} bytes "
            f"follow the header."
        )
    for name, length in lengths:
        if name in fields:
            raise InvalidInputError(f"{kind}.from_bytes: {name!r} is both a field and an array.")
        fields[name] = np.frombuffer(data, dtype="<i4", count=length, offset=at)
        at += 4 * length
    return fields


def _header(kind: str, data: bytes) -> tuple[Any, Any, dict[str, Any], list[tuple[str, int]], int]:
    """Kind, version, fields, arrays with their lengths, and where the arrays begin."""
    if data[:4] != MAGIC or len(data) < _FRAME:
        raise InvalidInputError(f"{kind}.from_bytes: not a paged object: {len(data)} bytes that start {data[:4]!r}.")
    (size,) = struct.unpack_from("<I", data, 4)
    if size > min(MAX_HEADER_BYTES, len(data) - _FRAME):
        raise InvalidInputError(
            f"{kind}.from_bytes: header of {size} bytes declared, {len(data) - _FRAME} bytes follow."
        )
    if struct.unpack_from("<I", data, len(data) - 4)[0] != zlib.crc32(data[:-4]):
        raise InvalidInputError(f"{kind}.from_bytes: the checksum does not match; the bytes are damaged or cut short.")
    try:
        header = json.loads(data[8 : 8 + size].decode(), object_pairs_hook=_once)
        fields, lengths = header["fields"], [(name, length) for name, length in header["arrays"]]
        if not isinstance(fields, dict):
            raise TypeError("fields is not an object")
        if not all(type(length) is int and length >= 0 for _, length in lengths):
            raise TypeError("an array length is not a count")
        return header["kind"], header["version"], fields, lengths, 8 + size
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInputError(
            f"{kind}.from_bytes: damaged header ({type(error).__name__}: {str(error)[:80]})."
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"{show(name)} is named twice")
        out[name] = value
    return out
