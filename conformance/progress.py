"""Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import collections
import shutil
import time
from collections.abc import Callable, Collection
from typing import TextIO

from conformance.case import STATUSES, Result
from conformance.clauses import said
from conformance.plain import indented

LINE_EVERY_SECONDS = 15.0


class Progress:
    """Counts results and estimates the time left from the pace so far. Results of a status in `told` are printed."""

    def __init__(
        self,
        total: int,
        stream: TextIO,
        *,
        label: str = "",
        told: Collection[str] = ("fail", "error"),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total = total
        self.done = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self._stream = stream
        self._label = label
        self._told = told
        self._clock = clock
        self._begin = self._last = clock()
        self._known = 0
        self._tty = stream.isatty()

    def known(self, results: int) -> None:
        """Results that an earlier, interrupted run left: done, but no measure of the pace."""
        self.done += results
        self._known += results

    def start(self, case_id: str) -> None:
        """A case begins."""
        if self._tty:
            self._bar(case_id)

    def finish(self, result: Result) -> None:
        """A case has its result; failures and errors are printed at once, with the clause that is broken."""
        self.done += 1
        self.counts[result.status] += 1
        if result.status in self._told:
            broken = f"breaks {said(result.clause)}. " if result.clause else ""
            self._line(f"{result.status.upper():5} {result.id}: {broken}{result.diagnosis}")
        if not self._tty and (self._clock() - self._last >= LINE_EVERY_SECONDS or self.done == self.total):
            self._last = self._clock()
            self._line(self._summary())

    def note(self, text: str) -> None:
        """A remark between results."""
        self._line(text)

    def close(self) -> None:
        """Take the bar away."""
        if self._tty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def seconds_left(self) -> float | None:
        """Estimate of the time left; None before the first result."""
        ran = self.done - self._known
        if ran <= 0:
            return None
        return (self._clock() - self._begin) / ran * (self.total - self.done)

    def _summary(self) -> str:
        parts = [f"{self.counts[s]} {s}" for s in STATUSES if self.counts[s]]
        left = self.seconds_left()
        eta = "" if left is None or self.done == self.total else f", about {_duration(left)} left"
        return f"{self._label}{self.done}/{self.total} ({', '.join(parts) or 'starting'}){eta}"

    def _line(self, text: str) -> None:
        self._stream.write(("\r\x1b[K" if self._tty else "") + indented(text) + "\n")
        self._stream.flush()

    def _bar(self, case_id: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        filled = 20 * self.done // max(1, self.total)
        text = f"[{'█' * filled}{'·' * (20 - filled)}] {self._summary()}  {case_id}"
        self._stream.write("\r\x1b[K" + text[:width])
        self._stream.flush()


def _duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
