"""Token budget of a step: the rows planned so far, and the tokens left for others."""

from __future__ import annotations

from ...core.batch import RowPlan
from ...core.config import SchedulerConfig
from ...core.request import Request
from .gates import DraftLimits
from .request_queue import RequestQueue


class StepBudget:
    """The rows planned so far, and how many tokens are left for others."""

    __slots__ = ("for_drafts", "for_prompts", "num_left", "rows", "was_short")

    def __init__(self, num_tokens: int, for_drafts: int) -> None:
        self.num_left = num_tokens
        self.for_drafts = for_drafts
        """Tokens of `num_left` that drafts may take."""
        self.for_prompts = num_tokens
        """Tokens of `num_left` for prompts that are not urgent; below 0 if urgent ones took more."""
        self.rows: dict[Request, RowPlan] = {}
        """Planned rows, in the order of planning."""
        self.was_short = False
        """True when a running sequence found too few blocks."""

    def left_for(self, request: Request, queue: RequestQueue) -> int:
        """Tokens that this sequence may have. Prompts are throttled for sequences that decode, except those of an
        account that was served less than these."""
        if self.for_prompts < self.num_left and queue.is_behind(request):
            return self.num_left
        return min(self.num_left, self.for_prompts)

    def add(self, row: RowPlan) -> None:
        """Plan a row of a sequence that has none."""
        self.rows[row.request] = row
        self.num_left -= row.num_tokens
        self.for_prompts -= row.num_tokens
        self.for_drafts -= 0 if row.is_forced else row.num_drafts

    def drop(self, request: Request) -> None:
        """Remove the row of this sequence, and return its tokens to the budget."""
        row = self.rows.pop(request, None)
        if row is not None:
            self.num_left += row.num_tokens
            self.for_prompts += row.num_tokens
            self.for_drafts += 0 if row.is_forced else row.num_drafts


def draft_budget(limits: DraftLimits, config: SchedulerConfig, queue: RequestQueue) -> int:
    """Tokens of a step that are left for all drafts together. Long and waiting prompts count with a quarter of the
    budget, so that neither they nor drafts stall."""
    if not limits.num_drafts:
        return 0
    quarter = max(1, config.max_num_batched_tokens // 4)
    own = sum(min(len(request.tokens) - request.num_computed_tokens, quarter) for request in queue.running)
    if queue.num_waiting and queue.num_running < config.max_num_seqs:
        own += quarter
    return max(0, config.max_num_batched_tokens - own)
