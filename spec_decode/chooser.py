"""Verbs of drafters that choose how much is drafted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from .drafters.base import DraftRow, NoDrafter, Proposal, TargetOutput

if TYPE_CHECKING:
    from ..platform.core.batch import RowPlan


@runtime_checkable
class Resting(Protocol):
    """A drafter that says when it need not be asked, and drafts need not be planned for: such a step is one without
    speculation."""

    @property
    def rest(self) -> int:
        """For how many of the next steps, as far as is known now: looked at after each of them. None of their rows has
        drafts; sequences may come and go meanwhile."""
        ...

    def rested(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """Stands in for `propose` in such a step: take in what would be lost otherwise, and see who runs. The sequences
        are still as before the step; what the drafter's own layers have of them stays what it is."""
        ...


@runtime_checkable
class LateChooser(Protocol):
    """A drafter that decides how many drafts there are: when a step is planned, of what it knows by then."""

    def choose(self, rows: Sequence[RowPlan]) -> bool:
        """Asked once for each step that is planned, before any `propose` for it: lower its rows' `max_new_drafts` to
        what is wanted of `propose` on the device. False: `propose` is to be asked when the outcome is known."""
        ...

    def landed(self, rows: Sequence[DraftRow], target: TargetOutput, proposals: Sequence[Proposal]) -> None:
        """What came of a step for which `propose` (or `watch`) was asked on the device and gave `proposals`. Steps
        come in their order, those for which `propose` is asked later among them."""
        ...


class Off(NoDrafter):
    """No speculation, which is not asked."""

    @property
    def rest(self) -> int:
        """For ever."""
        return sys.maxsize

    def rested(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """Nothing to learn."""


def as_draft_rows(rows: Sequence[RowPlan]) -> list[DraftRow]:
    """Rows of a step without drafts, for `Drafter.watch`."""
    found, first = [], 0
    for row in rows:
        request = row.request
        computed = request.num_draft_computed
        found.append(
            DraftRow(request, request.tokens, row.end, computed, 0, request.blocks, row.samples, row.start, first)
        )
        first += row.num_tokens
    return found
