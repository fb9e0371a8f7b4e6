"""Checks of the vendor's own kernels, where they run: what they mean, and what was found about them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from conformance import execute
from conformance.catalogue import load
from conformance.kits.aiter.lowered import sharding_over
from conformance.kits.findings import FINDINGS
from conformance.kits.run import Context, check

SHARDED_CASE = "sharded/generic/d128/tensor8"
"""A case with normal values and eight KV heads."""
MESHES = ({"tensor": 8}, {"tensor": 4, "fsdp": 2}, {"tensor": 2})


@check(*(f"kit/finding/{name}" for name in FINDINGS))
def finding(context: Context) -> Any:
    """The vendor's behaviour is seen again. One that is not is no longer a finding: correct the list."""
    name = context.id.rpartition("/")[2]
    found = context.executor.vendor("findings").load()[name]
    evidence = found.show()
    said = found.describe()
    details = {"finding": said.pop("what"), **said, "measured": plain(evidence.measured)}
    if not evidence.reproduced:
        return context.failed(f"finding {name!r} is not seen with these versions; correct the list", **details)
    return context.passed(**details)


@check("kit/vendor/semantics")
def semantics(context: Context) -> Any:
    """float32 and float16, in a process without any patch of the interpreter, within the vendor's own bound."""
    outcomes = _unpatched(context.executor)
    wrong = [o for o in outcomes if not o.within]
    if wrong:
        first = wrong[0]
        return context.failed(f"{first.name}: the error is {first.error:.3g}, the bound {first.bound:.3g}")
    worst = max(outcomes, key=lambda o: o.error / o.bound)
    return context.passed(len(outcomes), worst={"problem": worst.name, "error": worst.error, "bound": worst.bound})


@check("kit/vendor/patches")
def patches(context: Context) -> Any:
    """The patched interpreter gives float32 and float16 the bits of an unpatched one."""
    pairs = zip(context.executor.vendor("matrix").run(), _unpatched(context.executor))
    moved = [ours.name for ours, theirs in pairs if ours != theirs]
    if moved:
        return context.failed(f"{moved[0]}: the patches move bits ({len(moved)} problems)", moved=moved)
    return context.passed(len(_unpatched(context.executor)))


@check("kit/vendor/sharding")
def sharding(context: Context) -> Any:
    """A step with normal values over several devices has the bits of one device, output and pool."""
    case = load().case(SHARDED_CASE)
    problem = context.session.vector(case).problem
    whole = execute.attend(context.backend, problem)
    moved = {}
    for sizes in MESHES:
        split = execute.attend(context.backend, problem, sharding=sharding_over(sizes, ("tensor",)))
        pairs = ((whole.out, split.out), (whole.keys, split.keys), (whole.values, split.values))
        moved[" x ".join(f"{name} {n}" for name, n in sizes.items())] = sum(int((a != b).sum()) for a, b in pairs)
    if any(moved.values()):
        return context.failed("sharding moves bits where no heuristic of the vendor's does", moved=moved)
    return context.passed(len(MESHES) * int(np.prod(whole.out.shape)), moved=moved, case=SHARDED_CASE)


@functools.cache
def _unpatched(executor: Any) -> Any:
    return executor.vendor("matrix").run_unpatched()


def plain(measured: Mapping[str, Any]) -> Any:
    """Numbers as a certificate takes them: NaN and infinities as text."""
    return json.loads(json.dumps(measured), parse_constant=str)
