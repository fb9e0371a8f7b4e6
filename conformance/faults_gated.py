"""Faults that only some programs of a backend have: any other fault, behind a condition on what a kernel is chosen by.

A backend has many kernels and picks one by what is static: the rung, the types, the options. A fault in one of them
shows only where that one runs, so every condition below is a question to the catalogue: is each option, and each fault,
tried there? `tools/dispatch_faults.py` asks them all; the mutants of `conformance.mutants.GATED` are a choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from conformance import broken_kernel
from conformance.faults import FAULTS, Call, Fault
from conformance.mutants import GATED
from paged.backends.moves import scatter_append
from paged.backends.protocol import KvArrays, Rung
from paged.common import AttentionSpec

Gate = Callable[[Rung, AttentionSpec | None], bool]
"""Whether the fault is in the kernel that is chosen for a rung and, if it is one of attention, for a specification."""


def _single(rung: Rung, spec: AttentionSpec | None) -> bool:
    return rung.max_query_len == 1


def _single_and(also: Callable[[Rung], bool]) -> Gate:
    return lambda rung, spec: rung.max_query_len == 1 and also(rung)


GATES: Mapping[str, Gate] = {
    "single": _single,
    "several": lambda rung, spec: rung.max_query_len > 1,
    "single_narrow": _single_and(lambda rung: (rung.head_dim or 128) < 128),
    "single_wide_page": _single_and(lambda rung: rung.tokens_per_page >= 64),
    "single_long": _single_and(lambda rung: rung.max_kv_len > 512),
    "single_row": _single_and(lambda rung: rung.rows == 1),
    "single_8_bit": _single_and(lambda rung: str(rung.kv_dtype).startswith("float8")),
    "single_window": lambda rung, spec: _single(rung, spec) and spec is not None and spec.window is not None,
}
"""What `conformance.mutants.GATED` speaks of. A step of single tokens is one whose rung has `max_query_len` 1."""


def gated(fault: Fault, gate: Gate) -> Fault:
    """The fault where `gate` holds, and an honest backend elsewhere."""

    def before(call: Call) -> None:
        if fault.before is not None and gate(call.rung, call.spec):
            fault.before(call)

    def after(call: Call, out: Any, lse: Any) -> tuple[Any, Any]:
        return fault.after(call, out, lse) if fault.after is not None and gate(call.rung, call.spec) else (out, lse)

    def attend(call: Call) -> tuple[Any, Any]:
        assert fault.attend is not None
        return fault.attend(call) if gate(call.rung, call.spec) else broken_kernel.attend(call, None)

    def append(pool: KvArrays, key: Any, value: Any, slots: Any, rung: Rung) -> KvArrays:
        assert fault.append is not None
        if gate(rung, None):
            return fault.append(pool, key, value, slots, rung)
        return scatter_append(pool, key, value, slots)

    return dataclasses.replace(
        fault,
        before=None if fault.before is None else before,
        after=None if fault.after is None else after,
        attend=None if fault.attend is None else attend,
        append=None if fault.append is None else append,
    )


FAULTS.update((f"{name}_{gate}", gated(FAULTS[name], GATES[gate])) for gate, names in GATED.items() for name in names)
