"""Ctrl-C and SIGTERM during long work: they end it at the next safe point."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """While open, the first Ctrl-C or SIGTERM only sets `wanted`, so that a step ends; a second interrupts at once."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        """The signal."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted is not None:
            raise KeyboardInterrupt
        self.wanted = number

    def error(self) -> BaseException:
        """The exception that ends the process as the signal would have."""
        return KeyboardInterrupt() if self.wanted == signal.SIGINT else SystemExit(128 + (self.wanted or 0))
