"""The header of a GGUF file, with every declared size checked before it is believed (requirement X3).

The `gguf` package has a reader of its own. It walks declared counts without comparing them with the file, so a few
bytes can make it loop for ever, and it takes two seconds over a vocabulary of 49,152 tokens. Here the header is read
in one pass; block formats and their dequantisation are the package's.
"""

from __future__ import annotations

import functools
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paged.common.errors import InvalidInputError
from paged.models.checkpoint.weights import StoredTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class _Cursor:
    """Reads forward through the file and refuses to pass its end."""

    def __init__(self, path: Path, data: np.memmap):
        self.path, self.data, self.at = path, data, 0
        self.view = memoryview(data)  # type: ignore[arg-type]

    def need(self, count: int, what: str) -> None:
        left = len(self.view) - self.at
        if count > left:
            raise InvalidInputError(
                f"{self.path}: {what} at byte {self.at} declares {count} bytes; the file has {left} left."
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        value = struct.unpack_from("<" + code, self.view, self.at)[0]
        self.at += size
        return value

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        raw = bytes(self.view[self.at : self.at + length])
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise InvalidInputError(f"{self.path}: {what} is not UTF-8: {raw[:40]!r}.") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise InvalidInputError(f"{self.path}: {what} has the unknown type {kind}.")
        return self.scalar(_SCALARS[kind], what)

    def array(self, what: str) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind in _SCALARS:
            width = struct.calcsize(_SCALARS[kind])
            self.need(count * width, what)
            values = np.frombuffer(self.view, "<" + _SCALARS[kind], count, self.at).tolist()
            self.at += count * width
            return values
        if kind != _STRING:
            raise InvalidInputError(f"{self.path}: {what} is an array of type {kind}; arrays of arrays are not read.")
        self.need(8 * count, what)  # each string has a length of eight bytes
        return [self.string(what) for _ in range(count)]


class GgufFile:
    """Metadata and tensors of a GGUF file, version 2 or 3, little-endian.

    - `metadata`: key -> Python value. `tensors`: name -> `StoredTensor` of dequantised float32 rows, (out, in).

    Raises `InvalidInputError` naming the file, the entry and the byte where the file contradicts itself.
    """

    def __init__(self, path: Path):
        if path.stat().st_size < 24:
            raise InvalidInputError(f"{path} has {path.stat().st_size} bytes; a GGUF header alone has 24.")
        self.path = path
        self._data = np.memmap(path, np.uint8, mode="r")
        cursor = _Cursor(path, self._data)
        if cursor.scalar("I", "magic") != gguf.GGUF_MAGIC:
            raise InvalidInputError(f"{path} is not a GGUF file: its first bytes are {bytes(self._data[:4])!r}.")
        version = cursor.scalar("I", "version")
        if version not in (2, 3):
            raise InvalidInputError(f"{path}: GGUF version {version} is not read, only 2 and 3, little-endian.")
        tensors, keys = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "key count")
        cursor.need(12 * keys + 24 * tensors, f"header of {keys} keys and {tensors} tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = cursor.string("key")
            if key in self.metadata:
                raise InvalidInputError(f"{path}: key {key!r} occurs twice.")
            self.metadata[key] = cursor.value(cursor.scalar("I", f"key {key!r}"), f"key {key!r}")
        self.tensors = self._tensors(cursor, tensors)

    def _tensors(self, cursor: _Cursor, count: int) -> dict[str, StoredTensor]:
        infos = []
        for _ in range(count):
            name = cursor.string("tensor name")
            dims = cursor.scalar("I", f"tensor {name!r}")
            if not 1 <= dims <= _MAX_DIMS:
                raise InvalidInputError(f"{self.path}: tensor {name!r} has {dims} dimensions, must be 1..{_MAX_DIMS}.")
            sizes = [cursor.scalar("Q", f"tensor {name!r}") for _ in range(dims)]
            kind, offset = cursor.scalar("I", f"tensor {name!r}"), cursor.scalar("Q", f"tensor {name!r}")
            infos.append((name, tuple(reversed(sizes)), kind, offset))
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise InvalidInputError(f"{self.path}: general.alignment must be a power of two, got {alignment!r}.")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise InvalidInputError(f"{self.path}: tensor {name!r} occurs twice.")
            tensors[name] = self._tensor(name, shape, kind, start + offset)
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        try:
            quant = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise InvalidInputError(f"{self.path}: tensor {name!r} has the unknown type {kind}.") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
        if shape[-1] % block:
            raise InvalidInputError(
                f"{self.path}: tensor {name!r} of type {quant.name} has rows of {shape[-1]}, not a multiple of {block}."
            )
        row_bytes = shape[-1] // block * block_bytes
        count, size = math.prod(shape[:-1]), self._data.shape[0]
        if start + count * row_bytes > size:
            raise InvalidInputError(
                f"{self.path}: tensor {name!r} {shape} of type {quant.name} ends at byte {start + count * row_bytes}; "
                f"the file has {size}."
            )
        read = functools.partial(self._read, name, quant, start, shape, row_bytes)
        return StoredTensor(shape, quant.name, read)

    def _read(
        self, name: str, quant: gguf.GGMLQuantizationType, start: int, shape: tuple[int, ...], row_bytes: int
    ) -> np.ndarray:
        count = math.prod(shape[:-1])
        rows = self._data[start : start + count * row_bytes].reshape(*shape[:-1], row_bytes)
        try:
            return np.asarray(gguf.quants.dequantize(rows, quant), np.float32).reshape(shape)
        except NotImplementedError:
            raise InvalidInputError(
                f"{self.path}: tensor {name!r} has type {quant.name}, which the gguf package cannot dequantise."
            ) from None
