"""What a compiled handler decodes, found out by letting XLA try, without running it.

A handler for ROCm asks for a stream, which a CPU call cannot give, so on CPU XLA decodes everything else, says what
does not fit, and never gets to the handler's body. Registered for CPU under a name of its own, the vendor's library
tells its ABI on the machine where it is installed: the number of its arrays and attributes and the width of each
attribute, in XLA's own words.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.backends.aiter.contract import Operand, Target, contract_id

_XLA_TYPES = {"F32": "f32", "F64": "f64", "S32": "i32", "S64": "i64", "PRED": "i1", "string": "string"}
_VALUES = {"f32": np.float32(1), "i64": np.int64(1), "i1": True, "string": "x"}
_CONTEXT = re.compile(r"Failed to get [^:]*: XLA FFI \w+ context is not available")
_registered: set[str] = set()


def observe(target: Target, symbol: Any) -> tuple[str, list[str]]:
    """The contract id that the handler at `symbol` (a ctypes function) decodes by, and every difference as a sentence.

    The id is the contract's where nothing differs, `name:unknown` where the difference does not say enough.
    """
    text = _decode(target, symbol)
    differences, attributes = [], dict(target.attributes)
    counts = {"arguments": len(target.operands), "results": len(target.results)}
    for what in ("arguments", "results", "attributes"):
        if found := re.search(rf"Wrong number of {what}: expected (\d+) but got (\d+)", text):
            differences.append(f"it takes {found.group(1)} {what}, the contract has {found.group(2)}")
            if what == "attributes":
                return f"{target.name}:unknown", differences
            counts[what] = int(found.group(1))
    if not differences:
        differences += _attributes(target, text, attributes)
    if any("cannot be told" in d for d in differences):
        return f"{target.name}:unknown", differences
    return contract_id(target.name, counts["arguments"], counts["results"], attributes), differences


def _attributes(target: Target, text: str, attributes: dict[str, str]) -> list[str]:
    """Differences in attributes, from the operands that could not be decoded; `attributes` gets what was found.

    XLA counts contexts, arrays, then attributes in the order in which the handler binds them, and gives one diagnosis
    for each in turn. Contexts fail on CPU and are passed over.
    """
    found = re.search(r"bad operands at: ([0-9, ]*)\)\s*(?:Diagnostics:)?(.*)", text, re.DOTALL)
    if found is None:
        return [] if "Failed to decode" not in text else [f"it decodes otherwise, how cannot be told: {text[:300]}"]
    bad = [int(at) for at in found.group(1).split(",")]
    contexts = len(_CONTEXT.findall(found.group(2)))
    said = re.findall(r"expected (\w+) but got", found.group(2))
    # Contexts come first and are the first to fail; a handler made for CPU has none.
    first = len(target.operands) + len(target.results) + (len(target.contexts) if contexts else 0)
    names = [name for name, _ in target.attributes]
    out = []
    for at, wanted in itertools.zip_longest(bad[contexts:], said):
        name = names[at - first] if at is not None and 0 <= at - first < len(names) else None
        if name is None or wanted not in _XLA_TYPES:
            out.append(f"operand {at}, how cannot be told: {text[:300]}")
            continue
        attributes[name] = _XLA_TYPES[wanted]
        out.append(
            f"it reads attribute {name} as {_XLA_TYPES[wanted]}, the contract has {dict(target.attributes)[name]}"
        )
    return out


_NUMPY = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32, "ui8": jnp.uint8}


def _shape(operand: Operand) -> tuple[int, ...]:
    """The smallest shape of an operand. Without elements XLA would drop the call."""
    return tuple(size if isinstance(size, int) else 1 + int(size.partition("+")[2] or 0) for size in operand.shape)


def _decode(target: Target, symbol: Any) -> str:
    """What XLA says of a call by the contract; empty if the handler was reached."""
    # One name for each function: XLA keeps the first handler of a name.
    name = f"paged.decoded.{target.name}.{ctypes.cast(symbol, ctypes.c_void_p).value or 0:x}"
    if name not in _registered:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(symbol), platform="cpu")
        _registered.add(name)
    cpu = jax.devices("cpu")[0]
    operands = [jax.device_put(jnp.zeros(_shape(o), _NUMPY[o.types[0]]), cpu) for o in target.operands]
    results = tuple(jax.ShapeDtypeStruct(_shape(r), _NUMPY[r.types[0]]) for r in target.results)
    values = {name: _VALUES[kind] for name, kind in target.attributes}
    call = jax.ffi.ffi_call(name, results)
    try:
        with jax.default_device(cpu):
            jax.block_until_ready(jax.jit(lambda *arrays: call(*arrays, **values))(*operands))
    except Exception as error:  # XLA's own, of one type for everything
        return str(error)
    return ""
