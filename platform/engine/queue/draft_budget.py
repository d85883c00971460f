"""How much of a step drafts may take."""

from __future__ import annotations

from ...core.config import SchedulerConfig
from .fair import RequestQueue
from .gates import DraftLimits


def draft_budget(limits: DraftLimits, config: SchedulerConfig, queue: RequestQueue) -> int:
    """Tokens of a step that are left for all drafts together. Of long prompts, and of those that wait, a quarter of the
    budget counts, so that neither they nor drafts stand still."""
    if not limits.num_drafts:
        return 0
    quarter = max(1, config.max_num_batched_tokens // 4)
    own = sum(min(len(request.tokens) - request.num_computed, quarter) for request in queue.running)
    if queue.num_waiting and queue.num_running < config.max_num_seqs:
        own += quarter
    return max(0, config.max_num_batched_tokens - own)
