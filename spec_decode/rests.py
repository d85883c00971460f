"""What happened in steps after which nobody was asked for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..platform.core.batch import RowPlan


class Rests:
    """Those that are not taken in yet."""

    __slots__ = ("num_outputs", "num_prompts", "num_steps", "seconds")

    def __init__(self) -> None:
        self.num_steps = self.num_prompts = self.num_outputs = 0  # of prompts and outputs: tokens
        self.seconds = 0.0
        """That the target took."""

    def add(self, rows: Sequence[RowPlan], seconds: float) -> None:
        """One more."""
        self.num_steps += 1
        self.seconds += seconds
        self.num_outputs += len(rows)
        for row in rows:
            if row.num_tokens > 1 or not row.samples:
                self.num_prompts += row.num_tokens
                self.num_outputs -= not row.samples
