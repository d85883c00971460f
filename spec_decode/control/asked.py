"""Drafts requested after a step, which account for the time until the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...platform.core.batch import RowPlan
from ...platform.core.request import Request
from .adapters import RowState


class Asked(NamedTuple):
    """Drafts that are asked for after a step."""

    drafter: int
    num_drafts: int
    """Most drafts of a row."""
    num_rows: int
    lag: int
    """Tokens that the drafter had not seen."""


def is_decode(row: RowPlan) -> bool:
    """True for a row that computes an output token and its drafts. Before the first one the engine may have idled."""
    return row.samples and row.num_tokens == 1 + row.num_drafts and row.start >= row.request.num_prompt_tokens


def is_overridden(row: RowPlan) -> bool:
    """True if prompt lookup made the drafts after a row that were planned for the first drafter."""
    return row.request.drafts.drafter > row.drafter


def asked_after(rows: Sequence[RowPlan], states: Mapping[Request, RowState]) -> Asked | None:
    """Drafts requested after a step of these rows, but for those that prompt lookup made instead; None if two drafters
    are used, or prompt lookup made all."""
    asked: dict[int, int] = {}
    made = [row for row in rows if not is_overridden(row)]
    if len(made) < len(rows) and not any(row.max_new_drafts for row in made):
        return None
    for row in made:
        if row.max_new_drafts > asked.get(row.drafter, 0):
            asked[row.drafter] = row.max_new_drafts
    if not asked:
        return Asked(0, 0, len(rows), 0)
    if len(asked) > 1:
        return None
    [(drafter, count)] = asked.items()
    lags = [state.lag for row in rows if row.max_new_drafts and (state := states.get(row.request)) is not None]
    return Asked(drafter, count, len(rows), 0 if drafter else sum(lags))
