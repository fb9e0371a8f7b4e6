"""pytest plugin: `pytest --pyargs conformance --backend NAME [-n 8] [--certificate cert.json]`.

Inert without `--backend`: no jax is imported, no option of jax is changed, nothing is collected. With it, one test is
parametrised over the catalogue, its ids being case ids. Results travel in `report.user_properties`, which pytest-xdist
forwards; only the controller writes the certificate, and refuses to if a case has no result or two.

Under pytest-xdist use its default distribution (`--dist load`); a worker that dies or hangs past the deadline gives
exactly one `error`, and the session goes on without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROPERTY = "paged-conformance"
TEST_FILE = "test_backend.py"
FIXTURE = "conformance_case"


def pytest_addoption(parser: Any) -> None:
    """Options; `--paged-backend` is the same as `--backend`, for projects where that name is taken."""
    group = parser.getgroup("paged-conformance", "certify a backend of paged")
    backend = {"default": None, "metavar": "NAME", "dest": "paged_backend", "help": "backend to certify"}
    try:
        group.addoption("--backend", "--paged-backend", **backend)
    except ValueError:
        group.addoption("--paged-backend", **backend)
    group.addoption(
        "--conformance-level", default="all", metavar="LEVEL", help="move, core, sharded, serving, all or long"
    )
    group.addoption(
        "--conformance-quick", action="store_true", help="something of everything the backend claims; certifies nothing"
    )
    group.addoption(
        "--conformance-only", default=None, metavar="GLOB", help="cases whose id matches; certifies nothing"
    )
    group.addoption("--conformance-catalogue", default=None, metavar="DIR", help="other cases; certifies nothing")
    group.addoption("--conformance-option", action="append", default=[], metavar="NAME=VALUE", help="for the backend")
    group.addoption("--conformance-executor", default=None, metavar="NAME", help="who executes a vendor's targets")
    group.addoption("--conformance-executor-option", action="append", default=[], metavar="NAME=VALUE")
    group.addoption("--conformance-deadline", type=float, default=120.0, metavar="SECONDS", help="for each case")
    group.addoption("--conformance-waivers", default=None, metavar="TOML", help="file of waivers")
    group.addoption("--certificate", default=None, metavar="JSON", help="write a certificate here")


def pytest_configure(config: Any) -> None:
    """With `--backend`: eight virtual CPU devices before the first one is touched, and the run's hooks."""
    if config.getoption("paged_backend", None) is None:
        return
    from conformance.worker import prepare_jax

    prepare_jax()
    run = Run(config)
    config.pluginmanager.register(run, "paged-conformance-run")
    if hasattr(config.hook, "pytest_testnodedown"):  # a hook that only xdist knows
        config.pluginmanager.register(_Nodes(run), "paged-conformance-nodes")


def pytest_ignore_collect(collection_path: Path, config: Any) -> bool | None:
    """The suite's own test file is nothing without a backend."""
    if collection_path.name == TEST_FILE and collection_path.parent == Path(__file__).parent:
        return True if config.getoption("paged_backend", None) is None else None
    return None


class Run:
    """Hooks of one certifying session, in the controller, in a worker, or in a process that is both."""

    def __init__(self, config: Any):
        import fnmatch

        from conformance.catalogue import load
        from conformance.options import parse

        self.config = config
        self.backend_name: str = config.getoption("paged_backend")
        self.level: str = config.getoption("--conformance-level")
        self.deadline: float = config.getoption("--conformance-deadline")
        self.options = parse(config.getoption("--conformance-option"))
        self.executor_name: str | None = config.getoption("--conformance-executor")
        self.executor_options = parse(config.getoption("--conformance-executor-option"))
        self._executor: Any = None
        directory = config.getoption("--conformance-catalogue")
        self.catalogue = load(None if directory is None else Path(directory))
        only, quick = config.getoption("--conformance-only"), config.getoption("--conformance-quick")
        cases = self.catalogue.select(self.level)
        if only is not None:
            cases = tuple(c for c in cases if fnmatch.fnmatchcase(c.id, only))
        self._cases, self.quick = cases, quick
        self.complete = not quick and only is None and directory is None
        self.is_worker = hasattr(config, "workerinput")
        self.introductions: list[dict[str, Any]] = []
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.refusal: str | None = None
        self._session: Any = None
        self._made: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        """Compile what the backend runs, once and before any case's deadline begins; end with 2 if that fails."""
        import pytest

        from conformance.environment import prepare
        from paged.common.errors import PagedError

        if self.is_worker or self.executor_name is not None or self.config.getoption("collectonly"):
            return
        try:
            prepare(self._backend())
        except PagedError as error:
            pytest.exit(f"{self.backend_name}: {error}", returncode=2)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test per case, those that share programs next to each other."""
        if FIXTURE in metafunc.fixturenames:
            from conformance.catalogue import by_program

            order = by_program(self.selected(self._backend().capabilities) if self.quick else self._cases)
            metafunc.parametrize(FIXTURE, order, ids=[case.id for case in order])

    def selected(self, declared: Any) -> Any:
        """The cases of the run; with `--conformance-quick` they depend on what is declared."""
        from conformance import quick

        return quick.select(self._cases, declared) if self.quick else self._cases

    def run(self, case: Any) -> Any:
        """The case's `Result`; past the deadline a worker of xdist ends, a lone process reports an `error`."""
        import dataclasses
        import faulthandler
        import time

        from conformance.case import DEVICE, Result
        from conformance.environment import current_device, prepare
        from conformance.runner import Session

        if self._session is None:
            backend = self._backend()
            prepare(backend)
            self._session = Session(backend)
        begin = time.monotonic()
        if self.is_worker:
            faulthandler.dump_traceback_later(self.deadline, exit=True)
        try:
            result = self._session.run(case)
            where = current_device().device_kind
            result = dataclasses.replace(result, details={**result.details, DEVICE: where})
        finally:
            if self.is_worker:
                faulthandler.cancel_dump_traceback_later()
        if time.monotonic() - begin > self.deadline:
            late = f"no result within {self.deadline:g} s (--conformance-deadline)"
            return Result(id=case.id, status="error", diagnosis=late)
        return result

    def _backend(self) -> Any:
        """The backend, made once, its targets served by the executor, which is started first."""
        from conformance.executors import make_executor
        from paged.backends.registry import get_backend

        if self._made is None:
            given: dict[str, Any] = {}
            if self.executor_name is not None:
                self._executor = make_executor(self.executor_name, self.backend_name, self.executor_options)
                given = dict(self._executor.start())
            self._made = get_backend(self.backend_name, **{**self.options, **given})
        return self._made

    def introduce(self) -> dict[str, Any]:
        """What the certificate says of backend and environment; known where the cases ran."""
        from conformance.environment import introduce
        from paged.backends.registry import list_backends

        name = self.backend_name
        backend = self._backend() if self._session is None else self._session.backend
        return introduce(backend, name, list_backends()[name], self._executor)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take a case's result, or an `error` for a case whose worker died or whose test broke."""
        case_id = report.nodeid.partition("[")[2].rpartition("]")[0]
        if self.is_worker or TEST_FILE not in report.nodeid or not case_id:
            return
        found = [json.loads(value) for name, value in report.user_properties if name == PROPERTY]
        if report.when == "call" and found:
            self.results.setdefault(case_id, []).extend(found)
        elif report.failed and not found:
            text = str(report.longrepr).strip().splitlines()
            lost = {"id": case_id, "status": "error", "diagnosis": text[-1] if text else "the test gave no result"}
            self.results.setdefault(case_id, []).append(lost)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """A worker tells the controller where it ran; the controller writes the certificate."""
        if self.is_worker:
            if self._session is not None:
                self.config.workeroutput[PROPERTY] = json.dumps(self.introduce())
            return
        path = self.config.getoption("--certificate")
        if path is None or self.config.getoption("collectonly"):
            return
        refusal = self._write(Path(path))
        if refusal is not None:
            self.refusal = refusal
            session.exitstatus = 2

    def _write(self, path: Path) -> str | None:
        """Write the certificate; a sentence if that must not be done."""
        from conformance import assemble, certificate, kits
        from conformance.journal import result_from_json
        from paged.common.errors import InvalidInputError

        if self.backend_name in kits.KITS:
            return f"a certificate of {self.backend_name!r} holds its kit's checks: paged certify {self.backend_name}"
        if not self.introductions and self._session is not None:
            self.introductions.append(self.introduce())
        if not self.introductions:
            return "no worker lived long enough to say where it ran"
        if any(said != self.introductions[0] for said in self.introductions):
            return "the workers ran in different environments"
        declared = certificate.declared(self.introductions[0]["claims"])
        if declared is None:
            return "what the backend claims is no declaration"
        try:
            data = assemble.certificate(
                self.catalogue,
                self.selected(declared),
                [result_from_json(r) for found in self.results.values() for r in found],
                level=self.level,
                complete=self.complete,
                introduction=self.introductions[0],
                waiver_file=self.config.getoption("--conformance-waivers"),
            )
        except InvalidInputError as error:
            return str(error)
        path.write_text(assemble.to_text(data))
        return None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The verdict, or why there is no certificate."""
        path = self.config.getoption("--certificate")
        if path is None:
            return
        terminalreporter.section("paged conformance")
        if self.refusal is not None:
            terminalreporter.line(f"no certificate was written: {self.refusal}", red=True)
        elif Path(path).exists():
            body = json.loads(Path(path).read_text())["body"]
            from conformance.certificate import summary

            terminalreporter.line(f"{self.backend_name}: {summary(body)}; written to {path}")


class _Nodes:
    """What the workers of xdist say when they end."""

    def __init__(self, run: Run):
        self._run = run

    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """A worker has ended; one that died has nothing to say."""
        said = getattr(node, "workeroutput", {}).get(PROPERTY)
        if said is not None:
            self._run.introductions.append(json.loads(said))
