"""Steps after which drafts are made as was decided before, and of which nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .acceptance import Outcome
from .evidence import Evidence
from .lanes import RowState
from .outcome import StepOutcome
from .proposer import DraftRow, Proposal

if TYPE_CHECKING:
    from ..platform.core.request import Request
    from .controller import Controller

MEASURED_ONE_IN = 32
"""Short steps between decisions that are measured: that takes a small model a few per cent of its time."""


SteadyStep = tuple[Sequence[DraftRow], Sequence[RowState], list[int]]
"""Rows, their states, and the first drafter's numbers of drafts; none of them where others may draft too."""


class SteadySteps:
    """What they told, until somebody asks."""

    def __init__(self) -> None:
        self.left = 0
        """Of the next steps, those that are like that."""
        self.usual = 0.0
        """Seconds that drafting, and all that belongs to it, took when it was measured last."""
        self.seconds = 0.0
        """Of those that nobody was told of."""
        self._steps: list[SteadyStep] = []
        self._batch: Sequence[Request] = ()
        self._states: Sequence[RowState] = ()
        self._counts: list[int] = []

    def begin(self, batch: Sequence[Request], states: Sequence[RowState]) -> None:
        """The next steps are of these requests; none, if another than the first drafter drafts for one of them."""
        self._states, self._counts = states, [state.num_drafts for state in states]
        self._batch = batch if not any(state.drafter and state.num_drafts for state in states) else ()

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

    def add(self, rows: Sequence[DraftRow], proposals: Sequence[Proposal], seconds: float) -> None:
        """A step of which the target took `seconds`, and what the first drafter made after it; nothing where others
        may have drafted too."""
        # Not the proposals: they may hold large tensors.
        self._steps.append((rows, self._states, [len(made.drafts.token_ids) for made in proposals]))
        self.seconds += seconds + self.usual

    def tell(self, controller: Controller, evidence: Evidence) -> None:
        """That so much time has passed; what was accepted and drafted is `evidence`."""
        if self._steps:
            controller.stepped(self.seconds, len(self._steps))
            evidence.note(learn, controller, self._steps)
            self._steps, self.seconds = [], 0.0


def learn(controller: Controller, steps: Sequence[SteadyStep]) -> None:
    """Have `controller` know what was accepted in some steps, and drafted after them: of each request all at once."""
    outcomes: dict[RowState, list[Outcome]] = {}
    answers: list[tuple[RowState, int, int]] = []
    num_prompts = num_outputs = num_answers = 0
    for number, (rows, states, counts) in enumerate(steps):
        outcome = StepOutcome.of(rows, states)
        if number == 0:
            outcome.tell(controller)  # another than the first drafter may have drafted before it
        else:
            num_prompts += outcome.num_prompts
            num_outputs += outcome.num_outputs
            num_answers += outcome.num_answers
            for state, num_drafts, num_accepted in outcome.verified:
                if num_drafts:
                    outcomes.setdefault(state, []).append((num_drafts, num_accepted))
        if counts:
            answers += [
                (s, row.max_drafts, n) for row, s, n in zip(rows, states, counts, strict=True) if row.max_drafts
            ]
    for state in outcomes:
        state.proposed_by = 0
    controller.verified(outcomes)
    controller.workload.computed(num_prompts, num_outputs, num_answers)
    controller.proposed(0, answers)


def _with_most(row: DraftRow, count: int) -> DraftRow:
    return row if row.max_drafts <= count else row._replace(max_drafts=count)
