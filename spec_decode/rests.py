"""What happened in steps after which nobody was asked for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING

from .proposer import RestedSteps, TargetOutput

if TYPE_CHECKING:
    from ..platform.core.batch import RowPlan

MOST_WAITING = 16
"""Steps that are put off together, at most."""
WORTH_WAITING = 0.01
"""Seconds of a step up to which it is worth it to put off what is to be done after it: that takes tens of
microseconds, and longer steps leave more memory to be kept."""


class Rests:
    """Those that are not taken in yet."""

    __slots__ = ("num_outputs", "num_prompts", "num_steps", "seconds")

    def __init__(self) -> None:
        self.num_steps = self.num_prompts = self.num_outputs = 0  # of prompts and outputs: tokens
        self.seconds = 0.0
        """That the target took."""

    def add(self, steps: RestedSteps) -> None:
        """Some more."""
        self.num_steps += len(steps.targets)
        self.seconds += sum(target.seconds for target in steps.targets)
        self.num_outputs += len(steps.rows) * len(steps.targets)
        for row in steps.rows:
            if row.num_tokens > 1 or not row.samples:
                self.num_prompts += row.num_tokens
                self.num_outputs -= not row.samples


class Waiting:
    """Steps that nobody has looked at yet: the code that would is not in the processor's caches after a step of the
    target, and runs several times as fast for the second of two."""

    __slots__ = ("_num_steps", "_spells")

    def __init__(self) -> None:
        self._spells: list[RestedSteps] = []
        self._num_steps = 0

    @property
    def is_full(self) -> bool:
        """Whether there are enough of them."""
        return self._num_steps >= MOST_WAITING

    def go_on(self, rows: Sequence[RowPlan], target: TargetOutput) -> bool:
        """Keep a step of the same sequences as the last that waits; False: it is not, or there are enough."""
        if not 0 < self._num_steps < MOST_WAITING:
            return False
        steps = self._spells[-1]
        # A sequence that still has the list of blocks with which it sampled has not given way since: it decodes. Unless
        # an error kept the last step from being committed, as a whole or from some row on: then it is computed again.
        if len(rows) != len(steps.rows) or not all(map(is_, [row.request.blocks for row in rows], steps.tables)):
            return False
        if rows[-1].start != steps.rows[-1].end + len(steps.targets) - 1:
            return False
        steps.targets.append(target)
        self._num_steps += 1
        return True

    def begin(self, rows: Sequence[RowPlan], target: TargetOutput) -> bool:
        """Keep a step of other sequences; False: it is to be looked at now, after those that wait."""
        if target.seconds >= WORTH_WAITING or not all(row.samples and row.request.adapter is None for row in rows):
            return False  # an adapter may be gone later
        self._spells.append(RestedSteps.begun(rows, target))
        self._num_steps += 1
        return True

    def take(self) -> list[RestedSteps]:
        """What was kept, oldest first."""
        spells, self._spells, self._num_steps = self._spells, [], 0
        return spells
