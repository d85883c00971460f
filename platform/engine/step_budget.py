"""A step's plan in the making."""

from __future__ import annotations

from ..core.batch import RowPlan
from ..core.request import Request


class StepBudget:
    """The rows planned so far, and how many tokens are left for others."""

    __slots__ = ("for_drafts", "num_left", "rows", "was_short")

    def __init__(self, num_tokens: int, for_drafts: int) -> None:
        self.num_left = num_tokens
        self.for_drafts = for_drafts
        """Of them, those that drafts may take."""
        self.rows: dict[Request, RowPlan] = {}
        """In the order of planning."""
        self.was_short = False
        """Whether running sequences found too few blocks."""

    def add(self, row: RowPlan) -> None:
        """Plan a row of a sequence that has none."""
        self.rows[row.request] = row
        self.num_left -= row.num_tokens
        self.for_drafts -= row.num_drafts

    def drop(self, request: Request) -> None:
        """Plan nothing for this sequence; what its row would have taken is left again."""
        row = self.rows.pop(request, None)
        if row is not None:
            self.num_left += row.num_tokens
            self.for_drafts += row.num_drafts
