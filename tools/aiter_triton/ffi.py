"""Python functions as XLA FFI handlers, through XLA's C interface (`xla/ffi/api/c_api.h`, which jaxlib ships).

A handler sees every attribute with the type it was sent with, so widths can be checked, and no package is needed beside
jax. (jax-tvm-ffi 0.1.3 was tried first: a text attribute of 32 bytes or more corrupts the heap, and the name of a
compiled decode kernel has 42.)
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

VERSION = (0, 3)
"""Of the interface below. XLA asks for it when a handler is registered, and refuses what it does not speak."""
TYPES = {1: "i1", 4: "i32", 5: "i64", 6: "ui8", 10: "f16", 11: "f32", 12: "f64", 16: "bf16"}
"""`XLA_FFI_DataType` -> the name that contracts use; others are named by number."""
FAILED_PRECONDITION = 9
_SCALARS = {
    "i1": ctypes.c_bool, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float, "f64": ctypes.c_double,
}  # fmt: skip
_STRING, _SCALAR = 4, 3


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand or a result: element type, shape and where it lies, during the call."""

    dtype: str
    shape: tuple[int, ...]
    address: int


@dataclasses.dataclass(frozen=True)
class Attribute:
    """`type` as contracts name it (`"f32"`, `"string"`, …), and the value."""

    type: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a target."""

    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    attributes: Mapping[str, Attribute]


def _struct(name: str, *fields: tuple[str, Any], base: bool = True) -> Any:
    start = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)] if base else []
    return type(name, (ctypes.Structure,), {"_fields_": [*start, *fields]})


_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_INTS = ctypes.POINTER(ctypes.c_int)
_Span = _struct("Span", ("data", ctypes.c_void_p), ("size", ctypes.c_size_t), base=False)
_Scalar = _struct("Scalar", ("dtype", ctypes.c_int), ("value", ctypes.c_void_p), base=False)
_Version = _struct("Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))
_Buffer = _struct(
    "Buffer", ("dtype", ctypes.c_int), ("data", ctypes.c_void_p), ("rank", ctypes.c_int64),
    ("dims", ctypes.POINTER(ctypes.c_int64)),
)  # fmt: skip
_Arrays = _struct("Arrays", ("size", ctypes.c_int64), ("types", _INTS), ("items", _POINTERS))
_Attributes = _struct(
    "Attributes", ("size", ctypes.c_int64), ("types", _INTS), ("names", ctypes.POINTER(ctypes.POINTER(_Span))),
    ("items", _POINTERS),
)  # fmt: skip
_ErrorArguments = _struct("ErrorArguments", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
_MakeError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))
_Api = _struct("Api", ("version", _Version), ("internal", ctypes.c_void_p), ("error_create", _MakeError))
_Metadata = _struct(
    "Metadata", ("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32),
    ("state_type", ctypes.c_int64), base=False,
)  # fmt: skip
_Extension = _struct(
    "Extension", ("struct_size", ctypes.c_size_t), ("kind", ctypes.c_int), ("next", ctypes.c_void_p),
    ("metadata", ctypes.POINTER(_Metadata)), base=False,
)  # fmt: skip
_Frame = _struct(
    "Frame", ("api", ctypes.POINTER(_Api)), ("context", ctypes.c_void_p), ("stage", ctypes.c_int),
    ("operands", _Arrays), ("results", _Arrays), ("attributes", _Attributes),
)  # fmt: skip
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
_METADATA = 1
_kept: list[Any] = []


def capsule(handle: Callable[[Call], None]) -> Any:
    """What `jax.ffi.register_ffi_target` takes, for a function of a `Call`. Whatever it raises becomes XLA's error."""
    import jax

    @_Handler
    def handler(frame: Any) -> int | None:
        try:
            if frame.contents.extension_start and _describe(frame.contents.extension_start):
                return None
            handle(_read(frame.contents))
        except BaseException as error:  # nothing can be raised into XLA
            text = f"{type(error).__name__}: {error}".encode()
            arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, FAILED_PRECONDITION)
            return frame.contents.api.contents.error_create(ctypes.byref(arguments))
        return None

    _kept.append(handler)  # XLA calls it as long as the process lives
    return jax.ffi.pycapsule(handler)


def _describe(extension: int) -> bool:
    """Answer XLA's question for the handler's version; whether it was one."""
    found = ctypes.cast(extension, ctypes.POINTER(_Extension)).contents
    if found.kind != _METADATA:
        return False
    metadata = found.metadata.contents
    metadata.version.major, metadata.version.minor = VERSION
    metadata.traits, metadata.state_type = 0, 0
    return True


def _read(frame: Any) -> Call:
    operands, results = (
        tuple(_buffer(arrays.items[at]) for at in range(arrays.size)) for arrays in (frame.operands, frame.results)
    )
    given = frame.attributes
    attributes = {
        _text(given.names[at].contents): _attribute(given.types[at], given.items[at]) for at in range(given.size)
    }
    return Call(operands, results, attributes)


def _buffer(address: Any) -> Buffer:
    found = ctypes.cast(address, ctypes.POINTER(_Buffer)).contents
    shape = tuple(int(found.dims[axis]) for axis in range(found.rank))
    return Buffer(TYPES.get(found.dtype, f"type {found.dtype}"), shape, found.data or 0)


def _attribute(kind: int, address: Any) -> Attribute:
    if kind == _STRING:
        return Attribute("string", _text(ctypes.cast(address, ctypes.POINTER(_Span)).contents))
    if kind != _SCALAR:
        return Attribute(f"attribute of kind {kind}", None)
    found = ctypes.cast(address, ctypes.POINTER(_Scalar)).contents
    name = TYPES.get(found.dtype, f"type {found.dtype}")
    value = ctypes.cast(found.value, ctypes.POINTER(_SCALARS[name])).contents.value if name in _SCALARS else None
    return Attribute(name, value)


def _text(span: Any) -> str:
    return ctypes.string_at(span.data, span.size).decode() if span.size else ""
