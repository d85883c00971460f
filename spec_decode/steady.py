"""Steps after which drafts are made as was decided before, and of which nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .acceptance import Outcome
from .drafters.base import Drafter, DraftRow, Proposal, TargetOutput
from .evidence import Evidence
from .lanes import RowState

if TYPE_CHECKING:
    from ..platform.core.request import Request
    from .controller import Controller

MEASURED_ONE_IN = 32
"""Short steps between decisions that are measured: that takes a small model a few per cent of its time."""

Told = Sequence[tuple[RowState, list[int]]]
"""Of each request four numbers for each step: drafts that were judged, those of them that were right, drafts that
were asked for, and those made. Of the rows themselves nothing is kept: while they live on, the next ones get memory
that is in no cache."""


class SteadySteps:
    """What they told, until somebody asks."""

    def __init__(self, first: Drafter, controller: Controller, evidence: Evidence) -> None:
        """`first`: the drafter that drafts in them. `controller` is told how much time has passed; what was accepted
        and drafted is `evidence`."""
        self.left = 0
        """Of the next steps, those that are like that."""
        self.usual = 0.0
        """Seconds that drafting, and all that belongs to it, took when it was measured last."""
        self.seconds = 0.0
        """Of those that nobody was told of."""
        self._first = first
        self._controller = controller
        self._evidence = evidence
        self._num_steps = 0
        self._num_joins = 0  # of them, the first ones of a batch
        self._num_counted = 0  # of them, in...
        self._row_steps: list[tuple[int, int]] = []
        self._num_prompts = self._num_answers = 0
        self._num_missing = 0  # tokens of answers that ended without one
        self._batch: Sequence[Request] = ()
        self._counts: list[int] = []
        self._told: Told = ()  # of the batch...
        self._earlier: list[Told] = []  # ...and of those before it

    def begin(self, batch: Sequence[Request], states: Sequence[RowState]) -> None:
        """The next steps are of these requests; none, if another than the first drafter drafts for one of them."""
        self._counts = [state.num_drafts for state in states]
        self._batch = batch if not any(state.drafter and state.num_drafts for state in states) else ()
        if self._num_steps:
            self._earlier.append(self._told)
            self._count_rows()
        self._told = [(state, []) for state in states]

    def fit(self, rows: Sequence[DraftRow]) -> Sequence[DraftRow] | None:
        """The rows, asking for as many drafts as was decided; None: they are of other requests."""
        # As little as can be, for a small model: after a forward pass no code is in the processor's caches.
        batch, counts = self._batch, self._counts
        if len(rows) != len(batch):
            return None
        is_fitting = True
        for row, request, count in zip(rows, batch, counts, strict=True):
            if row.request is not request:
                return None
            if row.max_drafts > count:
                is_fitting = False
        return rows if is_fitting else [_with_most(row, count) for row, count in zip(rows, counts, strict=True)]

    def draft(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """After a step whose `rows` fit."""
        proposals = self._first.propose(rows, target)
        for row, made, (_, numbers) in zip(rows, proposals, self._told, strict=True):
            judged = row.num_drafts
            if row.max_drafts == 0 and len(row.tokens) == row.num_valid:  # a draft ended the text
                self._num_missing += 1
                judged = row.num_accepted
            numbers += (judged, row.num_accepted, row.max_drafts, len(made.drafts.token_ids))
        self._num_steps += 1
        self.seconds += target.seconds + self.usual
        return proposals

    def draft_first(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """The same after the first step of these requests: some may begin in it."""
        proposals, before = self.draft(rows, target), self._num_prompts
        self._num_joins += 1
        for row in rows:
            new = row.num_valid - row.num_accepted - row.start
            if new > 1:
                self._num_prompts += new
                self._num_answers += 1
        if self._num_prompts > before:
            self._num_counted += 1  # it is none of those without prompts
        return proposals

    def tell(self) -> int:
        """Nothing is left to be told; returns how many steps were."""
        num_steps = self._num_steps
        if num_steps:
            self._controller.stepped(self.seconds, num_steps)
            self._evidence.note(learn, self._controller, [*self._earlier, self._told])
            self._count_rows()
            self._evidence.note(self._controller.workload.had, self._row_steps)
            self._evidence.note(self._controller.costs.add_joins, self._num_joins, num_steps)
            self._row_steps, self._num_counted, self._num_joins = [], 0, 0
            counts = self._num_prompts, -self._num_missing, self._num_answers
            if any(counts):
                self._evidence.note(self._controller.workload.computed, *counts)
                self._num_prompts = self._num_missing = self._num_answers = 0
            self.seconds, self._num_steps, self._earlier = 0.0, 0, []
            self._told = [(state, []) for state, _ in self._told]
        return num_steps

    def _count_rows(self) -> None:
        """Those of the batch that has been."""
        self._row_steps.append((len(self._told), self._num_steps - self._num_counted))
        self._num_counted = self._num_steps


def learn(controller: Controller, told: Sequence[Told]) -> None:
    """Have `controller` know what was accepted in some steps, and drafted after them: of each request all at once."""
    first: dict[RowState, list[Outcome]] = {}
    later: dict[RowState, list[Outcome]] = {}
    answers: list[tuple[RowState, int, int]] = []
    num_outputs = 0
    known: set[RowState] = set()
    for batch in told:
        for state, numbers in batch:
            steps = iter(numbers)
            for drafts, accepted, asked, made in zip(steps, steps, steps, steps, strict=True):
                num_outputs += 1 + accepted
                if drafts:
                    (later if state in known else first).setdefault(state, []).append((drafts, accepted))
                if asked:
                    answers.append((state, asked, made))
                known.add(state)
    controller.verified(first)  # another than the first drafter may have made these
    for state in known:
        state.proposed_by = 0
    controller.verified(later)
    for state in known:
        state.proposed_by = -1
    controller.workload.computed(0, num_outputs, 0)
    controller.proposed(0, answers)


def _with_most(row: DraftRow, count: int) -> DraftRow:
    return row if row.max_drafts <= count else row._replace(max_drafts=count)
