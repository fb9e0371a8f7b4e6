"""Edits of a certificate by someone who makes every digest, total and verdict anew, and what notices each.

`check`: `paged certify --check` refuses it, naming the field. `replay`: only running cases again says so, of results if
the case is among those picked. `signature`: nothing but a signature over the body.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from conformance import certificate

Edit = Callable[[dict[str, Any]], Any]
ATTEND, MOVE, MESH, ITSELF = "attend/generic/bf16/mixed", "append/bf16/bits", "sharded/address/tensor4-fsdp2", "self/"


def row(body: dict[str, Any], case_id: str) -> dict[str, Any]:
    """The row of a case."""
    return next(e for e in body["cases"] if e["id"].startswith(case_id))


def setting(path: str, value: Any) -> Edit:
    """Set one field, e.g. `environment.jax`."""

    def edit(body: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for name in way:
            body = body[name]
        body[last] = value

    return edit


def on(case_id: str, **fields: Any) -> Edit:
    """Set fields of a case's row."""
    return lambda body: row(body, case_id).update(fields)


def every(**fields: Any) -> Edit:
    """Set fields of every row."""
    return lambda body: [e.update(fields) for e in body["cases"]]


def both(*edits: Edit) -> Edit:
    """One edit after the other."""
    return lambda body: [edit(body) for edit in edits]


H200 = both(
    setting("environment.device", "NVIDIA H200"), setting("environment.platform", "gpu"),
    setting("environment.driver", "cuda 13000"), setting("claims.platforms", ["cuda", "gpu"]),
)  # fmt: skip
NEWER = both(
    setting("environment.jax", "9.9.1"), setting("environment.packages.jaxlib", "9.9.1"),
    setting("backend.packages.jax", "9.9.1"), setting("backend.packages.jaxlib", "9.9.1"),
)  # fmt: skip
DIGEST, CPU = "sha256:" + "ab" * 32, "paged.backends.cpu:make_backend"
WAIVER = {"case": "attend/gen*", "reason": "r", "issue": "https://example.org", "until": "9", "devices": []}

EDITS: Mapping[str, tuple[Edit, str]] = {
    "another numeric model is claimed": (setting("claims.numerics", "N2"), "check"),
    "a field of the numeric model": (setting("backend.numerics.exp_error_log2", -22.5), "check"),
    "mutants 999/999": (setting("suite.mutants", "999/999"), "check"),
    "mutants that are no count": (setting("suite.mutants", "all"), "check"),
    "another device": (setting("environment.device", "NVIDIA H200"), "check"),
    "another platform": (setting("environment.platform", "gpu"), "check"),
    "another device, platform, driver and claimed platforms, rows as they were": (H200, "check"),
    "another driver": (setting("environment.driver", "cuda 13000"), "check"),
    "another version of jax": (setting("environment.jax", "9.9.1"), "check"),
    "another version of a package": (setting("environment.packages.numpy", "9.9"), "check"),
    "fewer devices than a mesh that passed": (setting("environment.devices", 1), "check"),
    "an executor that cannot have run there": (setting("environment.executor", {"name": "native"}), "check"),
    "a lower level": (setting("level", "core"), "check"),
    "a part told as the whole, and the other way round": (setting("complete", False), "check"),
    "a dtype no longer claimed": (lambda b: b["claims"]["dtypes"].remove("bfloat16"), "check"),
    "a feature no longer claimed": (lambda b: b["claims"]["features"].remove("window"), "check"),
    "a claim of unknown name": (setting("claims.speed", "high"), "check"),
    "a pass told as not claimed": (on(ATTEND, status="not-claimed"), "check"),
    "a pass told as waived": (on(ATTEND, status="waived"), "check"),
    "a waiver for what passed": (lambda b: b["waivers"].append({**WAIVER, "matched": [ATTEND]}), "check"),
    "nothing judged": (on(ATTEND, elements=0, decided=0), "check"),
    "more decided than judged": (on(ATTEND, decided=10**9), "check"),
    "the output of a movement": (on(MOVE, output=DIGEST), "check"),
    "the size of a movement": (on(MOVE, elements=10, decided=10), "check"),
    "a row's clause": (on(ATTEND, clause=["attend.2"]), "check"),
    "a row's needs": (on(ATTEND, needs=[]), "check"),
    "a row's tier": (on(ATTEND, tier=2), "check"),
    "a row's device": (on(ATTEND, device="NVIDIA H200"), "check"),
    "a row without its device": (lambda b: row(b, ATTEND).pop("device"), "check"),
    "a broken clause in a pass": (on(ATTEND, broken="attend.2"), "check"),
    "a failure of a clause that does not exist": (on(ATTEND, status="fail", broken="attend.99"), "check"),
    "a case left out": (lambda b: b["cases"].remove(row(b, ATTEND)), "check"),
    "a case twice": (lambda b: b["cases"].append(row(b, ATTEND)), "check"),
    "another catalogue version": (setting("suite.catalogue_version", "v9"), "check"),
    "a dirty tree": (setting("suite.tree", "dirty"), "check"),
    "a wider scope": (setting("scope", "Everything, whole models included."), "check"),
    "the backend's version, where it is the suite's own": (setting("backend.distribution", "paged 9.0"), "check"),
    "a library that has no digest": (setting("backend.build", {"library": "ours"}), "check"),
    "kernels that are compiled, and no library": (setting("backend.factory", CPU), "check"),
    "the output of every attention": (lambda b: [e.update(output=DIGEST) for e in b["cases"] if e["tier"] > 1],
        "replay"),
    "fewer decided elements": (on(ATTEND, decided=1), "replay"),
    "the own bits of a relation": (lambda b: row(b, ITSELF)["details"].update(bits=DIGEST), "replay"),
    "a head dim that no case has is claimed": (lambda b: b["claims"]["head_dims"].append(4096), "replay"),
    "a larger pool is claimed": (setting("claims.max_page_id", 7 * 10**8), "replay"),
    "device, platform, driver, claims and rows together": (both(H200, every(device="NVIDIA H200")), "replay"),
    "every version of jax together": (NEWER, "replay"),
    "the processor": (setting("environment.cpu", "another"), "replay"),
    "the flags of XLA": (setting("environment.xla_flags", "--xla_fast"), "replay"),
    "an option of jax": (setting("environment.jax_options.enable_x64", "True"), "replay"),
    "the digest of the backend's sources": (setting("backend.sources", DIGEST), "replay"),
    "a library where none was compiled": (setting("backend.build", {"library": DIGEST}), "replay"),
    "the digest of the suite's sources": (setting("suite.sources", DIGEST), "replay"),
    "a tree that was dirty told as clean": (setting("suite.tree", "clean"), "signature"),
    "mutants caught by an earlier suite": (
        both(setting("suite.sources", DIGEST), setting("suite.mutants", "80/80")), "signature"),
    "a detail that nothing compares": (on(ATTEND, details={"rms": 0.5}), "signature"),
}  # fmt: skip
"""What is edited -> the edit, and what notices it."""


def resealed(data: Mapping[str, Any], edit: Edit | None = None) -> dict[str, Any]:
    """The certificate with the edit, every digest, total and verdict made anew."""
    body = copy.deepcopy(data["body"])
    for entry in body["cases"]:  # as certificates are made now, whenever this one was
        entry["device"] = body["environment"]["device"]
    if edit is not None:
        edit(body)
    for entry in certificate.entries(body):
        entry["digest"] = certificate.digest({k: v for k, v in entry.items() if k != "digest"})
    body["totals"], body["verdict"] = certificate.totals(body), certificate.verdict(body)
    body["certifies"] = certificate.certifies(body)
    body["digests"] = {name: certificate.digest(body[name]) for name in certificate.SECTIONS if name in body}
    return certificate.seal(body, data["envelope"])
