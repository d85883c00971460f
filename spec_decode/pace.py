"""How often it is decided: for a small model a decision is no trifle."""

from __future__ import annotations

from .lanes import Mode

PERIOD = 8
"""Least number of steps between decisions; twice that when drafting has paid for long, or while nothing is drafted, and
so nothing is learned; four times when nothing was drafted for long."""
DECIDING_SHARE = 0.005
"""Of busy time, for decisions: for a small model one is no trifle."""
MOST_PERIOD = 256
"""Steps between decisions, even so."""
IDLE_SECONDS = 0.25
"""Between two looks at whether there is something to decide, while nothing is drafted, in as many steps at most: for a
small model a look is no trifle either."""
DISTURBANCE = 1.5
"""What a decision costs over what it takes: the steps after it find the processor's caches without what they need."""


def period(step: int, mode: Mode, decision_seconds: float, step_seconds: float) -> int:
    """Steps until the next decision.

    Args:
        step: number of the step that it is counted from.
        decision_seconds: what a decision costs.
        step_seconds: those of a step, as the last decision thought; 0: not known.
    """
    steps = min(PERIOD, 2 + step // 8) * (1 if mode.drafting else 2)
    if mode.has_lasted(step):
        steps *= 2
    if step_seconds:
        worth = decision_seconds / DECIDING_SHARE
        if not mode.drafting:
            worth = max(worth, IDLE_SECONDS)
        steps = max(steps, min(MOST_PERIOD, int(worth / step_seconds)))
    return steps
