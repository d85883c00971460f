"""What a step brought, as far as it says something of drafts and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .drafters.base import DraftRow
from .lanes import RowState
from .workload import RowSteps

if TYPE_CHECKING:
    from .controller import Controller


class StepOutcome(NamedTuple):
    """Of rows that were computed in vain, as their requests had ended, what they took is all that counts."""

    num_tokens: int = 0
    """That were computed, drafts among them."""
    num_drafts: int = 0
    unfinished: int = 0
    """Tokens that were computed of rows that are not through their prompt."""
    num_prompts: int = 0
    """Tokens of all rows with more than one besides drafts: those of prompts..."""
    num_outputs: int = 0
    """...and of answers..."""
    num_answers: int = 0
    """...that begin."""
    is_mixed: bool = False
    """Whether there was such a row."""
    verified: Sequence[tuple[RowState, int, int]] = ()
    """Requests, with their numbers of drafts that were judged and of right ones."""
    row_steps: RowSteps = ()
    """Of steps without prompts."""

    @classmethod
    def of(cls, rows: Sequence[DraftRow], states: Sequence[RowState | None]) -> StepOutcome:
        """Of a step's rows; None: the request had ended."""
        num_tokens = num_drafts = unfinished = num_prompts = num_outputs = num_answers = 0
        is_mixed = False
        verified = []
        for row, state in zip(rows, states, strict=True):
            drafts = row.num_drafts
            num_drafts += drafts
            computed = row.num_valid + drafts - row.num_accepted - row.start
            num_tokens += computed
            if not row.sampled:
                unfinished += computed
            if computed != 1 + drafts:
                is_mixed = True
                num_prompts += computed
                num_answers += row.sampled
            if state is None:
                continue
            judged = drafts
            if row.sampled:
                new = len(row.tokens) - row.num_valid  # they may have grown since
                num_outputs += min(new, 1) + row.num_accepted
                if new == 0:  # a draft ended it: those behind it were not judged
                    judged = row.num_accepted
            verified.append((state, judged, row.num_accepted))
        row_steps = () if is_mixed else ((len(rows), 1),)
        return cls(
            num_tokens, num_drafts, unfinished, num_prompts, num_outputs, num_answers, is_mixed, verified, row_steps
        )

    def tell(self, controller: Controller, *, counts: bool = True) -> None:
        """Have `controller` know it, if it `counts`; the next step verifies what is proposed after this."""
        if counts:
            controller.workload.computed(self.num_prompts, self.num_outputs, self.num_answers)
            controller.workload.had(self.row_steps)
            controller.verified({state: [(n, accepted)] for state, n, accepted in self.verified if n})
        for state, _, _ in self.verified:
            state.proposed_by = -1
