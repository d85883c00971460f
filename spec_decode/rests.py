"""What happened in steps after which nobody was asked for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING

from .outcome import StepOutcome
from .proposer import RestedSteps, TargetOutput
from .step_costs import row_class

if TYPE_CHECKING:
    from ..platform.core.batch import RowPlan

MOST_WAITING, MOST_TOKENS = 256, 512
"""Steps that are put off together, at most, and tokens of each."""
MOST_KEPT = 16
"""Steps whose hidden states are tensors, which live on meanwhile."""
LONGEST_WAIT = 0.25
"""Seconds of such steps: text may have become one that drafts would help. A look takes some 0.3 ms, and the
steps after it 0.15 ms more until the processor's caches have what they need."""
WORTH_WAITING = 0.01
"""Seconds of a step up to which it is worth it to put off what is to be done after it: that takes tens of
microseconds."""
RestedStep = tuple["Sequence[RowPlan]", list[list[int]], TargetOutput]
"""A step's rows, their block tables then, and what the target computed."""


class Rests:
    """Those that are not taken in yet; some of them were not even looked at."""

    __slots__ = (
        "_alike",
        "_are_watched",
        "_rows",
        "_told",
        "_waited",
        "_waiting",
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
        self._waiting: list[RestedStep] = []
        self._waited = 0.0  # seconds since the last look
        self._alike, self._told = 0, 0.0  # steps that were not counted yet, and of `_waited` what was before them
        self._rows = 0  # of the last step
        self.taken_in()
        self.time_anew()

    def goes_on(self, rows: Sequence[RowPlan], target: TargetOutput) -> bool:
        """Take in a step, if it may wait and there is nothing to see in it: decodes, as many as rows of the last one.
        Else it is to be added."""
        # As little as can be: all that is done after such a step is to cost a small model nothing.
        last = rows[-1]  # prompts come last
        if self._are_watched or len(rows) != self._rows or last.num_tokens > 1 or not last.samples:
            return False
        if last.start < last.request.num_prompt_tokens:
            return False
        seconds = target.seconds
        waited = self._waited + seconds
        if seconds >= WORTH_WAITING or waited > LONGEST_WAIT:
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
        may_wait = seconds < WORTH_WAITING and self._waited <= LONGEST_WAIT
        if not self._are_watched:
            self._count(rows, 1, seconds)
            return may_wait
        waiting, tables = self._waiting, []
        num_tokens = 0
        for row in rows:
            request = row.request
            if request.adapter is not None:
                may_wait = False  # it may be gone later
            tables.append(request.blocks)
            num_tokens += row.num_tokens
        waiting.append((rows, tables, target))
        most = MOST_WAITING if target.hidden is None else MOST_KEPT
        return may_wait and len(waiting) < most and num_tokens <= MOST_TOKENS

    def look(self) -> list[RestedSteps]:
        """What nobody has looked at yet, if somebody wants to."""
        self._count_alike()
        waiting, self._waiting = self._waiting, []
        self._waited = self._told = 0.0
        spells = spells_of(waiting)
        for rows, _, targets in spells:
            self._count(rows, len(targets), sum([target.seconds for target in targets]))
        return spells

    @property
    def outcome(self) -> StepOutcome:
        """What they brought."""
        return StepOutcome(num_prompts=self.num_prompts, num_outputs=self.num_outputs, num_answers=self.num_answers)

    def taken_in(self) -> None:
        """What was looked at is known."""
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
            self.timed_steps += steps
            self.timed_seconds += seconds

    def _count(self, rows: Sequence[RowPlan], num_steps: int, seconds: float) -> None:
        self.num_steps += num_steps
        self.seconds += seconds
        self.num_outputs += len(rows) * num_steps
        for row in rows:
            if row.num_tokens > 1 or not row.samples:
                self.num_prompts += row.num_tokens
                self.num_outputs -= not row.samples
                self.num_answers += row.samples


def spells_of(waiting: Sequence[RestedStep]) -> list[RestedSteps]:
    """Steps that nobody has looked at yet, oldest first: those of the same sequences together. The code that looks is
    not in the processor's caches after a step of the target, and runs several times as fast for the second of two."""
    spells: list[RestedSteps] = []
    before: Sequence[RowPlan] = ()
    tables: list[list[int]] = []
    for rows, tables_then, target in waiting:
        # Who has another list of blocks has given way meanwhile.
        if len(rows) == len(before) and all(map(is_, tables, tables_then)) and _continue(before, rows):
            spells[-1].targets.append(target)
        else:
            spells.append(RestedSteps(rows, tables_then, [target]))
        before, tables = rows, tables_then
    return spells


def _continue(before: Sequence[RowPlan], rows: Sequence[RowPlan]) -> bool:
    """Whether the rows of a step are each one token later than those of the step before it. One that begins elsewhere
    is computed again: the step before failed."""
    for last, row in zip(before, rows, strict=True):
        if row.num_tokens != 1 or row.start != last.start + last.num_tokens:
            return False
    return True
