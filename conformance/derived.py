"""What a certificate says in two places, or says of what can be derived: every contradiction, with both values.

Digests can be made anew by anyone who edits a body. What remains is that the parts of an honest body agree with one
another, with the catalogue and with the suite; here that is asked, without running a backend.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.case import Case, MoveProblem
from conformance.catalogue import Catalogue
from conformance.clauses import CLAUSES
from conformance.vectors import generate
from paged.common import Capabilities
from paged.common.capabilities import NUMERIC_MODELS

ON_CPU = ("cpu-handlers", "triton-interpreter", "lowering-only")
"""Executors that run on no vendor's device."""
COMPILED = ("paged.backends.cpu:make_backend",)
"""Factories of this project whose backends compile what they run, and say so in `backend.build`."""
BUILD = ("library", "sources", "headers", "compiler", "flags", "machine")
"""What their `build` names: what bits depend on besides the options of jax."""
_PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}
"""jax platform -> how its driver begins, and names under which a backend may declare it besides its own."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """What the suite that checks knows of itself: the digest of its sources, how many mutants it has, and "caught/all"
    of the kill matrix that is recorded in it, or None."""

    sources: str
    mutants: int
    recorded: str | None


def contradictions(
    body: Mapping[str, Any], cases: Mapping[str, Case], claimed: Capabilities | None, suite: Suite | None = None
) -> list[str]:
    """Sentences that name a field, what is recorded and what follows from the rest.

    `cases` are those of the body's catalogue, `claimed` the declaration that its claims spell. `suite` tells whether
    the recorded kill matrix is the one that the body can have known.
    """
    found = [*_numerics(body), *_environment(body), *_versions(body), *_mutants(body, suite)]
    found += [*_waivers(body), *_devices(body), *_build(body)]
    for entry in body["cases"]:
        case = cases.get(entry["id"])
        if case is not None:
            found += [f"case {entry['id']!r}: {text}" for text in _entry(body, entry, case, claimed)]
    return found


def _differs(field: str, recorded: Any, derived: Any, source: str) -> str:
    return f"{field} is {recorded!r}, but {source} gives {derived!r}"


def _numerics(body: Mapping[str, Any]) -> Iterator[str]:
    name, recorded = body["claims"].get("numerics"), body["backend"].get("numerics")
    model = NUMERIC_MODELS.get(name) if isinstance(name, str) else None
    if model is not None and recorded is not None and recorded != dataclasses.asdict(model):
        yield _differs("backend.numerics", recorded, dataclasses.asdict(model), f"claims.numerics {name!r}")


def _environment(body: Mapping[str, Any]) -> Iterator[str]:
    environment, claims = body["environment"], body["claims"]
    platform, device = environment.get("platform"), environment.get("device")
    if platform is None:
        return
    if (platform == "cpu") != (device == "cpu"):
        yield f"environment.device is {device!r} on environment.platform {platform!r}: just a CPU is 'cpu'"
    driver, drivers = str(environment.get("driver", "")), _PLATFORMS.get(platform, ())
    if drivers and not driver.startswith(drivers):
        yield f"environment.driver is {driver!r}, but environment.platform {platform!r} has one of {', '.join(drivers)}"
    declared = claims.get("platforms")
    names = {platform, *(name for name in drivers if driver.startswith(name))}
    ran = any(entry["status"] in ("pass", "fail", "waived") for entry in body["cases"])
    if ran and isinstance(declared, list) and not names & set(map(str, declared)):
        yield _differs("environment.platform", platform, declared, "claims.platforms")
    executor = environment.get("executor")
    name = executor.get("name") if isinstance(executor, Mapping) else None
    if name in ON_CPU and platform != "cpu":
        yield f"environment.platform is {platform!r}, but environment.executor {name!r} executes on 'cpu'"
    if name == "native" and platform == "cpu":
        yield "environment.platform is 'cpu', but environment.executor 'native' executes on the vendor's device"
    devices = environment.get("devices")
    if not isinstance(devices, int) or devices < 1:
        yield f"environment.devices is {devices!r}, and a run has at least one"


def _versions(body: Mapping[str, Any]) -> Iterator[str]:
    environment, backend, suite = body["environment"], body["backend"], body["suite"]
    said = {**(environment.get("packages") or {})}
    if "jax" in environment:
        said["jax"] = environment["jax"]
    executor = environment.get("executor")
    executor = executor if isinstance(executor, Mapping) else {}
    for where, packages in (("backend", backend.get("packages")), ("environment.executor", executor.get("packages"))):
        for name, version in (packages or {}).items() if isinstance(packages, Mapping) else ():
            if name in said and said[name] != version:
                field = "environment.jax" if name == "jax" else f"environment.packages.{name}"
                yield _differs(field, said[name], version, f"{where}.packages.{name}")
    if {"jax", "jaxlib"} <= set(said) and _minor(said["jax"]) != _minor(said["jaxlib"]):
        yield f"environment.jax is {said['jax']!r} with jaxlib {said['jaxlib']!r}, which do not belong together"
    if "python" in executor and executor["python"] != environment.get("python"):
        yield _differs(
            "environment.python", environment.get("python"), executor["python"], "environment.executor.python"
        )
    name, _, version = str(backend.get("distribution", "")).partition(" ")
    if name == "paged" and version != suite.get("version"):
        yield _differs(
            "backend.distribution", backend["distribution"], f"paged {suite.get('version')}", "suite.version"
        )


def _minor(version: Any) -> list[str]:
    return str(version).split(".")[:2]


def _mutants(body: Mapping[str, Any], suite: Suite | None) -> Iterator[str]:
    said = body["suite"].get("mutants")
    if said is None:
        return
    match = re.fullmatch(r"(\d+)/(\d+)", str(said))
    if match is None or int(match[1]) > int(match[2]):
        yield f"suite.mutants is {said!r}, which is not how many of how many were caught"
    elif suite is not None and int(match[2]) > suite.mutants:
        yield f"suite.mutants is {said!r}, but the suite has {suite.mutants} mutants"
    elif suite is not None and body["suite"].get("sources") == suite.sources and said != suite.recorded:
        yield _differs("suite.mutants", said, suite.recorded, "the recorded kill matrix")


def _waivers(body: Mapping[str, Any]) -> Iterator[str]:
    status = {entry["id"]: entry["status"] for entry in [*body.get("kit", ()), *body["cases"]]}
    for waiver in body["waivers"]:
        pattern, matched = waiver.get("case"), waiver.get("matched") or []
        for case_id in matched:
            if not isinstance(pattern, str) or not fnmatch.fnmatchcase(str(case_id), pattern):
                yield f"waivers: {pattern!r} is recorded to match {case_id!r}, which it does not"
            elif status.get(case_id) != "waived":
                yield f"waivers: {pattern!r} waived {case_id!r}, whose status is {status.get(case_id)!r}"


def _devices(body: Mapping[str, Any]) -> Iterator[str]:
    """Where each row says that it ran; rows of certificates from before they did say nothing."""
    header = body["environment"].get("device")
    ran = [entry for entry in body["cases"] if entry["status"] in ("pass", "fail", "waived")]
    named = [entry for entry in ran if "device" in entry]
    for entry in named:
        if entry["device"] != header:
            yield _differs(f"environment.device (case {entry['id']!r})", header, entry["device"], "the row")
    if named and len(named) < len(ran):
        lost = next(entry["id"] for entry in ran if "device" not in entry)
        yield f"case {lost!r} does not say on which device it ran, where others do"


def _build(body: Mapping[str, Any]) -> Iterator[str]:
    """What is said of the compiled library, against the machine that is named; a backend that compiles must say it."""
    backend, environment = body["backend"], body["environment"]
    build = backend.get("build")
    if not isinstance(build, Mapping):
        if backend.get("factory") in COMPILED:
            yield f"backend.build is {build!r}, but {backend.get('factory')!r} runs a library that it compiles"
        return
    if backend.get("factory") in COMPILED and (lost := [name for name in BUILD if not build.get(name)]):
        yield f"backend.build has no {', '.join(lost)}, so it does not say which library ran"
    library = build.get("library")
    if library is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", str(library)):
        yield f"backend.build.library is {library!r}, which is no SHA-256"
    machine = build.get("machine")
    if isinstance(machine, list) and "machine" in environment:
        named = [environment.get("system"), environment.get("machine")]
        if machine[:2] != named:
            yield _differs("backend.build.machine", machine[:2], named, "environment.system and environment.machine")


def _entry(
    body: Mapping[str, Any], entry: Mapping[str, Any], case: Case, claimed: Capabilities | None
) -> Iterator[str]:
    if entry.get("clause") != list(case.clause):
        yield _differs("clause", entry.get("clause"), list(case.clause), "the catalogue")
    broken = entry.get("broken")
    if broken is not None and broken not in CLAUSES:
        yield f"broken is {broken!r}, which is no clause of docs/semantics.md"
    if entry["status"] in ("fail", "waived") and broken is None:
        yield f"is {entry['status']!r} and names no broken clause"
    if entry["status"] == "not-claimed" and (entry["elements"] or entry.get("output") is not None):
        yield "is 'not-claimed', but has elements or an output"
    if entry["status"] != "pass":
        return
    need = 1
    for size in (case.params.get("mesh") or {}).values():
        need *= size
    devices = body["environment"].get("devices")
    if isinstance(devices, int) and need > devices:
        yield f"is 'pass' on a mesh of {need} devices, but environment.devices is {devices}"
    if case.tier == 1 and case.expected is not None and claimed is not None and case.params.get("mesh") is None:
        yield from _movement(entry, case, claimed)


def _movement(entry: Mapping[str, Any], case: Case, claimed: Capabilities) -> Iterator[str]:
    """A movement that passed has exactly one possible result, which can be derived without a backend."""
    from conformance.judge import judge_move

    problem = generate(case, claimed.poison).problem
    if not isinstance(problem, MoveProblem):
        return
    due = judge_move(problem, problem.expected_keys, problem.expected_values, storage=claimed.pool_storage)
    for field in ("elements", "decided", "output"):
        if entry.get(field) != getattr(due, field):
            yield _differs(field, entry.get(field), getattr(due, field), "the generated case")


def check(
    body: Mapping[str, Any], catalogue: Catalogue, claimed: Capabilities | None, suite: Suite | None = None
) -> list[str]:
    """`contradictions` of a body whose catalogue this suite knows."""
    known = catalogue.at(body["suite"].get("catalogue"))
    cases = {} if known is None else {case.id: case for case in known.cases}
    version = body["suite"].get("catalogue_version")
    problems = []
    if known is not None and version not in (None, known.version):
        problems.append(_differs("suite.catalogue_version", version, known.version, "suite.catalogue"))
    return problems + contradictions(body, cases, claimed, suite)


def here_and_there(body: Mapping[str, Any], introduction: Mapping[str, Any], suite: Mapping[str, Any]) -> list[str]:
    """How a certificate's claims, backend, machine and suite differ from those of a run here, field by field."""
    out = []
    pairs = [(name, body[name], introduction[name]) for name in ("claims", "backend", "environment")]
    then, now = ({name: said.get(name) for name in ("sources", "version")} for said in (body["suite"], suite))
    pairs.append(("suite", then, now))
    for section, recorded, now in pairs:
        recorded, now = _builds_apart(recorded), _builds_apart(now)
        for field in sorted(set(recorded) | set(now)):
            if recorded.get(field) != now.get(field):
                out.append(f"{section}.{field}: {_moved(recorded.get(field), now.get(field))}")
    return out


def builds(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """How what one body says of a backend's compiled library differs from another's, field by field."""
    then, now = (_builds_apart({"build": body["backend"].get("build")}) for body in (before, after))
    fields = sorted(set(then) | set(now))
    return [f"backend.{f}: {_moved(then.get(f), now.get(f), 'was', 'is')}" for f in fields if then.get(f) != now.get(f)]


def _builds_apart(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the fields of `build`, if it has any, beside the others."""
    build = section.get("build")
    if not isinstance(build, Mapping):
        return {name: value for name, value in section.items() if name != "build" or value is not None}
    rest = {name: value for name, value in section.items() if name != "build"}
    return rest | {f"build.{name}": value for name, value in build.items()}


def _moved(then: Any, now: Any, said: str = "it says", here: str = "here it is") -> str:
    """Two values; of two lists only what they do not share."""
    if isinstance(then, list) and isinstance(now, list) and all(isinstance(x, str) for x in [*then, *now]):
        gone, come = [x for x in then if x not in now], [x for x in now if x not in then]
        if gone or come:
            return f"{said} {', '.join(gone) or 'nothing more'}, {here} {', '.join(come) or 'nothing more'}"
    return f"{said} {then!r}, {here} {now!r}"
