"""Speed of a training run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...platform.core.progress import duration


class Speed:
    """Speed of a run, and the time that is left."""

    def __init__(self, done: int, steps: int, eval_every: int, cycle: int = 1) -> None:
        """After `done` of `steps` steps. One in `cycle` steps is longer than the others."""
        self._cycle = cycle
        self._first, self._done, self._steps, self._loss = done, done, steps, 0.0
        self._eval_every = eval_every
        self._window: deque[tuple[int, float]] = deque(maxlen=max(50, cycle))
        self._measuring = 0.0

    def measured(self, seconds: float) -> None:
        """Record the duration of a measurement."""
        self._measuring = seconds

    def note(self, done: int, losses: Sequence[float], tokens: int, seconds: float) -> None:
        """Record a step, and the last losses."""
        if len(self._window) == 1 and done == self._first + 2:  # the very first step warms up
            self._window.clear()
        self._window.append((tokens, seconds))
        self._done, self._loss = done, sum(losses) / len(losses)

    def describe(self) -> str:
        """A line about the steps done, the speed and the time that is left."""
        window = list(self._window)
        if not window:
            return f"step {self._done + 1} of {self._steps} is in flight"
        whole = window[len(window) % self._cycle :]  # of whole cycles
        counted = whole or window
        tokens, seconds = (sum(column) for column in zip(*counted, strict=True))
        measurements = -(-self._steps // self._eval_every) - self._done // self._eval_every
        left = (self._steps - self._done) * seconds / len(counted) + measurements * self._measuring
        line = (
            f"step {self._done} of {self._steps}: loss {self._loss:.4f}, {seconds / len(counted):.2g} s a step, "
            f"{tokens / seconds:,.0f} tokens/s"
        )
        return f"{line}, about {duration(left)} left" if whole else line
