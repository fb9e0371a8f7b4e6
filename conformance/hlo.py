"""Reading a compiled step: does the pool stay where it is, and does nothing come between append and attention?

Works on the text of an optimised HLO module (`compiled.as_text()`), and imports no jax. Three checks, together in
`problems`:

- the program aliases at least the pool's bytes, so the buffers keep their addresses (clause sharded.4);
- nothing but the writes produces as many elements as the pool has on one device, inside fusions too: a conversion or a
  copy of the pool is as large as the pool, whatever it is called;
- where the pool is written, no collective stands between the write and the operations that read what was written
  (clause sharded.3).

In a program that is one append and one attention every collective counts, wherever it is scheduled: `collectives`.
A text in which no write of the pool is found is an error, so that a check that looks at the wrong program cannot pass.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

WRITES = frozenset({"scatter", "dynamic-update-slice"})
FREE = frozenset(
    {
        "parameter",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "fusion",
        "opt-barrier",
        "optimization-barrier",
    }
)
"""Opcodes that produce nothing of their own: they name, pass on, or hold a computation that is looked into."""

PASSING = frozenset({"tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier"})
REWRITING = frozenset({"convert", "copy", "bitcast-convert", "reshape", "transpose"})
"""Opcodes that hand on every element of their operand: as large as the pool, they are the pool in another guise."""

COLLECTIVE = re.compile(r"all-|reduce-scatter|collective-|ragged-all-to-all|send$|recv$")

CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|(?:branch|called|true|false)_computations?)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
"""Attributes that name one computation, or several in braces."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `shapes` are (element type, dimensions) of its result, flattened if it is a tuple."""

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    aliases_operand: bool

    @property
    def elements(self) -> int:
        """Elements of the largest array of the result."""
        return max((math.prod(dimensions) for _, dimensions in self.shapes), default=0)

    def __str__(self) -> str:
        shape = ", ".join(f"{kind}[{','.join(map(str, dimensions))}]" for kind, dimensions in self.shapes[:2])
        return f"{self.opcode} {self.name} of {shape}{', …' if len(self.shapes) > 2 else ''}"


Module = Mapping[str, tuple[Instruction, ...]]
"""Computation name -> its instructions, in the order of the text, which is the schedule once there is one."""


def problems(text: str, *, pool_elements: int, pool_bytes: int, alias_bytes: int) -> list[str]:
    """Every way in which the compiled step mistreats its pool, as sentences; empty if there is none.

    - `pool_elements`: of the smaller of the K and V arrays on one device. Every other array of the program must be
      smaller, or it is taken for a copy of the pool: give the step a pool larger than its activations.
    - `pool_bytes`: of K and V on one device. `alias_bytes`: `compiled.memory_analysis().alias_size_in_bytes`.

    Raises `ValueError` if the text has no write of an array of that size.
    """
    module = parse(text)
    found = []
    if alias_bytes < pool_bytes:
        found.append(
            f"the program aliases {alias_bytes} bytes, the pool has {pool_bytes} on a device: it is not donated"
        )
    found += [f"{where}: {what} is as large as the pool" for where, what in pool_sized(module, pool_elements)]
    found += [
        f"{where}: {collective} stands between a write of the pool and its reader {reader}"
        for where, collective, reader in collectives_before_readers(module, pool_elements)
    ]
    return found


def pool_sized(module: Module, elements: int) -> list[tuple[str, Instruction]]:
    """Instructions, in any computation, that produce an array of at least `elements` and do not write in place."""
    return [
        (where, one)
        for where, instructions in module.items()
        for one in instructions
        if one.elements >= elements and one.opcode not in FREE | WRITES and not one.aliases_operand
    ]


def collectives_before_readers(module: Module, elements: int) -> list[tuple[str, Instruction, Instruction]]:
    """(computation, collective, reader) for each collective that is scheduled after a write of an array of at least
    `elements` and not after the last operation that reads what was written, or that such a reader contains."""
    found, writes = [], 0
    for where, instructions in module.items():
        for at, write in enumerate(instructions):
            if not _writes(module, write, elements):
                continue
            writes += 1
            readers = list(_readers(module, instructions[at + 1 :], write.name, elements))
            if not readers:
                continue
            last = readers[-1]
            for one in instructions[at + 1 : instructions.index(last) + 1]:
                found += [(where, inner, last) for inner in _within(module, one) if COLLECTIVE.match(inner.opcode)]
    if not writes:
        raise ValueError(f"no scatter or update of {elements} elements or more: this is not a step over that pool.")
    return list(dict.fromkeys(found))


def collectives(text: str) -> list[Instruction]:
    """Every collective of a program, in whatever computation and wherever it is scheduled.

    Line by line, not by computation: nothing that a kernel can put into the text hides a part of it.
    """
    ones = (_instruction(line) for line in text.splitlines())
    return [one for one in ones if one is not None and COLLECTIVE.match(one.opcode)]


def parse(text: str) -> Module:
    """Computations of an HLO module's text."""
    module: dict[str, tuple[Instruction, ...]] = {}
    current: list[Instruction] | None = None
    name = ""
    for line in text.splitlines():
        if current is None:
            if line.endswith("{") and (head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", line)):
                name, current = head[1], []
        elif line.startswith("}"):
            module[name], current = tuple(current), None
        elif one := _instruction(line):
            current.append(one)
    return module


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line)
    if not head:
        return None
    rest = re.sub(r"/\*.*?\*/", "", head[2])
    shape_end = _balanced(rest, " ")
    shape, body = rest[:shape_end], rest[shape_end + 1 :]
    opcode, _, body = body.partition("(")
    operands_end = _balanced(body, ")")
    attributes = body[operands_end:]
    called = CALLED.findall(attributes)
    return Instruction(
        name=head[1],
        opcode=opcode,
        shapes=tuple(
            (kind, tuple(int(size) for size in sizes.split(",") if size))
            for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", body[:operands_end])),
        calls=tuple(name.lstrip("%") for names in called for name in names.strip("{}").split(", ") if name),
        aliases_operand="output_to_operand_aliasing={" in attributes,
    )


def _balanced(text: str, stop: str) -> int:
    """Index of the first `stop` outside brackets."""
    depth = 0
    for i, character in enumerate(text):
        if character == stop and depth == 0:
            return i
        depth += (character in "([{") - (character in ")]}")
    return len(text)


def _within(module: Module, one: Instruction) -> Iterator[Instruction]:
    yield one
    for name in one.calls:
        for inner in module.get(name, ()):
            yield from _within(module, inner)


def _writes(module: Module, one: Instruction, elements: int) -> bool:
    """Whether the instruction writes a pool in place: itself, or, for a fusion or a loop, inside."""
    return any(
        inner.elements >= elements and (inner.opcode in WRITES or inner.aliases_operand)
        for inner in _within(module, one)
    )


def _rewrites(module: Module, one: Instruction, elements: int) -> bool:
    """Whether the instruction only makes a pool-sized copy or conversion: alone, or as a fusion of nothing else.

    XLA's CPU compiler puts such a pair around a scatter of 16-bit floats; what reads the result reads the pool.
    """
    if one.elements < elements:
        return False
    if one.opcode != "fusion":
        return one.opcode in REWRITING
    inside = [inner for name in one.calls for inner in module.get(name, ())]
    return bool(inside) and all(inner.opcode in REWRITING | PASSING | {"parameter"} for inner in inside)


def _readers(module: Module, later: tuple[Instruction, ...], written: str, elements: int) -> Iterator[Instruction]:
    """Instructions that use the written array, under this or a passed-on name, and do not write it in turn."""
    names = {written}
    for one in later:
        if names.isdisjoint(one.operands):
            continue
        if one.opcode in PASSING or _rewrites(module, one, elements):
            if one.elements >= elements:  # another element of a tuple is not the pool
                names.add(one.name)
        elif not _writes(module, one, elements):
            yield one
            if one.opcode in ("while", "conditional", "call") and one.elements >= elements:
                names.add(one.name)  # the loop carries the pool along and passes it on
