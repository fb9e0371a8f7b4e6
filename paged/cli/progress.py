"""Progress on a terminal as one line that is redrawn, and in a log as plain lines now and then."""

from __future__ import annotations

import io
import sys
import time
from typing import TextIO

_WIDTH = 24
_SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """Shows `label [####----] done/total note` on `stream`, by default stderr; nothing at all if `quiet`.

    A terminal gets one line redrawn in place and cleared at the end; anything else gets a plain line at the start of a
    label, at its end, and every two seconds between.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | io.TextIOBase | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._tty = self._stream.isatty()
        self._label: str | None = None
        self._last = 0.0

    def update(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` steps of `label` are behind."""
        if self._quiet:
            return
        if self._tty:
            filled = _WIDTH * done // max(total, 1)
            bar = "#" * filled + "-" * (_WIDTH - filled)
            self._stream.write(f"\r\x1b[K{label} [{bar}] {done}/{total} {note}")
            self._stream.flush()
        elif label != self._label or done == total or time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._stream.write(f"{label}: {done}/{total}{' ' + note if note else ''}\n")
            self._stream.flush()
            self._last = time.monotonic()
        self._label = label

    def clear(self) -> None:
        """Remove the line that is being redrawn, if any, so that other text can be printed."""
        if self._label is not None and self._tty and not self._quiet:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._label = None

    def say(self, text: str) -> None:
        """One line of text that stays."""
        self.clear()
        if not self._quiet:
            self._stream.write(text + "\n")
            self._stream.flush()
