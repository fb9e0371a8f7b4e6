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
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.case import Case, Result
from conformance.catalogue import case_to_json
from conformance.journal import MAX_DEATHS, Journal, result_from_json
from conformance.plain import plain
from conformance.progress import Progress
from paged.common.errors import PagedError

COMMAND = (sys.executable, "-m", "conformance.worker")
STARTUP_SECONDS = 180.0
PREPARE_SECONDS = 900.0
"""How long a backend may take to compile what it runs: no case has begun, and no case's deadline either."""
ENDING_SECONDS = 5.0
"""How long a process that has closed its channel may take to end."""
LOG_TAIL_BYTES = 2000
LOG_READ_BYTES = 1 << 16


class BackendRefusedError(PagedError):
    """The worker could not make the backend; `verdict` is `"error"` or `"not certifiable"`."""

    def __init__(self, message: str, verdict: str):
        super().__init__(message)
        self.verdict = verdict


class WorkerStartError(PagedError):
    """The worker died or hung before it could name the backend, or names another one than before."""


class ChannelError(PagedError):
    """The worker sent what is no answer, or an answer to nothing that was asked; `key` is the job it belongs to."""

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key


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
    """One worker process and the messages that come from it.

    What the backend prints is drained here and only its end is kept: it can fill no disk, and no pipe.
    """

    def __init__(self, request: Mapping[str, Any]):
        self._read_end, write_end = os.pipe()
        self._log_end, log_write_end = os.pipe()
        self.process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=log_write_end,
            stderr=log_write_end,
            pass_fds=(write_end,),
            env=worker_environment(),
            start_new_session=True,
            bufsize=0,
        )
        os.close(write_end)
        os.close(log_write_end)
        os.set_blocking(self._log_end, False)
        self._descriptors = [self._read_end, self._log_end]
        self._selector = selectors.DefaultSelector()
        for end in self._descriptors:
            self._selector.register(end, selectors.EVENT_READ)
        self._watch_end()
        self._buffer = self._printed = b""
        self._closed = False
        self._tell({**request, "reply": write_end})
        self.introduction = self._hello()

    def _watch_end(self) -> None:
        """Be woken when the process ends, where the system can: a child of the backend may keep the pipes open."""
        with contextlib.suppress(OSError, AttributeError):
            ended = os.pidfd_open(self.process.pid)
            self._descriptors.append(ended)
            self._selector.register(ended, selectors.EVENT_READ)

    def _tell(self, line: Any) -> None:
        assert self.process.stdin is not None
        rest = memoryview(json.dumps(line).encode() + b"\n")
        with contextlib.suppress(OSError, ValueError):  # it is gone, or closed meanwhile
            while rest:
                rest = rest[self.process.stdin.write(rest) :]

    def give(self, jobs: Sequence[Job]) -> None:
        """Hand over the jobs, once. Returns at once, even if the process does not read them."""
        told = [job.to_json() for job in jobs]
        threading.Thread(target=self._tell, args=(told,), daemon=True).start()

    def _hello(self) -> dict[str, Any]:
        """What the backend says of itself and of where it runs. On any other answer the process is closed."""
        seconds = STARTUP_SECONDS
        try:
            message = self.message(seconds)
            if message is not None and message.get("kind") == "preparing":
                seconds += PREPARE_SECONDS
                message = self.message(seconds)
            if message is None:
                raise WorkerStartError(f"the process died while making the backend: {self.obituary()}")
            if message.get("kind") == "refused":
                raise BackendRefusedError(plain(str(message.get("message"))), str(message.get("verdict")))
            if message.get("kind") != "hello" or not isinstance(message.get("introduction"), dict):
                raise WorkerStartError("the process did not introduce the backend, but said something else first.")
        except TimeoutError:
            self.close()
            raise WorkerStartError(f"the backend was not ready within {seconds:g} s.") from None
        except BaseException:
            self.close()
            raise
        return message["introduction"]

    def message(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None once the worker is gone. Raises `TimeoutError` if none comes in time and
        `ChannelError` for a line that is no message."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            ready = {key.fd for key, _ in self._selector.select(max(0.0, left))}
            if self._log_end in ready:
                self._listen()
            if self._read_end in ready:
                chunk = os.read(self._read_end, 1 << 16)
                if not chunk:
                    return None
                self._buffer += chunk
            elif ready & set(self._descriptors[2:]):
                return None
            elif left <= 0 or not ready:
                raise TimeoutError
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ChannelError(f"the process sent what is no message: {plain(line[:80].decode(errors='replace'))!r}")
        return found

    def _listen(self) -> bool:
        """Take some of what was printed; whether there was any."""
        try:
            chunk = os.read(self._log_end, LOG_READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._log_end)
        self._printed = (self._printed + chunk)[-LOG_READ_BYTES:]
        return bool(chunk)

    def obituary(self) -> str:
        """How the process ended and the last of what it printed."""
        code = self._end(ENDING_SECONDS)
        if code is None:
            how = "it closed its channel and went on, so it was killed"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        for _ in range(1 << 10):  # a child that left the process group may go on printing
            if not self._listen():
                break
        # The interpreter's dump of all stacks is long; what the kernel printed before it says more.
        said, dump, stacks = self._printed.rpartition(b"Fatal Python error")
        tail = (said if dump else self._printed)[-LOG_TAIL_BYTES:] + dump + stacks.partition(b"\n")[0] * bool(dump)
        printed = plain(tail.decode(errors="replace").strip())
        return f"{how}; it printed last: {printed}" if printed else how

    def _end(self, seconds: float) -> int | None:
        """Exit status of the process, None if it did not end in time by itself; it and its children are killed."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
        # Of its process group, whose number is not given away while a member lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return code

    def close(self) -> None:
        """End the process, its children included, and release what it held. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._end(0)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self._selector.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


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
                worker = _again(request, worker.introduction)
    finally:
        worker.close()
    return {job.key: journal.results[job.key] for job in jobs}


def _again(request: Mapping[str, Any], before: Mapping[str, Any]) -> Worker:
    """Another worker in the place of one that died. Raises `WorkerStartError` unless it has the same backend."""
    kept = "The results so far are kept; run again to go on."
    try:
        worker = Worker(request)
    except BackendRefusedError as error:
        raise WorkerStartError(f"the backend was made once, and then no more: {error} {kept}") from None
    now = worker.introduction
    if now != before:
        worker.close()
        moved = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
        raise WorkerStartError(
            f"the backend was made again and is another one: its {' and '.join(moved)} changed. One certificate is of "
            f"one backend. {kept}"
        )
    return worker


def _serve(worker: Worker, pending: list[Job], deadline: float, journal: Journal, progress: Progress) -> None:
    """Take results until the worker is done, dead or too slow; `pending` keeps what is left to do."""
    running: str | None = None
    begin = time.monotonic()
    try:
        while pending and (message := worker.message(max(0.0, begin + deadline - time.monotonic()))) is not None:
            kind, key = message.get("kind"), message.get("key")
            if kind == "start" and running is None and any(job.key == key for job in pending):
                running, begin = str(key), time.monotonic()
                journal.start(running)
                progress.start(running)
            elif kind == "result" and running is not None and key == running:
                _settle(pending, journal, progress, _timed(running, message, begin))
                running, begin = None, time.monotonic()
            elif kind == "done":
                return
            else:
                raise ChannelError(f"the process answered out of turn ({kind} of {key!r:.80})", key)
        if not pending:
            return
        how = worker.obituary()
        if running is None:  # what it did before this is over: a thread that it left behind, say
            running = pending[0].key
            journal.start(running)
        journal.deaths[running] = journal.deaths.get(running, 0) + 1
        if journal.deaths[running] < MAX_DEATHS:
            progress.note(f"the process died during {running} ({how}); trying it once more")
        else:
            died = Result(id=running, status="error", diagnosis=f"the process died while it ran: {how}")
            _settle(pending, journal, progress, died)
    except ChannelError as error:
        what = f"{error}: a copy of it made by fork, or something that writes to its descriptors."
        if error.key in journal.results:  # it has its result already, and what followed makes that worthless
            journal.finish(Result(id=str(error.key), status="error", diagnosis=what))
            progress.note(f"ERROR {error.key}: {what}")
        else:
            _settle(pending, journal, progress, Result(id=running or pending[0].key, status="error", diagnosis=what))
    except TimeoutError:
        late = f"no result within {deadline:g} s (--deadline)"
        _settle(pending, journal, progress, Result(id=running or pending[0].key, status="error", diagnosis=late))
    except KeyboardInterrupt:
        if running is not None:
            journal.forgive(running)
        raise


def _timed(key: str, message: Mapping[str, Any], begin: float) -> Result:
    """The result in a message, with how long it took. Raises `ChannelError` if there is none."""
    try:
        result = result_from_json({**message["result"], "id": key})
        spent = {**result.details, "seconds": round(time.monotonic() - begin, 3)}
    except (KeyError, TypeError, ValueError) as error:
        raise ChannelError(f"the process sent no result ({plain(str(error))})", key) from None
    return dataclasses.replace(result, details=spent)


def _settle(pending: list[Job], journal: Journal, progress: Progress, result: Result) -> None:
    pending[:] = [job for job in pending if job.key != result.id]
    _finish(journal, progress, result)


def _finish(journal: Journal, progress: Progress, result: Result) -> None:
    journal.finish(result)
    progress.finish(result)
