"""Checks that belong to one vendor's stack, run beside the catalogue's cases: what `paged certify` knows of a machine,
a library or a calling convention that no other backend has.

Here is the list, as data, so that a certificate can be checked without running anything: its `kit` section must hold
exactly the checks that the list has for its executor. What they do lies in the kit's modules, run by
`conformance.kits.run`. A kit is not one of the catalogue's levels: what it finds says nothing
about other backends, and its checks are in no other backend's certificate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from conformance.case import Case
from conformance.kits.findings import FINDINGS

EXECUTING = ("native", "cpu-handlers", "triton-interpreter")
EVERYWHERE = (*EXECUTING, "lowering-only")
VENDOR = ("triton-interpreter",)
"""Where the vendor's own kernels run without its device."""


@dataclasses.dataclass(frozen=True)
class KitCheck:
    """One check. `what` is the statement that a pass makes.

    - `tier`: as of a case; a failure can be waived in tiers 3 and 4 only.
    - `executors`: those it runs on. `opt_in`: it runs only where it is asked for by name.
    """

    id: str
    tier: int
    what: str
    executors: tuple[str, ...] = EXECUTING
    opt_in: bool = False

    def as_case(self) -> Case:
        """The check in the form that results, waivers and certificates know."""
        return Case(id=self.id, tier=self.tier, level="kit", generator="", params={}, clause=("kit",))


@dataclasses.dataclass(frozen=True)
class Kit:
    """A backend's checks, and the modules that hold them."""

    modules: tuple[str, ...]
    checks: tuple[KitCheck, ...]

    def select(self, executor: str, *, large: bool = False) -> tuple[KitCheck, ...]:
        """Checks of one executor; those that must be asked for only with `large`."""
        return tuple(c for c in self.checks if executor in c.executors and (large or not c.opt_in))


WITH_LIBRARIES = ("native", "cpu-handlers")
"""Where compiled handlers serve the targets: they can be asked what they decode, and refuse what the vendor's do."""

AITER = Kit(
    modules=tuple(f"conformance.kits.aiter.{name}" for name in ("process", "lowered", "calls", "steps", "vendor")),
    checks=(
        KitCheck("kit/audit/modules", 0, "no torch, transformers or triton in the process", WITH_LIBRARIES),
        KitCheck("kit/audit/device", 0, "the cases run where the executor says", EXECUTING),
        KitCheck("kit/audit/targets", 0, "one provider serves every target of the route", EXECUTING),
        KitCheck("kit/audit/runtime", 0, "exactly one HIP runtime is mapped, none off the device", WITH_LIBRARIES),
        KitCheck("kit/abi/decoded", 0, "compiled handlers decode by the contract, as XLA says itself", WITH_LIBRARIES),
        KitCheck("kit/alias-probe", 0, "a donated buffer is changed in place through an FFI alias", EXECUTING),
        KitCheck("kit/lowering/contract", 0, "every call of a lowered step is by the contract, to the bit", EVERYWHERE),
        KitCheck("kit/lowering/donation", 0, "a lowered step donates its pool and aliases every append", EVERYWHERE),
        KitCheck("kit/lowering/sharding", 0, "a lowered step's calls get one device's heads, on 3 meshes", EVERYWHERE),
        KitCheck("kit/lowering/collectives", 0, "a lowered step has no collective", EVERYWHERE),
        KitCheck("kit/rounding/decode", 2, "decode rounds to bfloat16 to nearest", EXECUTING),
        KitCheck("kit/rounding/prefill", 2, "prefill rounds to bfloat16 to nearest", EXECUTING),
        KitCheck("kit/sharded/decode", 4, "decode over 2, 4 and 8 devices has one device's bits", WITH_LIBRARIES),
        KitCheck("kit/sharded/prefill", 4, "so has prefill, and pools are equal", WITH_LIBRARIES),
        KitCheck("kit/donation/decode", 0, "a compiled decode step copies no pool, over three steps", EXECUTING),
        KitCheck("kit/donation/mixed", 0, "a compiled mixed step copies no pool, over three steps", WITH_LIBRARIES),
        KitCheck("kit/refused/decode-configurations", 0, "decode refuses what is not compiled", WITH_LIBRARIES),
        KitCheck("kit/refused/prefill-soft-cap", 0, "prefill refuses a soft cap", EXECUTING),
        KitCheck("kit/refused/attribute-widths", 0, "attributes of another width are refused", EXECUTING),
        KitCheck("kit/recorded/decode-soft-cap", 0, "what decode does with a soft cap is recorded", EXECUTING),
        KitCheck("kit/recorded/nan-tail", 0, "whether NaN in dead slots leaks is recorded", EXECUTING),
        KitCheck(
            "kit/large/page-ids", 2, "page ids of 65,536 and more name their own pages", WITH_LIBRARIES, opt_in=True
        ),
        KitCheck("kit/large/bytes", 2, "arrays above 4 GiB are addressed right", WITH_LIBRARIES, opt_in=True),
        KitCheck("kit/vendor/semantics", 3, "the vendor's attention, unpatched, is attention within its bound", VENDOR),
        KitCheck("kit/vendor/patches", 0, "the emulator's patches move no bit of float32 and float16", VENDOR),
        KitCheck("kit/vendor/sharding", 4, "a step over 2 and 8 devices has the bits of one", VENDOR),
        *(KitCheck(f"kit/finding/{n}", 0, f"the vendor's behaviour {n!r} is seen again", VENDOR) for n in FINDINGS),
    ),
)
KITS: Mapping[str, Kit] = {"aiter": AITER}
"""Entry point -> its kit."""


def select(backend: str, executor: str, *, large: bool = False) -> tuple[KitCheck, ...]:
    """Checks of a backend on an executor; none for a backend without a kit."""
    return KITS[backend].select(executor, large=large) if backend in KITS else ()


def faults(backend: str, executor: str, found: Sequence[str]) -> list[str]:
    """What is wrong with the list of a certificate's kit entries, as sentences."""
    wanted = {c.id for c in select(backend, executor)}
    may = {c.id for c in select(backend, executor, large=True)}
    out = [f"kit check {i!r} is missing" for i in sorted(wanted - set(found))]
    out += [f"kit check {i!r} is not one of the kit's on {executor}" for i in sorted(set(found) - may)]
    return out + [f"kit check {i!r} occurs twice" for i in sorted({i for i in found if list(found).count(i) > 1})]
