"""Ctrl-C and SIGTERM end a command in the same way: it says what was done and what was left."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM)."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in here, as Ctrl-C raises `KeyboardInterrupt`.

    In other threads than the main one nothing changes. A SIGTERM that the process was started to ignore stays ignored,
    as Python has it for SIGINT.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return

    def terminate(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def notes(error: BaseException) -> list[str]:
    """What the layers that an exception went through noted on it."""
    return [note.removeprefix("paged: ").rstrip(".") for note in getattr(error, "__notes__", ())]


def say(command: str, stopped: KeyboardInterrupt) -> int:
    """One line on stderr with the notes that the exception carries: what was done and what was left; the status."""
    terminated = isinstance(stopped, Terminated)
    told = "; ".join(notes(stopped))
    words = ("terminated" if terminated else "interrupted") + (f": {told}" if told else "")
    print(f"paged {command}: {words}", file=sys.stderr)
    return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
