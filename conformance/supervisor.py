"""Runs jobs in a worker process and outlives it: a crash or a hang costs one case, never the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.case import Case, Result
from conformance.catalogue import case_to_json
from conformance.journal import MAX_DEATHS, Journal, result_from_json
from conformance.progress import Progress
from paged.common.errors import PagedError

STARTUP_SECONDS = 180.0
LOG_TAIL_BYTES = 2000
LOG_READ_BYTES = 1 << 16


class BackendRefusedError(PagedError):
    """The worker could not make the backend; `verdict` is `"error"` or `"not certifiable"`."""

    def __init__(self, message: str, verdict: str):
        super().__init__(message)
        self.verdict = verdict


class WorkerStartError(PagedError):
    """The worker died or hung before it could name the backend."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One case on the backend, or on a named mutant of it. `key` is unique in a run.

    With `kit`, `key` names a check of the backend's kit, and `case` only says how it is judged.
    With `shrink`, the clause of a known failure, the result is that of the smallest case that still fails with it,
    and its detail `case` is that case.
    """

    key: str
    case: Case
    mutant: str | None = None
    shrink: str | None = None
    kit: bool = False

    def to_json(self) -> dict[str, Any]:
        """The job as the worker reads it."""
        if self.kit:
            return {"key": self.key, "kit": True}
        return {"key": self.key, "case": case_to_json(self.case), "mutant": self.mutant, "shrink": self.shrink}


def cache_directory() -> Path:
    """Where compiled programs and journals are kept between runs: `$XDG_CACHE_HOME/paged`, else `~/.cache/paged`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "paged"


def worker_environment() -> dict[str, str]:
    """The environment with a persistent compilation cache, unless one is already configured."""
    env = dict(os.environ)
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_directory() / "xla"))
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    return env


class Worker:
    """One worker process and the messages that come from it."""

    def __init__(self, request: Mapping[str, Any]):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "conformance.worker"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write_end,),
            env=worker_environment(),
            start_new_session=True,
        )
        os.close(write_end)
        self._read_end = read_end
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_end, selectors.EVENT_READ)
        self._buffer = b""
        self._tell({**request, "reply": write_end})
        self.introduction = self._hello()

    def _tell(self, line: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            self.process.stdin.flush()

    def give(self, jobs: Sequence[Job]) -> None:
        """Hand over the jobs, once."""
        self._tell([job.to_json() for job in jobs])

    def _hello(self) -> dict[str, Any]:
        """What the backend says of itself and of where it runs. On any other answer the process is closed."""
        try:
            message = self.message(STARTUP_SECONDS)
            if message is None:
                raise WorkerStartError(f"the process died while making the backend: {self.obituary()}")
            if message["kind"] == "refused":
                raise BackendRefusedError(message["message"], message["verdict"])
        except TimeoutError:
            self.close()
            raise WorkerStartError(f"the backend was not ready within {STARTUP_SECONDS:g} s.") from None
        except BaseException:
            self.close()
            raise
        return message["introduction"]

    def message(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None once the worker is gone. Raises `TimeoutError` if none comes in time."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, end - time.monotonic())):
                raise TimeoutError
            chunk = os.read(self._read_end, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def obituary(self) -> str:
        """How the process ended and the last of what it printed."""
        code = self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_READ_BYTES))
        text = self._log.read()
        # The interpreter's dump of all stacks is long; what the kernel printed before it says more.
        said, dump, stacks = text.rpartition(b"Fatal Python error")
        tail = (said if dump else text)[-LOG_TAIL_BYTES:] + dump + stacks.partition(b"\n")[0] * bool(dump)
        printed = tail.decode(errors="replace").strip()
        return f"{how}; it printed last: {printed}" if printed else how

    def close(self) -> None:
        """End the process, its children included, and release what it held. A second call does nothing."""
        if self._log.closed:
            return
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._selector.close()
        os.close(self._read_end)
        self._log.close()


def supervise(
    worker: Worker,
    request: Mapping[str, Any],
    jobs: Sequence[Job],
    *,
    deadline: float,
    journal: Journal,
    progress: Progress,
) -> dict[str, Result]:
    """One result for each job, by key; those in the journal are not run again.

    - `worker`: started with `request`, and has no jobs yet; it is closed here, and others take its place if it dies.
    - `deadline`: seconds that one job may take, compilation included; past it the worker is killed and the job is an
      `error`. A worker that dies is started again; a case that kills it twice is an `error`.
    """
    pending = [job for job in jobs if job.key not in journal.results]
    progress.known(len(jobs) - len(pending))
    for job in list(pending):
        if journal.deaths.get(job.key, 0) >= MAX_DEATHS:
            died = Result(id=job.key, status="error", diagnosis="the process died while it ran, more than once")
            _settle(pending, journal, progress, died)
    try:
        while pending:
            worker.give(pending)
            _serve(worker, pending, deadline, journal, progress)
            worker.close()
            if pending:
                worker = Worker(request)
    finally:
        worker.close()
    return {job.key: journal.results[job.key] for job in jobs}


def _serve(worker: Worker, pending: list[Job], deadline: float, journal: Journal, progress: Progress) -> None:
    """Take results until the worker is done, dead or too slow; `pending` keeps what is left to do."""
    running: str | None = None
    begin = time.monotonic()
    try:
        while (message := worker.message(max(0.0, begin + deadline - time.monotonic()))) is not None:
            if message["kind"] == "start":
                running, begin = str(message["key"]), time.monotonic()
                journal.start(running)
                progress.start(running)
            elif message["kind"] == "result":
                result = result_from_json(message["result"] | {"id": message["key"]})
                spent = {**result.details, "seconds": round(time.monotonic() - begin, 3)}
                _settle(pending, journal, progress, dataclasses.replace(result, details=spent))
                running, begin = None, time.monotonic()
            else:
                return
        how = worker.obituary()
        if running is None:
            raise WorkerStartError(f"the process died between two cases: {how}")
        journal.deaths[running] = journal.deaths.get(running, 0) + 1
        if journal.deaths[running] < MAX_DEATHS:
            progress.note(f"the process died during {running} ({how}); trying it once more")
        else:
            died = Result(id=running, status="error", diagnosis=f"the process died while it ran: {how}")
            _settle(pending, journal, progress, died)
    except TimeoutError:
        late = f"no result within {deadline:g} s (--deadline)"
        _settle(pending, journal, progress, Result(id=running or pending[0].key, status="error", diagnosis=late))
    except KeyboardInterrupt:
        if running is not None:
            journal.forgive(running)
        raise


def _settle(pending: list[Job], journal: Journal, progress: Progress, result: Result) -> None:
    pending[:] = [job for job in pending if job.key != result.id]
    _finish(journal, progress, result)


def _finish(journal: Journal, progress: Progress, result: Result) -> None:
    journal.finish(result)
    progress.finish(result)
