"""What an installed jax-aiter declares its targets to be: contract ids from its C++ sources and its Python wrappers.

A compiled library does not say what it decodes, so the two places that do are read: the `Bind()` chains in
`csrc/ffi/kv/*.cu`, where the sources are at hand, and the calls that the package's own wrappers lower to. An id that
is not the contract's means that a call would be decoded wrongly, or not at all.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from paged.backends.aiter.contract import TARGETS, contract_id
from paged.backends.aiter.lowering import read_calls

_CPP_TYPES = {
    "float": "f32",
    "double": "f64",
    "bool": "i1",
    "int32_t": "i32",
    "int": "i32",
    "int64_t": "i64",
    "std::string_view": "string",
    "absl::string_view": "string",
    "std::string": "string",
}


@dataclasses.dataclass(frozen=True)
class Declaration:
    """An ABI as somebody declares it. `where`: a file, or the wrapper's dotted name."""

    target: str
    contract_id: str
    attributes: tuple[tuple[str, str], ...]
    where: str

    @property
    def matches(self) -> bool:
        """Whether it is the contract's."""
        return self.contract_id == TARGETS[self.target].contract_id


def in_sources(root: Path) -> list[Declaration]:
    """Declarations of contract targets in `root/csrc`, in the order of the files; none without sources."""
    files = sorted(p for suffix in ("*.cu", "*.cc", "*.cpp") for p in (root / "csrc").rglob(suffix))
    return [d for path in files for d in read_source(path.read_text("utf-8", "replace"), str(path))]


def read_source(text: str, where: str) -> Iterator[Declaration]:
    """Declarations of contract targets in one C++ file: each handler macro's chain of Arg, Ret and Attr."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    for macro in re.finditer(r"XLA_FFI_DEFINE_HANDLER(?:_SYMBOL|_AUTO)?\s*\(", text):
        body = text[macro.end() : _closing(text, macro.end())]
        name = body.partition(",")[0].strip()
        if name not in TARGETS:
            continue
        links = re.findall(r"\.\s*(Arg|Ret|Attr|RemainingArgs|RemainingRets)\s*<([^()]*?)>\s*\(([^()]*)\)", body)
        attributes = {
            a.strip().strip('"'): str(_CPP_TYPES.get(k.strip(), k.strip())) for w, k, a in links if w == "Attr"
        }
        counts = {which: sum(w == which for w, _, _ in links) for which in ("Arg", "Ret")}
        found = contract_id(name, counts["Arg"], counts["Ret"], attributes)
        yield Declaration(name, found, tuple(sorted(attributes.items())), where)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one before `start`; the end of the text if none does."""
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return len(text)


def in_wrappers() -> list[Declaration]:
    """What the package's own wrappers lower to, for those that are there and can be traced on this machine."""
    out = []
    for target, (module, trace) in _WRAPPERS.items():
        if importlib.util.find_spec("jax_aiter") is None or not _has(module):
            continue
        try:
            lowered = trace().lower(lowering_platforms=("rocm",))
        except Exception:  # a wrapper loads its library first; whether that works is another part of the report
            continue
        for call in read_calls(lowered.compiler_ir("stablehlo")):
            if call.target == target:
                found = contract_id(target, len(call.operands), len(call.results), call.attributes)
                out.append(Declaration(target, found, tuple(sorted(call.attributes.items())), module))
    return out


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _append() -> Any:
    from jax_aiter.ops.append_kv import append_kv  # pyright: ignore[reportMissingImports]

    new, pool = _bf16(3, 2, 128), _bf16(4, 16, 2, 128)
    return jax.jit(append_kv).trace(new, new, _i32(3), pool, pool)


def _decode() -> Any:
    from jax_aiter.ops.paged_attention import paged_attention  # pyright: ignore[reportMissingImports]

    def run(*arrays: Any) -> Any:
        return paged_attention(*arrays, max_seq_len=64, scale=1.0)

    pool = _bf16(4, 16, 2, 128)
    return jax.jit(run).trace(_bf16(3, 2, 128), pool, pool, _i32(4), _i32(9), _i32(3))


def _prefill() -> Any:
    from jax_aiter.ops.paged_prefill import paged_prefill  # pyright: ignore[reportMissingImports]

    def run(*arrays: Any) -> Any:
        return paged_prefill(*arrays, max_seqlen_q=5, max_seqlen_k=64, scale=1.0)

    pool = _bf16(4, 16, 2, 128)
    return jax.jit(run).trace(_bf16(7, 2, 128), pool, pool, _i32(4), _i32(4), _i32(9), _i32(3))


def _alias_probe() -> Any:
    from jax_aiter.ops.kv_alias_probe import kv_alias_probe  # pyright: ignore[reportMissingImports]

    return jax.jit(kv_alias_probe).trace(_bf16(8, 4), _i32(3), _bf16(3, 4))


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


_WRAPPERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "AppendKvJA": ("jax_aiter.ops.append_kv", _append),
    "PagedAttentionJA": ("jax_aiter.ops.paged_attention", _decode),
    "PagedPrefillJA": ("jax_aiter.ops.paged_prefill", _prefill),
    "KvAliasProbeJA": ("jax_aiter.ops.kv_alias_probe", _alias_probe),
}
