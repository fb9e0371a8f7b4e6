"""Compiler processes that end with who started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence


class Compilers:
    """Runs compilers, from any thread, until it is stopped; then they and their own children are killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run` with captured text. After `stop` nothing is started, and the status is −15."""
        with self._lock:
            if self._stopped:
                return subprocess.CompletedProcess(command, -signal.SIGTERM, "", "stopped")
            # A group of its own: a compiler is a driver of other programs, which would outlive it.
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=env
            )
            self._running.add(process)
        try:
            out, err = process.communicate()
        except BaseException:
            self._kill(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def stop(self) -> None:
        """Kill what runs, and start nothing any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
