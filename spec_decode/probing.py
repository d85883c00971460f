"""When to try what does not look best, and at what price.

Estimates of what is not done grow old: the step without drafts while drafting, drafting while not, a drafter that an
adapter has left. Each is tried again for a few steps, at intervals that double while nothing changes. What a trial is
predicted to cost is charged to one budget, a share of the engine's busy time: so that trials are frequent where the
alternatives are about equal, rare where one is far behind, and never cost more than that share.
"""

from __future__ import annotations

SHARE = 0.01
"""Of busy time, for all trials together."""
HEAD_START = 12.0
"""Steps' worth of trials before any time has passed."""
MIN_INTERVAL, MAX_INTERVAL = 32, 1024
"""Steps between two trials of the same thing."""


class Budget:
    """Seconds that trials may cost."""

    __slots__ = ("elapsed", "spent")

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.spent = 0.0

    def spend(self, cost: float, step_seconds: float) -> bool:
        """Charge `cost` seconds and return True, or return False and charge nothing: there is not enough."""
        if self.spent + cost > SHARE * self.elapsed + HEAD_START * step_seconds:
            return False
        self.spent += max(cost, 0.0)
        return True


class Backoff:
    """When one thing is due to be tried again."""

    __slots__ = ("interval", "last")

    def __init__(self, step: int, interval: int = MIN_INTERVAL) -> None:
        self.interval = interval
        self.last = step

    def due(self, step: int) -> bool:
        """Whether it is time."""
        return step - self.last >= self.interval

    def tried(self, step: int) -> None:
        """It is tried now; next after twice the time."""
        self.last = step
        self.interval = min(2 * self.interval, MAX_INTERVAL)

    def used(self, step: int) -> None:
        """It is in use: known, and should it be left, soon tried again."""
        self.last = step
        self.interval = MIN_INTERVAL

    def surprised(self) -> None:
        """The last trial showed something new: the next follows soon."""
        self.interval = MIN_INTERVAL
