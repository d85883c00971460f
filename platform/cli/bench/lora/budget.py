"""Limit on the time of a measurement. Its result holds all that was measured until then."""

from __future__ import annotations

import time
from collections.abc import Callable


class BudgetSpent(Exception):
    """Signal that the time is up; the rest of the measurement is left out."""


class Budget:
    """Time budget from now on, in seconds; None for no limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def check(self) -> None:
        """Raise BudgetSpent when the time is up."""
        if self._end is not None and self._clock() >= self._end:
            raise BudgetSpent

    def share(self, part: float) -> Budget:
        """A budget of this part, 0 to 1, of the rest."""
        left = None if self._end is None else max(0.0, self._end - self._clock()) * part
        return Budget(left, self._clock)
