"""Trials: now and then some rows of one adapter try a drafter that it does not use, for a few rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ...platform.core.batch import RowPlan
from ...platform.core.request import Request, Status
from .adapters import MOST_TRIAL_SECONDS, AdapterState, RowState

TRIAL_ROUNDS = 4
"""Number of rounds of a trial for each of its rows: enough to outweigh a request's prior of three rounds."""
TRIAL_ROWS = 2
"""Most rows of an adapter in a trial, so that most of a large batch is unaffected."""
TRIAL_DRAFTS = 4
"""Most drafts of a row in a trial: later positions follow the first ones' acceptance."""
TRIAL_SHARE = 0.01
"""Share of time that the trials of all adapters may cost: the smallest that can be measured above noise."""
TRIAL_STEPS = 16.0
"""Cap, in steps, of a trial round's charge for drafting, and for verifying."""


class Trials:
    """The trials of an engine: one adapter at a time, so that all together cost about `TRIAL_SHARE` of the time."""

    def __init__(self, max_drafts: Sequence[int], has_helped: Callable[[AdapterState], bool]) -> None:
        """`max_drafts`: most drafts of a row, by drafter; `has_helped`: whether the trial of an adapter that ends
        showed a gain."""
        self._max_drafts = max_drafts
        self._has_helped = has_helped
        self._adapter: AdapterState | None = None
        self._due_at = 0.0

    @property
    def is_running(self) -> bool:
        """True while an adapter is on trial."""
        return self._adapter is not None

    def begin(self, offering: Sequence[tuple[RowState, int]], now: float) -> None:
        """Start a trial if one is due. `offering`: rows that may draft, and most drafts of each."""
        if self._adapter is not None or now < self._due_at:
            return
        by_adapter: dict[AdapterState, list[tuple[RowState, int]]] = {}
        for state, limit in offering:
            by_adapter.setdefault(state.adapter, []).append((state, limit))
        due = [
            (*adapter.due_trial(now, is_drafting=any(state.num_drafts for state, _ in rows)), index)
            for index, (adapter, rows) in enumerate(by_adapter.items())
        ]
        _, drafter, index = min(due, default=(math.inf, -1, -1))
        if drafter < 0:
            return
        self._adapter, rows = list(by_adapter.items())[index]
        rows = sorted(rows, key=lambda entry: (entry[0].counts[drafter][False].tried[0], entry[0].num_unseen))
        self._adapter.begin_trial(drafter, len(rows[:TRIAL_ROWS]))
        for state, limit in rows[:TRIAL_ROWS]:
            state.trial_rounds, state.drafter = TRIAL_ROUNDS, drafter
            state.num_drafts = min(limit, TRIAL_DRAFTS, self._max_drafts[drafter])

    def count(self, state: RowState, now: float) -> bool:
        """Count one round of a row on trial; returns True if that ends the trial."""
        state.trial_rounds -= 1
        return state.trial_rounds == 0 and self._leave(state.adapter, now)

    def leave(self, state: RowState, now: float) -> bool:
        """Remove a row whose request is gone, if it is on trial; returns True if that ends the trial."""
        was_on_trial, state.trial_rounds = state.trial_rounds > 0, 0
        return was_on_trial and self._leave(state.adapter, now)

    def end_lost(self, rows: Mapping[Request, RowState], now: float) -> bool:
        """Remove rows that have finished or were preempted, which would block the next trial; returns True if the trial
        ends."""
        lost = [state for request, state in rows.items() if request.status is not Status.RUNNING]
        return sum(self.leave(state, now) for state in lost) > 0

    def charge(self, seconds: float, base: float) -> None:
        """Charge the adapter on trial for time that its drafts added to a step that takes `base` without them."""
        assert self._adapter is not None
        self._adapter.trial_cost += min(max(seconds, 0.0), TRIAL_STEPS * base)

    def _leave(self, adapter: AdapterState, now: float) -> bool:
        adapter.trial_rows -= 1
        if adapter.trial_rows > 0:
            return False
        self._adapter = None
        self._due_at = now + min(adapter.trial_cost / TRIAL_SHARE, MOST_TRIAL_SECONDS)
        adapter.end_trial(now, has_helped=self._has_helped(adapter))
        return True


def is_on_trial(row: RowPlan, states: Mapping[Request, RowState]) -> bool:
    """True for a row whose request is on trial."""
    state = states.get(row.request)
    return state is not None and state.trial_rounds > 0
