"""What drafting has really brought, beside what was predicted.

A prediction adds up steps that each are as measured. What no step shows is missing from it: answers end within a step's
drafts, prompts come between, what drafting leaves in caches slows what follows. So while there is drafting the seconds
that it takes are compared with those predicted for as many tokens, and predictions corrected by their ratio.
"""

from __future__ import annotations

import math

MEMORY, UNUSED_MEMORY = 300.0, 2000.0
"""Steps over which the ratio is averaged; and, while nothing is drafted, after which it is believed less by 1/e."""
PRIOR = 150.0
"""Steps that weigh as much as that predictions are right."""
MOST = 3.0
"""Times that a step may take what was predicted: one that takes more was disturbed."""
LEAST_RATIO, MOST_RATIO = 0.6, 1.2


class Realised:
    """The ratio, of sums that forget exponentially."""

    __slots__ = ("_actual", "_predicted", "_steps")

    def __init__(self) -> None:
        self._steps = self._predicted = self._actual = 0.0

    def add(self, predicted: float, actual: float) -> None:
        """A step of drafting took `actual` seconds; `predicted` for what it brought."""
        keep = 1.0 - 1.0 / MEMORY
        self._steps = self._steps * keep + 1.0
        self._predicted = self._predicted * keep + predicted
        self._actual = self._actual * keep + min(actual, MOST * predicted)

    def pass_over(self, num_steps: int) -> None:
        """So many steps came without drafting."""
        self._steps *= math.exp(-num_steps / UNUSED_MEMORY)

    @property
    def ratio(self) -> float:
        """Goodput over what is predicted."""
        if self._steps < 1.0 or self._actual <= 0.0:
            return 1.0
        prior = PRIOR / self._steps
        ratio = (prior + self._predicted / self._actual) / (prior + 1.0)
        return max(LEAST_RATIO, min(MOST_RATIO, ratio))
