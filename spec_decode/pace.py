"""How often it is decided: for a small model a decision is no trifle."""

from __future__ import annotations

from .lanes import Mode

PERIOD = 8
"""Least number of steps between decisions; twice that when drafting has paid for long, or while nothing is drafted, and
so nothing is learned; four times when nothing was drafted for long."""
DECIDING_SHARE = 0.005
"""Of busy time, for decisions: for a small model one is no trifle."""
EARLY, EARLY_SHARE = 512, 0.02
"""Steps after the start in which it may be more: little is known, and much of it wrong."""
URGENCY = 0.2
"""And it may always be this much of what the present way is thought to lose: it is left once that was found again."""
MOST_PERIOD = 256
"""Steps between decisions, even so."""
IDLE_SECONDS, MOST_IDLE = 0.25, 1024
"""Between two looks at whether there is something to decide, while nothing is drafted: for a small model a look is no
trifle either. And steps between them, once nothing was drafted for long."""
DISTURBANCE = 1.5
"""What a decision costs over what it takes: the steps after it find the processor's caches without what they need."""


class Pace:
    """What the last decision says of when the next one is to be."""

    __slots__ = ("_decided_at", "_in_vain", "loss", "step_seconds")

    def __init__(self) -> None:
        self.step_seconds = 0.0
        """Of a step, as it thought; 0: not known."""
        self.loss = 0.0
        """Share of the time that the present mode loses, as it thought."""
        self._decided_at = 0.0  # busy seconds
        self._in_vain = 1

    def decided(self, elapsed: float) -> None:
        """It was made after so many busy seconds."""
        self._decided_at, self.loss = elapsed, 0.0

    def found(self, step_seconds: float, loss: float) -> None:
        """It could give drafts to somebody."""
        self.step_seconds, self.loss, self._in_vain = step_seconds, max(0.0, loss), 1

    def found_nobody(self) -> int:
        """Nobody may have any: steps until the next one. All may be at their ends, and others begin; or none is ever to
        have drafts, so it is not as soon as the last time."""
        steps, self._in_vain = self._in_vain, min(2 * self._in_vain, MOST_PERIOD)
        return steps

    def is_worth_deciding(self, step: int, elapsed: float, decision_seconds: float) -> bool:
        """Whether another batch is a reason to decide now."""
        return elapsed - self._decided_at >= decision_seconds / self._share(step)

    def steps(self, step: int, mode: Mode, decision_seconds: float) -> int:
        """From `step` on, until the next one. `decision_seconds`: what a decision costs."""
        steps = min(PERIOD, 2 + step // 8) * (1 if mode.drafting else 2)
        if mode.has_lasted(step):
            steps *= 2
        if self.step_seconds:
            worth, most = decision_seconds / self._share(step), MOST_PERIOD
            if not mode.drafting and not self.loss:
                worth = max(worth, IDLE_SECONDS)
                if mode.has_lasted(step):
                    most = MOST_IDLE
            steps = max(steps, min(most, int(worth / self.step_seconds)))
        return steps

    def _share(self, step: int) -> float:
        return max(EARLY_SHARE if step < EARLY else DECIDING_SHARE, URGENCY * self.loss)
