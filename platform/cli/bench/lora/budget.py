"""A limit on the time of a measurement, so that what was measured until then is a result too."""

from __future__ import annotations

import time
from collections.abc import Callable


class BudgetSpent(Exception):
    """The time is up: what follows is left out."""


class Budget:
    """Seconds from now on; without a limit they never end."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def check(self) -> None:
        """Raises BudgetSpent when the time is up."""
        if self._end is not None and self._clock() >= self._end:
            raise BudgetSpent

    def share(self, part: float) -> Budget:
        """A budget of this part, 0 to 1, of what is left."""
        left = None if self._end is None else max(0.0, self._end - self._clock()) * part
        return Budget(left, self._clock)
