"""What `paged certify` does. Runs no jax itself: backends run in a worker process."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import paged
from conformance import assemble, derived, junit, killmatrix, kits, listing, quick, signature
from conformance import certificate as certificates
from conformance.canonical import digest
from conformance.case import Result
from conformance.catalogue import Catalogue, by_program, case_to_json, load, parse_case
from conformance.executors import NATIVE
from conformance.journal import Journal
from conformance.options import parse
from conformance.progress import Progress
from conformance.shrink import MAX_RUNS
from conformance.supervisor import BackendRefusedError, Job, Worker, cache_directory, supervise
from paged.common.errors import InvalidInputError


def certify(args: argparse.Namespace) -> int:
    """Do what the arguments of `paged certify` ask for; the exit status."""
    if args.json and not args.list:
        raise InvalidInputError("--json is the form of --list; give both, or -o for a certificate.")
    modes = [name for name in ("list", "check", "diff", "replay", "case", "mutants") if getattr(args, name)]
    if len(modes) > 1:
        raise InvalidInputError(f"--{modes[0]} and --{modes[1]} are different things to do; give one of them.")
    if not modes or modes[0] in ("case", "mutants"):
        if args.backend is None:
            raise InvalidInputError("name a backend, e.g. `paged certify reference`.")
    elif args.backend is not None and modes[0] != "replay":
        raise InvalidInputError(f"--{modes[0]} takes no backend; got {args.backend!r}.")
    action = {"list": _list, "check": _check, "diff": _diff, "replay": _replay, "case": _case, "mutants": _mutants}
    try:
        return action[modes[0]](args) if modes else _run(args)
    except BackendRefusedError as error:
        _say(f"{args.backend}: {error.verdict}: {error}")
        return certificates.VERDICTS[error.verdict]
    except OSError as error:
        raise InvalidInputError(f"{error.filename}: {error.strerror}") from None


def _run(args: argparse.Namespace) -> int:
    catalogue = load(args.catalogue)
    executor = _executor(args)
    lowering = executor == "lowering-only"
    level = "lowering" if lowering else args.level
    cases = () if lowering else catalogue.select(level)
    kit = tuple(c.as_case() for c in kits.select(args.backend, executor or "", large=args.large_pools))
    if args.only is not None:
        cases, kit = (tuple(c for c in some if fnmatch.fnmatchcase(c.id, args.only)) for some in (cases, kit))
    if not cases and not kit:
        raise InvalidInputError(f"no case of level {args.level!r} matches {args.only!r}.")
    for path in (args.output, args.html, args.junit):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidInputError(f"{path}: its folder does not exist.")
    baseline = None if args.baseline is None else _read(args.baseline)
    if args.html is not None:
        _require_jinja()
    if args.sign is not None:
        signature.private_key(args.sign)  # a key that cannot sign is told before the run, not after it
    complete = not args.quick and args.only is None and args.catalogue is None

    def jobs(introduction: Mapping[str, Any]) -> list[Job]:
        nonlocal cases
        declared = certificates.declared(introduction["claims"])
        if args.quick and declared is not None:
            cases = quick.select(cases, declared)
        return [Job(c.id, c, kit=True) for c in kit] + [Job(c.id, c) for c in by_program(cases)]

    introduction, results = _execute(args, catalogue, jobs)
    data = assemble.certificate(
        catalogue,
        cases,
        list(results.values()),
        kit=kit,
        level=level,
        complete=complete,
        introduction=introduction,
        waiver_file=args.waivers,
        mutants=recorded_mutants(catalogue),
    )
    if args.sign is not None:
        data = signature.sign(data, args.sign)
    _write(args, data, results)
    _report(args, data)
    if args.repro is not None:
        _reproduce(args, catalogue, data)
    status = certificates.exit_status(data["body"])
    if baseline is not None:
        found = certificates.diff(baseline["body"], data["body"])
        _print_builds(baseline["body"], data["body"])
        _print_difference(found)
        status = max(status, 1 if found.regressions else 0)
    return status


def _list(args: argparse.Namespace) -> int:
    """The cases of a level on stdout; nothing is run. With `--quick`, of those marked so."""
    cases = load(args.catalogue).select(args.level, quick=args.quick)
    if args.only is not None:
        cases = tuple(c for c in cases if fnmatch.fnmatchcase(c.id, args.only))
    if not cases:
        raise InvalidInputError(f"no case of level {args.level!r} matches {args.only!r}.")
    print(listing.as_json(cases) if args.json else listing.as_text(cases))
    return 0


def _execute(
    args: argparse.Namespace,
    catalogue: Catalogue,
    jobs: Sequence[Job] | Callable[[Mapping[str, Any]], Sequence[Job]],
    what: Any = "",
    told: Sequence[str] = ("fail", "error"),
) -> tuple[dict[str, Any], dict[str, Result]]:
    """Introduction and results of some jobs, resumed from the journal of a run that was interrupted.

    `jobs` may be a function of the introduction: which cases are run may depend on what is claimed.
    `what` tells runs apart in which equal keys mean different things; text is shown before the progress.
    """
    request: dict[str, Any] = {"backend": args.backend, "device": args.device, "options": parse(args.option)}
    if (executor := _executor(args)) is not None:
        request["executor"] = {"name": executor, "options": parse(args.executor_option)}
    worker = Worker(request)
    try:
        return _supervised(args, catalogue, worker, request, jobs, what, told)
    finally:
        worker.close()


def _supervised(
    args: argparse.Namespace,
    catalogue: Catalogue,
    worker: Worker,
    request: Mapping[str, Any],
    jobs: Sequence[Job] | Callable[[Mapping[str, Any]], Sequence[Job]],
    what: Any,
    told: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Result]]:
    if callable(jobs):
        jobs = jobs(worker.introduction)
    key = digest([worker.introduction, catalogue.digest, request, _suite_sources(), what])
    path = cache_directory() / "journals" / f"{args.backend}-{key[7:23]}.jsonl"
    progress = Progress(len(jobs), sys.stderr, label=what if isinstance(what, str) else "", told=told)
    with Journal(path, key, fresh=args.fresh) as journal:
        if journal.results:
            progress.note(f"resuming: {len(journal.results)} results are in {journal.path}")
        try:
            results = supervise(
                worker, request, jobs, deadline=_deadline(args, jobs), journal=journal, progress=progress
            )
        except KeyboardInterrupt as stopped:
            stopped.add_note(
                f"{progress.done} of {progress.total} results are kept in {journal.path}, "
                f"{progress.total - progress.done} are left; the same command goes on from there; nothing else "
                f"was written"
            )
            raise
        finally:
            progress.close()
        journal.discard()
    return worker.introduction, results


def _executor(args: argparse.Namespace) -> str | None:
    """Who executes the backend's FFI targets; None for a backend that has none of a vendor."""
    if args.executor is None and args.executor_option:
        raise InvalidInputError("--executor-option belongs to an executor; name one with --executor.")
    if args.executor is not None and args.backend not in kits.KITS:
        raise InvalidInputError(
            f"executors serve the targets of {', '.join(kits.KITS)}; {args.backend!r} has none. Leave --executor out."
        )
    return args.executor or (NATIVE if args.backend in kits.KITS else None)


def _deadline(args: argparse.Namespace, jobs: Sequence[Job]) -> float:
    """Seconds for one job; making a case smaller is many runs of one."""
    return args.deadline * (MAX_RUNS if any(job.shrink for job in jobs) else 1)


def _suite_sources() -> str:
    from conformance.environment import describe_suite

    return describe_suite("", "", "")["sources"]


def _write(args: argparse.Namespace, data: Mapping[str, Any], results: Mapping[str, Result]) -> None:
    if args.output is not None:
        _replace(args.output, assemble.to_text(data))
    if args.html is not None:
        from conformance.page import render

        _replace(args.html, render(data, matrix=_matrix(data)))
    if args.junit is not None:
        seconds = {key: float(r.details.get(assemble.SECONDS, 0.0)) for key, r in results.items()}
        entries = certificates.entries(data["body"])
        _replace(args.junit, junit.render(entries, name=f"paged.{args.backend}", seconds=seconds))


def _reproduce(args: argparse.Namespace, catalogue: Catalogue, data: Mapping[str, Any]) -> None:
    """A `repro.json` for every failure, as small as it gets, and for every error as it is."""
    args.repro.mkdir(parents=True, exist_ok=True)
    # A check of a kit has no parameters to make smaller; `--only` with its id runs it alone.
    bad = {e["id"]: e for e in data["body"]["cases"] if e["status"] in ("fail", "error")}
    jobs = [Job(i, catalogue.case(i), shrink=e["broken"]) for i, e in bad.items() if e["broken"]]
    smallest = _execute(args, catalogue, jobs, what="shrinking ", told=("error",))[1] if jobs else {}
    for case_id in bad:
        found = smallest.get(case_id)
        case = case_to_json(catalogue.case(case_id))
        if found is not None and found.status == "fail":
            case = found.details["case"]
        _replace(args.repro / (case_id.replace("/", "--") + ".json"), json.dumps(case, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def _report(args: argparse.Namespace, data: Mapping[str, Any]) -> None:
    body = data["body"]
    print(f"{args.backend}: {certificates.summary(body)}")
    for waiver in body["waivers"]:
        if waiver["problem"]:
            print(f"waiver {waiver['case']!r} is {waiver['problem']}: remove it or correct it")
    if not body["complete"]:
        print("it certifies nothing: a part was run")
    elif body["verdict"] == "conformant" and not body["certifies"]:
        print(f"it certifies nothing: the suite's tree is {body['suite']['tree']}")


def _case(args: argparse.Namespace) -> int:
    """One case from a file: the result, printed as JSON."""
    try:
        entry = json.loads(args.case.read_text("utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{args.case} is not JSON: {error}") from None
    case = parse_case(entry, args.case.name)
    _, results = _execute(args, load(), [Job(case.id, case)], what=case_to_json(case))
    result = results[case.id]
    print(json.dumps({**vars(assemble.without_seconds(result)), "details": dict(result.details)}, indent=1))
    return {"fail": 1, "error": 2, "not-claimed": 3}.get(result.status, 0)


def _mutants(args: argparse.Namespace) -> int:
    """Every mutant on the cases that list it; each must be caught by each of them, and named for what it breaks."""
    from conformance.mutants import MUTANTS, verdicts

    catalogue = load(args.catalogue)
    jobs = [
        Job(f"{name}|{case.id}", case, name)
        for name in MUTANTS
        for case in by_program(catalogue.select("all"))
        if name in case.kills and (args.only is None or fnmatch.fnmatchcase(name, args.only))
    ]
    if not jobs:
        raise InvalidInputError(f"no case lists a mutant that matches {args.only!r}.")
    names = [n for n in MUTANTS if args.only is None or fnmatch.fnmatchcase(n, args.only)]
    _, results = _execute(args, catalogue, jobs, what="mutants ", told=("error",))
    found = verdicts(names, [(job.mutant or "", job.case, results[job.key]) for job in jobs])
    for name, faults in found.items():
        for fault in faults:
            print(f"{name}: {fault}")
    runs = [(job.mutant or "", job.case, results[job.key]) for job in jobs]
    record = killmatrix.record(catalogue, runs, found)
    print(killmatrix.text(record))
    print(f"caught {record['caught']}/{len(found)}")
    if args.output is not None:
        _replace(args.output, json.dumps(record, indent=1) + "\n")
    return 0 if record["caught"] == len(found) else 1


def this_suite() -> derived.Suite:
    """What this suite knows of itself, for checking what a certificate says of the suite that made it."""
    from conformance.mutants import MUTANTS

    found = killmatrix.read() or {}
    recorded = f"{found.get('caught')}/{found.get('mutants')}" if found else None
    return derived.Suite(sources=_suite_sources(), mutants=len(MUTANTS), recorded=recorded)


def recorded_mutants(catalogue: Catalogue) -> str | None:
    """ "caught/all" of the recorded run over exactly this catalogue, else None."""
    found = killmatrix.recorded(catalogue)
    return None if found is None else f"{found['caught']}/{found['mutants']}"


def _matrix(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The recorded kill matrix, if it is that of the suite which made the certificate."""
    catalogue = load()
    found = killmatrix.recorded(catalogue)
    said = data["body"]["suite"]
    if found is None or said.get("catalogue") != catalogue.digest:
        return None
    return found if said.get("mutants") == f"{found['caught']}/{found['mutants']}" else None


def _check(args: argparse.Namespace) -> int:
    data = _read(args.check)
    problems = certificates.check(data, load(), this_suite())
    if args.public_key is not None:
        problems += signature.problems(data, args.public_key)
    body = data["body"]
    for problem in problems:
        print(f"{args.check}: {problem}")
    if args.html is not None:
        _require_jinja()
        from conformance.page import render

        _replace(args.html, render(data, problems, matrix=_matrix(data)))
    if problems:
        print(f"{args.check}: not sound ({len(problems)} problems)")
        return 1
    if args.sign is not None:
        if args.output is None:
            raise InvalidInputError("--check with --sign needs --output, the file to write the signed certificate to.")
        _replace(args.output, assemble.to_text(signature.sign(data, args.sign)))
        print(f"{args.output}: signed")
    if (by := signature.described(data["envelope"])) is not None:
        print(
            f"{args.check}: signed by {by}" + (", verified" if args.public_key else "; not verified: give --public-key")
        )
    if body["suite"].get("catalogue") != load().digest:
        print(f"{args.check}: made before cases were added to the catalogue; it is checked against those of its time")
    print(f"{args.check}: sound; {body['backend'].get('entry_point')}: {certificates.summary(body)}")
    if not certificates.VERDICTS[body["verdict"]] and not body["certifies"]:
        print("it certifies nothing: a part of the level was run")
        return 3
    return certificates.VERDICTS[body["verdict"]]


def _diff(args: argparse.Namespace) -> int:
    old, new = (_read(path) for path in args.diff)
    found = certificates.diff(old["body"], new["body"])
    for path, data, sign in zip(args.diff, (old, new), "-+"):
        print(f"{sign} {path}: {certificates.identity(data['body'])}")
    _print_builds(old["body"], new["body"])
    _print_difference(found)
    return 1 if found else 0


def _print_builds(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """That another library ran, if one did. It is no difference by itself: bits may be the same."""
    for line in derived.builds(old, new):
        print(f"another build: {line}")


def _print_difference(found: certificates.Difference) -> None:
    if not found:
        print("no difference")
    if found.verdict:
        print(f"verdict: {found.verdict[0]} -> {found.verdict[1]}")
    for claim, (old, new) in found.claims.items():
        print(f"claim {claim}: {old} -> {new}")
    for case_id, (before, after) in found.status.items():
        print(f"{case_id}: {before or 'absent'} -> {after or 'absent'}")
    for case_id in found.bits:
        print(f"{case_id}: bits moved")


def _replay(args: argparse.Namespace) -> int:
    """Run N random cases of a certificate again: status, counts, output and bits must be what it says. Claims,
    numerics, versions, device and flags of this machine are compared too; 3 where nothing else differs."""
    count, path = args.replay
    if not count.isdigit() or int(count) < 1:
        raise InvalidInputError(f"--replay takes a number of cases and a certificate, got {count!r}.")
    data, catalogue = _read(Path(path)), load()
    body = data["body"]
    args.backend = args.backend or body["backend"].get("entry_point")
    args.executor = args.executor or body["environment"].get("executor", {}).get("name")
    then = catalogue.at(body["suite"].get("catalogue"))
    if then is None:
        raise InvalidInputError(f"{path} was made with another catalogue; replay it with the suite that made it.")
    known = {case.id: case for case in then.cases}
    entries = [e for e in body["cases"] if e["status"] != "not-claimed" and e["id"] in known]
    picked = secrets.SystemRandom().sample(entries, min(int(count), len(entries)))
    jobs = [Job(e["id"], known[e["id"]]) for e in picked]
    introduction, results = _execute(args, catalogue, jobs, what="replay ")
    from conformance.environment import describe_suite

    other = derived.here_and_there(body, introduction, describe_suite(paged.__version__, "", ""))
    for line in other:
        print(line)
    wrong = 0
    for entry in picked:
        again = replayed(assemble.without_seconds(results[entry["id"]]), entry)
        if again:
            wrong += 1
            print(f"{entry['id']}: {again}")
    print(f"replayed {len(picked)} cases, {wrong} differ")
    if wrong or any(line.startswith(("claims.", "backend.numerics")) for line in other):
        return 1
    if other:
        print("the results are the same here, the backend's versions or the machine are not those of the certificate")
    return 3 if other else 0


def replayed(result: Result, entry: Mapping[str, Any]) -> str | None:
    """What a result says otherwise than a certificate's row."""
    status = "waived" if entry["status"] == "waived" and result.status == "fail" else result.status
    if status != entry["status"]:
        return f"it says {entry['status']}, now {status}: {result.diagnosis}"
    for name in ("elements", "decided"):
        if getattr(result, name) != entry[name]:
            return f"it says {name} {entry[name]}, now {getattr(result, name)}"
    if result.output != entry["output"]:
        return f"it says output {entry['output']}, now {result.output}"
    then, now = (x.get("details", {}).get("bits") for x in (entry, {"details": result.details}))
    if then != now:
        return f"it says bits {then}, now {now}"
    return None


def _read(path: Path) -> dict[str, Any]:
    return certificates.read(path.read_text("utf-8"), str(path))


def _require_jinja() -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise InvalidInputError("--html needs jinja2: install paged[certify].") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr)
