"""What happened in steps after which nobody was asked for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .proposer import RestedSteps, TargetOutput

if TYPE_CHECKING:
    from ..platform.core.batch import RowPlan

MOST_WAITING, MOST_TOKENS = 16, 512
"""Steps that are put off together, at most, and tokens of each: their hidden states are kept meanwhile."""
WORTH_WAITING = 0.01
"""Seconds of a step up to which it is worth it to put off what is to be done after it: that takes tens of
microseconds."""
RestedStep = tuple["Sequence[RowPlan]", list[list[int]], TargetOutput]
"""A step's rows, their block tables then, and what the target computed."""


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


def spells_of(waiting: Sequence[RestedStep]) -> list[RestedSteps]:
    """Steps that nobody has looked at yet, oldest first: those of the same sequences together. The code that looks is
    not in the processor's caches after a step of the target, and runs several times as fast for the second of two."""
    spells: list[RestedSteps] = []
    before: Sequence[RowPlan] = ()
    tables: list[list[int]] = []
    for rows, tables_then, target in waiting:
        if before and _continues(before, tables, rows, tables_then):
            spells[-1].targets.append(target)
        else:
            spells.append(RestedSteps(rows, tables_then, [target]))
        before, tables = rows, tables_then
    return spells


def _continues(
    before: Sequence[RowPlan], tables: list[list[int]], rows: Sequence[RowPlan], tables_then: list[list[int]]
) -> bool:
    """Whether the rows of a step are those of the step before it, each one token later. A sequence that has another
    list of blocks has given way since, and one that begins elsewhere is computed again: the step before failed."""
    return len(rows) == len(before) and all(
        table is now and row.num_tokens == 1 and row.start == last.end
        for table, now, last, row in zip(tables, tables_then, before, rows, strict=True)
    )
