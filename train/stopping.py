"""Stopping a run from outside: SIGTERM and SIGINT ask, the loop answers between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """While entered, the first SIGTERM or SIGINT is noted in ``received``; a second one acts as it did before.

    Outside the main thread, where Python lets nobody handle signals, nothing is noted.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
