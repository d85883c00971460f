"""Progress of long work: its events as they occur, and a status line after each pause without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY = 30.0
"""Seconds without a line after which a run of minutes or hours reports its progress."""
START_EVERY = 10.0
"""Seconds between such lines while a model is loading or a server does not answer; most models load in less."""


class Progress:
    """Writes lines through a function, from a separate thread while long work keeps the caller's busy."""

    def __init__(self, report: Callable[[str], None], every: float | None = EVERY) -> None:
        """every: seconds; None for no lines between events, if a progress bar is shown."""
        self._report, self._every = report, every
        self._describe: Callable[[], str] = lambda: "starting"
        self._said = time.monotonic()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._every is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def say(self, line: str) -> None:
        """Write an event."""
        with self._lock:
            self._report(line)
            self._said = time.monotonic()

    def doing(self, describe: Callable[[], str]) -> None:
        """Report progress by `describe()` from now on."""
        self._describe = describe

    def _watch(self) -> None:
        assert self._every is not None
        while not self._closed.wait(max(0.05, self._said + self._every - time.monotonic())):
            if time.monotonic() - self._said >= self._every:
                self.say(self._describe())


def duration(seconds: float) -> str:
    """About how long: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Stopwatch:
    """Time since construction, formatted by `duration`."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __str__(self) -> str:
        return duration(time.monotonic() - self._started)
