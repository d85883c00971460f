"""What happened in steps after which nobody was asked for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .drafters.base import RestedSteps, TargetOutput
from .outcome import StepOutcome
from .step_costs import row_class

if TYPE_CHECKING:
    from ..platform.core.batch import RowPlan

MOST_WAITING = 1024
"""Steps that are put off together, at most."""
MOST_KEPT, MOST_TOKENS = 16, 512
"""Steps whose hidden states are tensors, which live on meanwhile, and tokens of each."""
LONGEST_WAIT = 0.25
"""Seconds of such steps: text may have become one that drafts would help. A look takes some 0.3 ms, and the
steps after it 0.15 ms more until the processor's caches have what they need."""
WORTH_WAITING = 0.01
"""Seconds of a step up to which it is worth it to put off what is to be done after it: that takes tens of
microseconds."""


class Spells:
    """Steps that nobody has looked at yet, oldest first: those of the same sequences together. Of a step that goes on
    with the last spell as little as can be is kept: while objects live on, those of the next steps get memory that is
    in no cache."""

    __slots__ = ("_spells", "num_steps")

    def __init__(self) -> None:
        self._spells: list[RestedSteps] = []
        self.num_steps = 0

    def go_on(self, rows: Sequence[RowPlan], target: TargetOutput) -> bool:
        """Take in a step in which the rows of the last one are each one token later; else nothing is done.

        Who has another list of blocks has given way meanwhile, and one that begins elsewhere is computed again: the
        step before failed."""
        if not self._spells:
            return False
        first, tables, targets = self._spells[-1]
        if len(rows) != len(first):
            return False
        later = len(targets) - 1
        for row, before, table in zip(rows, first, tables, strict=True):
            request = row.request
            if request is not before.request or row.num_tokens != 1 or request.blocks is not table:
                return False
            if row.start != before.start + before.num_tokens + later:
                return False
        targets.append(target)
        self.num_steps += 1
        return True

    def add(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """Take in a step."""
        if not self.go_on(rows, target):
            self._spells.append(RestedSteps(rows, [row.request.blocks for row in rows], [target]))
            self.num_steps += 1

    def take(self) -> list[RestedSteps]:
        """All of them, which are known now."""
        spells, self._spells, self.num_steps = self._spells, [], 0
        return spells


class Rests:
    """Those that are not taken in yet; some of them were not even looked at."""

    __slots__ = (
        "_alike",
        "_are_watched",
        "_row_steps",
        "_rows",
        "_spells",
        "_told",
        "_waited",
        "num_answers",
        "num_outputs",
        "num_prompts",
        "num_steps",
        "seconds",
        "timed_seconds",
        "timed_steps",
    )

    def __init__(self, *, are_watched: bool) -> None:
        """`are_watched`: see `ProposerNeeds.watches_rests`; else steps are only counted."""
        self._are_watched = are_watched
        self._spells = Spells()  # none where they are only counted
        self._waited = 0.0  # seconds since the last look
        self._alike, self._told = 0, 0.0  # steps that were not counted yet, and of `_waited` what was before them
        self._rows = 0  # of the last step
        self.taken_in()
        self.time_anew()

    def goes_on(self, rows: Sequence[RowPlan], target: TargetOutput) -> bool:
        """Take in a step, if it may wait and there is nothing to see in it: decodes, as many as rows of the last one
        (of the same sequences, where they are watched). Else it is to be added."""
        # As little as can be: all that is done after such a step is to cost a small model nothing.
        last = rows[-1]  # prompts come last
        if len(rows) != self._rows or last.num_tokens > 1 or not last.samples:
            return False
        if last.start < last.request.num_prompt_tokens:
            return False
        seconds = target.seconds
        waited = self._waited + seconds
        if seconds >= WORTH_WAITING or waited > LONGEST_WAIT:
            return False
        if self._are_watched and not (self._has_room(target) and self._spells.go_on(rows, target)):
            return False
        self._waited = waited
        self._alike += 1
        return True

    def add(self, rows: Sequence[RowPlan], target: TargetOutput) -> bool:
        """A step; whether it may wait to be looked at together with others."""
        self._count_alike()
        seconds = target.seconds
        self._waited += seconds
        self._told = self._waited
        self.timed_steps += 1
        self.timed_seconds += seconds
        self._count(rows, seconds)
        may_wait = seconds < WORTH_WAITING and self._waited <= LONGEST_WAIT
        if self._are_watched:
            self._spells.add(rows, target)
            may_wait = may_wait and self._has_room(target)
            if target.hidden is not None:
                may_wait = may_wait and sum([row.num_tokens for row in rows]) <= MOST_TOKENS
        return may_wait

    def _has_room(self, target: TargetOutput) -> bool:
        """Whether another step like this one may wait beside those that do."""
        return self._spells.num_steps < (MOST_WAITING if target.hidden is None else MOST_KEPT)

    def look(self) -> list[RestedSteps]:
        """What nobody has looked at yet, if somebody wants to."""
        self._count_alike()
        self._waited = self._told = 0.0
        return self._spells.take()

    @property
    def outcome(self) -> StepOutcome:
        """What they brought."""
        return StepOutcome(
            num_prompts=self.num_prompts,
            num_outputs=self.num_outputs,
            num_answers=self.num_answers,
            row_steps=list(self._row_steps.items()),
        )

    def taken_in(self) -> None:
        """What was looked at is known."""
        self._row_steps: dict[int, int] = {}
        self.num_steps = self.num_answers = 0
        self.num_prompts = self.num_outputs = 0  # tokens
        self.seconds = 0.0  # that the target took

    def time_anew(self) -> None:
        """Time is taken from now on: of so many steps, in which the target was computing for so long."""
        self._count_alike()
        self.timed_steps, self.timed_seconds = 0, 0.0

    def timed(self, computing: float | None = None) -> tuple[float, int]:
        """These seconds, and steps; with one more that was none of the rests, and took `computing`."""
        self._count_alike()
        if computing is None:
            return self.timed_seconds, self.timed_steps
        return self.timed_seconds + computing, self.timed_steps + 1

    def is_other_class(self, num_rows: int) -> bool:
        """Whether a step has so many rows that its gap is not like that before the last one."""
        before, self._rows = self._rows, num_rows
        return num_rows != before and row_class(num_rows) != row_class(before)

    def _count_alike(self) -> None:
        """What `goes_on` put off."""
        if self._alike:
            steps, seconds = self._alike, self._waited - self._told
            self._alike, self._told = 0, self._waited
            self.num_steps += steps
            self.seconds += seconds
            self.num_outputs += steps * self._rows
            self._had(self._rows, steps)
            self.timed_steps += steps
            self.timed_seconds += seconds

    def _had(self, num_rows: int, steps: int) -> None:
        self._row_steps[num_rows] = self._row_steps.get(num_rows, 0) + steps

    def _count(self, rows: Sequence[RowPlan], seconds: float) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.num_outputs += len(rows)
        if rows[-1].num_tokens == 1 and rows[-1].samples:  # prompts come last
            self._had(len(rows), 1)
        for row in rows:
            if row.num_tokens > 1 or not row.samples:
                self.num_prompts += row.num_tokens
                self.num_outputs -= not row.samples
                self.num_answers += row.samples
