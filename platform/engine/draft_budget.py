"""How much of a step drafts may take, and whether it is planned with drafts at all."""

from __future__ import annotations

from ..core.config import SchedulerConfig
from .fair import Turns
from .gates import DraftLimits


class DraftBudget:
    """Asked once for each step that is planned."""

    __slots__ = ("_max_num_seqs", "_max_tokens", "_num_drafts", "_turns", "rest")

    def __init__(self, limits: DraftLimits, config: SchedulerConfig, turns: Turns) -> None:
        self._num_drafts = limits.num_drafts
        self._max_tokens = config.max_num_batched_tokens
        self._max_num_seqs = config.max_num_seqs
        self._turns = turns
        self.rest = 0
        """For so many steps nobody is asked for drafts: as the last step said."""

    @property
    def next_rests(self) -> bool:
        """Whether the next step is one without speculation."""
        return self.rest > 0 or not self._num_drafts

    def num_tokens(self) -> int:
        """What the sequences' own tokens leave of a step, for all drafts together. Of long prompts, and of those that
        wait, a quarter of the budget counts, so that neither they nor drafts stand still."""
        if not self._num_drafts:
            return 0
        quarter = max(1, self._max_tokens // 4)
        own = sum(min(len(request.tokens) - request.num_computed, quarter) for request in self._turns.running)
        if self._turns.num_waiting and self._turns.num_running < self._max_num_seqs:
            own += quarter
        return max(0, self._max_tokens - own)
