"""Possible sizes of a sequence's row, and the rows after which the device can draft without the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...core.batch import RowPlan
from ...core.request import NO_DRAFTS, Request
from .gates import DraftLimits


def row_choices(
    request: Request, budget: int, share: int, limits: DraftLimits, longest: int
) -> Iterator[tuple[RowPlan, int]]:
    """The next rows of a sequence that `budget` allows, the largest first: with room for new drafts, without, without
    drafts at all. Drafts in flight count as right: a row that follows is never longer than that.

    Args:
        share: Most drafts to verify now, and to propose for the next step.
        longest: Most tokens of a sequence.

    Yields:
        (row, number of positions after its end that need blocks too).
    """
    awaits_token, num_pending, is_forced = request.awaits_token, request.num_pending, request.drafts.forced
    known = request.num_unplanned
    num_drafts = 0
    if share or is_forced:
        there = request.in_flight[-1].max_new_drafts if awaits_token else len(request.drafts.token_ids)
        if there:
            most = there if is_forced else min(there, share)
            num_drafts = max(0, min(most, budget - known, limits.room(request, num_pending, num_pending, longest)))
    choices = ((num_drafts, True), (num_drafts, False), (0, False)) if share or is_forced else ((0, False),)
    for count, lookahead in choices:
        num_tokens = min(known + count, budget)
        samples = num_tokens >= known and request.params.pooling is None
        new_drafts = 0
        if samples and share and (lookahead or not limits.extra_slots):
            new_drafts = min(share, _wanted(request, count, limits, longest))
        row = RowPlan(
            request,
            request.num_planned,
            num_tokens,
            count,
            samples,
            new_drafts,
            is_forced=is_forced and count > 0,
            awaits_token=awaits_token and samples,
        )
        yield row, new_drafts + limits.more_slots if new_drafts and limits.extra_slots else 0


def decode_row(request: Request, block_size: int) -> RowPlan | None:
    """The row of a sequence that computes one token without drafts, and has the KV block for it: most rows of a large
    batch. None for others, see `row_choices`."""
    start, awaits_token = request.num_planned, request.awaits_token
    if (
        not (awaits_token or len(request.tokens) - start == 1)
        or start >= len(request.blocks) * block_size
        or request.drafts.forced
        or request.params.pooling is not None
    ):
        return None
    if not awaits_token:
        request.drafts = NO_DRAFTS
    return RowPlan(request, start, 1, 0, samples=True, max_new_drafts=0, awaits_token=awaits_token)


def can_overlap_next(rows: Sequence[RowPlan], limits: DraftLimits) -> bool:
    """Return whether the next step can be planned before the host has the results of these `rows`: the device makes its
    drafts, or there are none, and no row's logits need earlier tokens on the host, as bad words of several tokens
    do."""
    if not limits.overlaps or not rows:
        return False
    if any(row.max_new_drafts for row in rows):
        return all(may_draft_on_device(row, limits) for row in rows)
    return not any(_is_read(row) for row in rows)


def may_draft_on_device(row: RowPlan, limits: DraftLimits) -> bool:
    """Return whether the device can make the drafts after this row, exactly as many as planned, before the host has the
    row's tokens: the row is a decode or a verification, no logits edit needs the tokens on the host, and the drafter
    does not lag."""
    request = row.request
    if request.sampling.reads_tokens or not row.samples or row.num_tokens != 1 + row.num_drafts:
        return False
    if request.num_output_tokens < max(1, request.params.min_tokens):
        return False  # logits edits depend on the number of tokens; or this may be the last row of a prompt
    if not row.max_new_drafts:
        return True
    if row.drafter != 0 or row.max_new_drafts > limits.max_drafts_on_device:
        return False
    if row.end + row.max_new_drafts > limits.max_positions:
        return False
    if not limits.extra_slots:
        return True
    if row.awaits_token:  # a drafter that was not called lags by an amount unknown before the commit
        return bool(request.in_flight[-1].max_new_drafts)
    return request.num_draft_computed >= len(request.tokens)


def _is_read(row: RowPlan) -> bool:
    """True when the logits after this row depend on its tokens, or on their number, on the host."""
    if not row.samples:
        return False
    request = row.request
    return request.sampling.reads_tokens or (
        row.num_drafts > 0 and request.num_output_tokens < request.params.min_tokens
    )


def _wanted(request: Request, num_drafts: int, limits: DraftLimits, longest: int) -> int:
    """Drafts to propose after a row that verifies `num_drafts`."""
    return limits.room(request, 1 + request.awaits_token, request.num_pending + num_drafts + 1, longest)
