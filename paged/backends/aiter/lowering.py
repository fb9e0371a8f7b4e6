"""Custom calls of a lowered StableHLO module, read with MLIR's bindings into plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

Array = tuple[tuple[int, ...], str, tuple[int, ...]]
"""Shape, MLIR element type, layout (minor to major)."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One custom call as it is written in a module.

    - `attributes`: name -> MLIR type (`"f32"`, `"i64"`, `"i1"`, `"string"`, …); `values`: name -> value as text.
    - `aliases`: (operand, result) indices that share a buffer.
    - `typed`: it carries attributes for XLA's typed FFI; other custom calls pass bytes.
    - `place`: names of the operations it lies in, outermost first.
    """

    target: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    attributes: Mapping[str, str]
    values: Mapping[str, str]
    aliases: tuple[tuple[int, int], ...]
    typed: bool
    place: tuple[str, ...]


def read_calls(module: Any) -> tuple[Call, ...]:
    """Every `stablehlo.custom_call` of a module, in the order of the text."""
    return tuple(_call(operation, place) for operation, place in walk(module) if _is_call(operation))


def walk(module: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every operation of a module with the names of those it lies in, depth first."""

    def inside(operation: Any, place: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    inner = inner.operation
                    yield inner, place
                    yield from inside(inner, (*place, inner.name))

    yield from inside(module.operation, ())


def _is_call(operation: Any) -> bool:
    return operation.name == "stablehlo.custom_call"


def _call(operation: Any, place: tuple[str, ...]) -> Call:
    attributes = {a.name: a.attr for a in _named(operation.attributes)}
    config = attributes.get("mhlo.backend_config")
    typed = {} if config is None else {a.name: a.attr for a in config}
    return Call(
        target=attributes["call_target_name"].value,
        operands=_arrays(operation.operands, attributes.get("operand_layouts")),
        results=_arrays(operation.results, attributes.get("result_layouts")),
        attributes={name: _type(value) for name, value in typed.items()},
        values={name: str(value) for name, value in typed.items()},
        aliases=tuple(_alias(a) for a in attributes.get("output_operand_aliases", ())),
        typed=config is not None,
        place=place,
    )


def _named(attributes: Any) -> Any:
    """Name and value of each attribute; iterating gives pairs in some releases of jaxlib, and names in others."""
    found = list(attributes)
    if found and isinstance(found[0], str):
        return [_Named(name, attributes[name]) for name in found]
    return found


@dataclasses.dataclass(frozen=True)
class _Named:
    name: str
    attr: Any


def _type(attribute: Any) -> str:
    """MLIR type of an attribute's value; strings, arrays and the like have none and are named by their kind."""
    kind = type(attribute).__name__.removesuffix("Attr").lower()
    if kind in ("string", "dict", "array") or kind.startswith("dense"):
        return kind if kind == "string" or not kind.startswith("dense") else f"{kind} {attribute.type}"
    return str(attribute.type)


def _arrays(values: Any, layouts: Any) -> tuple[Array, ...]:
    out = []
    for at, value in enumerate(values):
        kind = value.type
        shape = tuple(int(size) for size in kind.shape)
        layout = tuple(range(len(shape) - 1, -1, -1))
        if layouts is not None:
            layout = tuple(int(i) for i in layouts[at])
        out.append((shape, str(kind.element_type), layout))
    return tuple(out)


def _alias(attribute: Any) -> tuple[int, int]:
    from jaxlib.mlir.dialects import stablehlo

    alias = stablehlo.OutputOperandAlias(attribute)
    result = list(alias.output_tuple_indices)
    return int(alias.operand_index), int(result[0]) if result else 0
