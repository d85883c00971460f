"""How large a sequence's row may be, and whether drafts can be made after it without the host."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.batch import RowPlan
from ..core.request import Request
from .gates import DraftLimits


def row_choices(
    request: Request, budget: int, share: int, limits: DraftLimits, longest: int
) -> Iterator[tuple[RowPlan, int]]:
    """The next rows of a sequence that `budget` allows, the largest first: with room for new drafts, without, without
    drafts at all. What is under way is taken to be right wholly: a row that follows is never longer than that.

    Args:
        share: Most drafts to verify now, and to propose for the next step.
        longest: A sequence may become.

    Yields:
        a row, and the positions after its end that need blocks too.
    """
    is_late, coming = request.is_late, request.num_coming
    known = len(request.tokens) + coming - request.num_planned
    num_drafts = 0
    if share:
        there = request.under_way[-1].max_new_drafts if is_late else len(request.drafts.token_ids)
        if there:
            num_drafts = max(0, min(there, budget - known, share, limits.room(request, coming, coming, longest)))
    # A drafter that was not asked has fallen behind meanwhile: nobody knows how far before the commit.
    has_lag = is_late and limits.extra_slots and not request.under_way[-1].max_new_drafts
    choices = ((num_drafts, True), (num_drafts, False), (0, False)) if share else ((0, False),)
    for count, lookahead in choices:
        num_tokens = min(known + count, budget)
        samples = num_tokens >= known
        new_drafts = 0
        if samples and share and (lookahead or not limits.extra_slots) and not has_lag:
            new_drafts = min(share, _wanted(request, count, limits, longest))
        row = RowPlan(request, request.num_planned, num_tokens, count, samples, new_drafts, is_late and samples)
        yield row, new_drafts if limits.extra_slots else 0


def may_draft_late(row: RowPlan, limits: DraftLimits, longest: int) -> bool:
    """Whether the device can make the drafts after this row, exactly as many as planned, before the host knows what the
    row brought: of a decode or a verification, of a sequence whose logits do not depend on its tokens, that the drafter
    does not lag behind, and that gets drafts if it may have any."""
    request = row.request
    if request.reads_tokens or not row.samples or row.num_tokens != 1 + row.num_drafts:
        return False
    if request.num_output_tokens < max(1, request.params.min_tokens):
        return False  # how many tokens there are decides about logits; or this may be the last of a prompt
    if not row.max_new_drafts:
        return not _wanted(request, row.num_drafts, limits, longest)
    if row.end + row.max_new_drafts > limits.max_positions:
        return False
    return row.is_late or not limits.extra_slots or request.num_draft_computed >= len(request.tokens)


def _wanted(request: Request, num_drafts: int, limits: DraftLimits, longest: int) -> int:
    """Drafts to propose after a row that verifies `num_drafts`."""
    return limits.room(request, 1 + request.is_late, request.num_coming + num_drafts + 1, longest)
