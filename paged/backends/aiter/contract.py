"""What jax-aiter's FFI targets are expected to be, as data, and the comparison of a lowered module with it.

XLA decodes a call when it is executed, so a wrong width (a Python float is an f64 attribute, where the handler reads
f32) is an error at the first step on the device and nowhere before. The table below lets it be an error at lowering, on
a machine without one.

Read off ROCm/jax-aiter, `csrc/ffi/kv/*.cu` (commits 9ce0f00, 8209aad, 400a913, 3f10d55). One name has carried two ABIs
in that project before, so a contract has an id that an installed library's is compared with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from paged.backends.aiter.lowering import Call, read_calls

FLOAT_TYPES = ("bf16", "f16")


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a call. `shape` holds ints, and names: one name is one size throughout a call; `"B+1"` is one more.

    - `types`: MLIR element types it may have. `like`: name of an operand whose element type it must share.
    - `at_least`: the size of the one axis is a bound, given by the caller, not a fixed number.
    """

    name: str
    shape: tuple[str | int, ...]
    types: tuple[str, ...]
    like: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One FFI target: everything that a caller and a handler must agree on.

    - `library`: the vendor's file. `source`: where the declaration is, for whoever checks this table.
    - `contexts`: what the handler asks of the runtime; no part of a call, so no part of the id.
    - `attributes`: name -> MLIR type, to the bit width.
    - `aliases`: (operand, result) indices that must be one buffer.
    - `traits`: of the handler; none of these may be captured in a command buffer.
    """

    name: str
    library: str
    source: str
    contexts: tuple[str, ...]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    attributes: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    traits: tuple[str, ...] = ()

    @property
    def contract_id(self) -> str:
        """`name:` and 16 hex digits of a hash of what XLA decodes: numbers of arrays, attributes and their types."""
        return contract_id(self.name, len(self.operands), len(self.results), dict(self.attributes))

    def index(self, operand: str) -> int:
        """Position of an operand."""
        return [o.name for o in self.operands].index(operand)


def contract_id(name: str, operands: int, results: int, attributes: Mapping[str, str]) -> str:
    """The id of an ABI, whoever declares it: equal ids decode each other's calls."""
    text = json.dumps([name, operands, results, sorted(attributes.items())], separators=(",", ":"))
    return f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


_SCALES = (Operand("k_scale", (1,), ("f32",)), Operand("v_scale", (1,), ("f32",)))
_POOL = ("N", "P", "HK", "D")


def _pools(types: tuple[str, ...], like: str) -> tuple[Operand, ...]:
    return tuple(Operand(name, _POOL, types, like=like) for name in ("k_pool", "v_pool"))


_PAGES = (
    Operand("kv_indptr", ("B+1",), ("i32",)),
    Operand("kv_page_indices", ("listed",), ("i32",)),
    Operand("kv_last_page_lens", ("B",), ("i32",)),
)

APPEND = Target(
    name="AppendKvJA",
    library="append_kv_ja.so",
    source="csrc/ffi/kv/append_kv_ja.cu",
    contexts=("stream", "device_ordinal"),
    operands=(
        Operand("k_new", ("T", "HK", "D"), (*FLOAT_TYPES, "f32")),
        Operand("v_new", ("T", "HK", "D"), (*FLOAT_TYPES, "f32"), like="k_new"),
        Operand("slot_mapping", ("T",), ("i32",)),
        *_SCALES,
        *_pools((*FLOAT_TYPES, "f32"), like="k_new"),
    ),
    results=_pools((*FLOAT_TYPES, "f32"), like="k_new"),
    attributes=(("kv_cache_dtype", "string"),),
    aliases=((5, 0), (6, 1)),
)
"""Writes the tokens to their slots, in place; a negative slot is skipped. Slots past the pool are not checked there."""

DECODE = Target(
    name="PagedAttentionJA",
    library="paged_attention_ja.so",
    source="csrc/ffi/kv/paged_attention_ja.cu",
    contexts=("stream",),
    operands=(
        Operand("query", ("B", "HQ", "D"), FLOAT_TYPES),
        *_pools(FLOAT_TYPES, like="query"),
        *_PAGES,
        *_SCALES,
        Operand("workspace", ("bytes",), ("ui8",)),
    ),
    results=(Operand("out", ("B", "HQ", "D"), FLOAT_TYPES, like="query"),),
    attributes=(
        ("scale", "f32"),
        ("logits_soft_cap", "f32"),
        ("max_num_partitions", "i64"),
        ("func_name", "string"),
    ),
)
"""One query token per row. Takes a soft cap and ignores it: it is compiled without."""

PREFILL = Target(
    name="PagedPrefillJA",
    library="paged_prefill_ja.so",
    source="csrc/ffi/kv/paged_prefill_ja.cu",
    contexts=("stream",),
    operands=(
        Operand("query", ("T", "HQ", "D"), FLOAT_TYPES),
        *_pools(FLOAT_TYPES, like="query"),
        Operand("cu_seqlens_q", ("B+1",), ("i32",)),
        *_PAGES,
    ),
    results=(Operand("out", ("T", "HQ", "D"), FLOAT_TYPES, like="query"),),
    attributes=(
        ("scale", "f32"),
        ("logits_soft_cap", "f32"),
        ("max_seqlen_q", "i64"),
        ("max_seqlen_k", "i64"),
        ("causal", "i1"),
        ("window_size_left", "i64"),
        ("window_size_right", "i64"),
    ),
)
"""Ragged queries; masks are bottom-right aligned. Rows of the output past cu_seqlens_q[-1] are not written."""

ALIAS_PROBE = Target(
    name="KvAliasProbeJA",
    library="kv_alias_probe_ja.so",
    source="csrc/ffi/kv/kv_alias_probe_ja.cu",
    contexts=("stream",),
    operands=(
        Operand("pool", ("N", "row"), ("f32", "bf16")),
        Operand("row_idx", ("R",), ("i32",)),
        Operand("vals", ("R", "row"), ("f32", "bf16"), like="pool"),
    ),
    results=(Operand("pool", ("N", "row"), ("f32", "bf16"), like="pool"),),
    aliases=((0, 0),),
)
"""Adds rows in place and refuses to run where the alias is not honoured: the first thing to try on a new machine."""

TARGETS: Mapping[str, Target] = {t.name: t for t in (APPEND, DECODE, PREFILL, ALIAS_PROBE)}
ROUTE = ("AppendKvJA", "PagedAttentionJA", "PagedPrefillJA")
"""The targets that the route `paged-kv` calls; all must be there."""


def check_lowering(
    module: Any, *, required: Sequence[str] = (), arguments: Mapping[str, Collection[int]] | None = None
) -> list[str]:
    """Every difference between a lowered module's calls and the contract, each naming the target and what differs.

    - `module`: a `jax.stages.Lowered`, or the module that its `compiler_ir("stablehlo")` gives, read with MLIR's
      bindings.
    - `required`: targets of which there must be at least one call.
    - `arguments`: operand name, e.g. `"k_new"` -> indices of the main function's arguments one of which it must be made
      from, and of which it must be made from none that is given to another name. Types cannot tell K from V.

    Empty if there is none. Calls of other targets are not looked at.
    """
    calls = read_calls(module)
    missing = [f"{name}: the module has no call of it" for name in required if name not in {c.target for c in calls}]
    found = [d for call in calls if call.target in TARGETS for d in differences(call)]
    return missing + found + [d for call in calls if call.target in TARGETS for d in _swapped(call, arguments or {})]


def _swapped(call: Call, arguments: Mapping[str, Collection[int]]) -> Iterable[str]:
    for at, operand in enumerate(TARGETS[call.target].operands):
        wanted = set(arguments.get(operand.name, ()))
        if not wanted or at >= len(call.origins):
            continue
        made_from = call.origins[at]
        others = {i: name for name, indices in arguments.items() if name != operand.name for i in indices}
        if foreign := sorted({others[i] for i in made_from if i in others and i not in wanted}):
            yield f"{call.target}: operand {at} ({operand.name}) is made from {' and '.join(foreign)}"
        elif not made_from & wanted:
            yield f"{call.target}: operand {at} ({operand.name}) is not made from argument {sorted(wanted)}"


def differences(call: Call) -> list[str]:
    """How one call differs from its target's contract."""
    target = TARGETS[call.target]
    out = list(_arrays(target, call))
    wanted = dict(target.attributes)
    for name, kind in wanted.items():
        if name not in call.attributes:
            out.append(f"attribute {name} ({kind}) is missing")
        elif call.attributes[name] != kind:
            out.append(f"attribute {name} is {call.attributes[name]}, the contract has {kind}")
    out += [f"attribute {name} is not in the contract" for name in sorted(set(call.attributes) - set(wanted))]
    for operand, result in target.aliases:
        if (operand, result) not in call.aliases:
            name = target.operands[operand].name
            out.append(f"operand {operand} ({name}) is not aliased to result {result}: the pool would be copied")
    out += [f"operand {o} is aliased to result {r}" for o, r in call.aliases if (o, r) not in target.aliases]
    if not call.typed:
        out.append("the call is not one of XLA's typed FFI: it has no attribute dictionary")
    found = contract_id(call.target, len(call.operands), len(call.results), call.attributes)
    if found != target.contract_id:
        out.append(f"contract id {found}, expected {target.contract_id}")
    return [f"{target.name}: {line}" for line in out]


def _arrays(target: Target, call: Call) -> Iterable[str]:
    sizes: dict[str, tuple[int, str]] = {}
    for what, wanted, found in (("operand", target.operands, call.operands), ("result", target.results, call.results)):
        if len(wanted) != len(found):
            yield f"{len(found)} {what}s, the contract has {len(wanted)}"
            continue
        by_name = {o.name: f for o, f in zip(target.operands, call.operands)}
        for at, (operand, (shape, kind, layout)) in enumerate(zip(wanted, found)):
            name = f"{what} {at} ({operand.name})"
            like = by_name.get(operand.like) if operand.like else None
            if kind not in operand.types:
                yield f"{name} holds {kind}, the contract has {' or '.join(operand.types)}"
            elif like is not None and kind != like[1]:
                yield f"{name} holds {kind}, but {operand.like} holds {like[1]}"
            if len(shape) != len(operand.shape):
                yield f"{name} has {len(shape)} axes {list(shape)}, the contract has {list(operand.shape)}"
                continue
            for size, symbol in zip(shape, operand.shape):
                yield from _size(name, size, symbol, sizes)
            if layout != tuple(range(len(shape) - 1, -1, -1)):
                yield f"{name} has the layout {list(layout)}; handlers read row-major arrays"


def _size(name: str, size: int, symbol: str | int, sizes: dict[str, tuple[int, str]]) -> Iterable[str]:
    if isinstance(symbol, int):
        if size != symbol:
            yield f"{name} has the size {size}, the contract has {symbol}"
        return
    key, _, more = symbol.partition("+")
    value, first = sizes.setdefault(key, (size - int(more or 0), name))
    if size != value + int(more or 0):
        yield f"{name} has {symbol} = {size}, but {first} says {key} = {value}"
