"""Lines about a run: its events as they come, and how far it is whenever nothing was said for a while."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

EVERY = 30.0
"""Seconds without a line after which one says how far the run is."""


class Progress:
    """Says lines through a function, from a thread of its own while long work keeps the caller's busy."""

    def __init__(self, report: Callable[[str], None], every: float | None = EVERY) -> None:
        """every: seconds; None for no lines between events, where a progress bar is shown."""
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
        """Say an event."""
        with self._lock:
            self._report(line)
            self._said = time.monotonic()

    def doing(self, describe: Callable[[], str]) -> None:
        """From now on `describe()` says how far the run is."""
        self._describe = describe

    def _watch(self) -> None:
        assert self._every is not None
        while not self._closed.wait(max(0.05, self._said + self._every - time.monotonic())):
            if time.monotonic() - self._said >= self._every:
                self.say(self._describe())


class Speed:
    """Speed of a run, and the time that is left."""

    def __init__(self, done: int, steps: int) -> None:
        self._first, self._done, self._steps, self._loss = done, done, steps, 0.0
        self._window: deque[tuple[int, float]] = deque(maxlen=50)

    def note(self, done: int, losses: Sequence[float], tokens: int, seconds: float) -> None:
        """Note a step, and the last losses."""
        if len(self._window) == 1 and done == self._first + 2:  # the very first step warms up
            self._window.clear()
        self._window.append((tokens, seconds))
        self._done, self._loss = done, sum(losses) / len(losses)

    def describe(self) -> str:
        """A line about the steps done, the speed and the time that is left."""
        window = list(self._window)
        if not window:
            return f"step {self._done + 1} of {self._steps} is under way"
        tokens, seconds = (sum(column) for column in zip(*window, strict=True))
        left = (self._steps - self._done) * seconds / len(window)
        return (
            f"step {self._done} of {self._steps}: loss {self._loss:.4f}, {seconds / len(window):.2g} s a step, "
            f"{tokens / seconds:,.0f} tokens/s, about {duration(left)} left"
        )


def duration(seconds: float) -> str:
    """About how long: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
