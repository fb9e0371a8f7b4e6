"""Custom calls of a lowered StableHLO module, read with MLIR's bindings into plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
    - `origins`: for each operand the arguments of the module's main function that it is made from. What a call returns
      in an aliased buffer is made from that buffer alone.
    """

    target: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    attributes: Mapping[str, str]
    values: Mapping[str, str]
    aliases: tuple[tuple[int, int], ...]
    typed: bool
    place: tuple[str, ...]
    origins: tuple[frozenset[int], ...] = ()


def read_calls(module: Any) -> tuple[Call, ...]:
    """Every `stablehlo.custom_call` of a module, or of a `jax.stages.Lowered`, in the order of the text."""
    if hasattr(module, "compiler_ir"):
        module = module.compiler_ir("stablehlo")
    origins = Origins(module)
    return tuple(
        dataclasses.replace(_call(operation, place), origins=tuple(origins.of(o) for o in operation.operands))
        for operation, place in walk(module)
        if _is_call(operation)
    )


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


def split_axes(operation: Any) -> tuple[tuple[str, ...], ...]:
    """For each operand of a `sdy.manual_computation`, the mesh axes that it is split over, in the order of its axes."""
    from jaxlib.mlir.dialects import sdy

    per_value = sdy.TensorShardingPerValueAttr(operation.attributes["in_shardings"])
    out = []
    for sharding in per_value.shardings:
        dimensions = sdy.TensorShardingAttr(sharding).dimension_shardings
        axes = (sdy.AxisRefAttr(a).name for d in dimensions for a in sdy.DimensionShardingAttr(d).axes)
        out.append(tuple(str(axis) for axis in axes))
    return tuple(out)


def donated(module: Any) -> tuple[bool, ...]:
    """For each argument of `main`, whether the caller gives its buffer away."""
    for operation in module.body.operations:
        operation = operation.operation
        if operation.name == "func.func" and operation.attributes["sym_name"].value == "main":
            return tuple(
                "jax.buffer_donor" in a or "tf.aliasing_output" in a for a in operation.attributes["arg_attrs"]
            )
    return ()


class Origins:
    """Which arguments of `main` each value of a module is made from, by one pass in the order of the text.

    Calls of functions, manual computations and loops are looked into; a loop's carried values are made from whatever
    they start with and whatever its body adds. Any other operation makes its results from all of its operands.
    """

    def __init__(self, module: Any):
        self._functions = {}
        for operation in module.body.operations:
            operation = operation.operation
            if operation.name == "func.func":
                self._functions[operation.attributes["sym_name"].value] = operation
        self._found: dict[Any, frozenset[int]] = {}
        block = self._functions["main"].regions[0].blocks[0]
        self._block(block, [frozenset({at}) for at in range(len(block.arguments))])

    def of(self, value: Any) -> frozenset[int]:
        """Indices of arguments of `main`; empty for a constant."""
        return self._found.get(value, frozenset())

    def _block(self, block: Any, arguments: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        """Go through a block; the origins of what it returns."""
        for argument, origin in zip(block.arguments, arguments):
            self._add(argument, origin)
        returned: list[frozenset[int]] = []
        for operation in block.operations:
            operation = operation.operation
            operands = [self.of(o) for o in operation.operands]
            if operation.name in ("func.return", "stablehlo.return", "sdy.return"):
                returned = operands
            for result, origin in zip(operation.results, self._results(operation, operands)):
                self._add(result, origin)
        return returned

    def _results(self, operation: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
        count = len(operation.results)
        everything = frozenset().union(*operands)
        if operation.name == "func.call":
            callee = self._functions.get(operation.attributes["callee"].value)
            return [everything] * count if callee is None else self._block(callee.regions[0].blocks[0], operands)
        if operation.name == "sdy.manual_computation":
            return self._block(operation.regions[0].blocks[0], operands)
        if operation.name == "stablehlo.while":
            carried = operands
            for _ in range(len(operands) + 1):
                again = self._block(operation.regions[1].blocks[0], carried)
                merged = [a | b for a, b in zip(carried, again)]
                if merged == carried:
                    break
                carried = merged
            self._block(operation.regions[0].blocks[0], carried)
            return carried
        results = [everything] * count
        if _is_call(operation):
            for operand, result in _call(operation, ()).aliases:
                results[result] = operands[operand]
        return results

    def _add(self, value: Any, origin: frozenset[int]) -> None:
        self._found[value] = self._found.get(value, frozenset()) | origin
