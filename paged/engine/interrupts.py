"""Ctrl-C and SIGTERM between steps, not inside one: bookkeeping that is cut in half cannot be put right."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Deferred:
    """Within `with Deferred():` a signal that Python handles waits for the end of the block.

    If the block raises, the signal comes all the same; what its handler raises has the block's error as `__context__`.
    A second one does not wait: who insists means it, say while a program compiles. Only the main thread gets signals;
    elsewhere, and for handlers that are not Python's, nothing changes.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._waiting: int | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if callable(before):
                self._before[number] = before
                signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._waiting is not None:
            self._before[self._waiting](self._waiting, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is not None:
            self._waiting = None
            self._before[number](number, frame)
        self._waiting = number
