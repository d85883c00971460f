"""The adaptive proposer where the next step is planned while one runs: it decides when a step is planned.

    choose(N)         who drafts how much after N, of all that is known by then; the step before may be under way
    propose_late(N)   the neural drafter, on the device...
    landed(N)         ...and what N brought is taken in, when the host knows it: in order, and once
    propose(N)        instead of both, where the choice needs the host: prompt lookup drafts, or a drafter is tried,
                      whose trial is over when its drafts are verified; or where the engine cannot have it drafted late

What a step brought is known a step or two later than where all is decided after it. What follows from it is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..platform.core.batch import RowPlan
from ..platform.core.request import Request, Status
from .adaptive import AdaptiveProposer
from .controller import DrafterTraits
from .device_timer import HostTimer, Timer
from .drafter_mix import USUAL_LAG, Launched
from .drafters.base import Drafter, DraftRow, LateDrafter, Proposal, TargetOutput
from .lanes import Lane
from .step_costs import DraftSize
from .stopwatch import LONGEST_GAP, begin_all

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.device_outcome import DeviceOutcome


class LateAdaptive(AdaptiveProposer):
    """`AdaptiveProposer` as a `LateChooser`. `propose_late` and `watch_late` may be called in another thread than the
    rest."""

    def __init__(
        self,
        drafters: Sequence[tuple[DrafterTraits, Drafter]],
        max_drafts: int,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] | None = None,
        timer: Callable[[], Timer] | None = None,
    ) -> None:
        """See `AdaptiveProposer`; the first drafter is a `LateDrafter`."""
        self._make_timer = timer or partial(HostTimer, clock)
        super().__init__(drafters, max_drafts, clock, cpu_clock, self._make_timer)
        first = drafters[0][1]
        assert isinstance(first, LateDrafter)
        self._late = first
        self._lanes: set[Lane] = set()  # of the batch
        self._chosen = False  # the last choice is that of the step: `propose`, if it is asked, decides nothing
        self._unbooked = 0.0  # seconds of steps since the last choice
        self._timed: list[tuple[list[Proposal], DraftSize, Timer]] = []  # drafts of steps that have not landed
        self._looked_up: list[Launched] = []  # drafts of the last step by others than the first one

    def choose(self, rows: Sequence[RowPlan]) -> bool:
        """See `LateChooser`."""
        self._chosen = False
        batch = [row.request for row in rows]
        if batch != self._batch:
            self._update_states(batch)
            self._lanes = {state.lane for state in self._states}
        if self._held is not None:
            for state in self._states:
                state.drafter, state.num_drafts = self._held
        elif self._is_on_trial:
            return False
        else:
            self._choose(rows)
            if self._is_on_trial:
                return False
        counts = []
        for row, state in zip(rows, self._states, strict=True):
            count = min(state.num_drafts, row.max_new_drafts)
            if count and state.drafter != 0:
                return False
            counts.append(min(count, self.needs.max_drafts))
        for row, count in zip(rows, counts, strict=True):
            row.max_new_drafts = count
        return True

    def propose_late(self, rows: Sequence[DraftRow], target: TargetOutput, late: DeviceOutcome) -> list[Proposal]:
        """See `LateDrafter`: by the first drafter."""
        timer = self._make_timer()
        proposals = self._late.propose_late(rows, target, late)
        timer.stop()
        asked = [row.max_drafts for row in rows if row.max_drafts]
        self._timed.append((proposals, DraftSize(len(asked), max(asked)), timer))
        return proposals

    def watch_late(self, rows: Sequence[DraftRow], target: TargetOutput, overshoot: tuple[Tensor | None, int]) -> None:
        """See `LateDrafter`."""
        self._late.watch_late(rows, target, overshoot)

    def landed(self, rows: Sequence[DraftRow], target: TargetOutput, proposals: Sequence[Proposal]) -> None:
        """See `LateChooser`."""
        drafting = self._take_in_drafting()
        gap = self._watch.gap_before(self._watch.clock(), *self._rests.timed(target.seconds + drafting))
        if gap is not None and not begin_all(rows):
            self._take_in_gap(len(rows), gap)
        states = [self._known.get(row.request) for row in rows]
        self._take_in(rows, states, target.seconds)
        answers = []
        for row, state, proposal in zip(rows, states, proposals, strict=True):
            count = len(proposal.drafts.token_ids)
            if count and state is not None and row.request.status is not Status.FINISHED:
                answers.append((state, count, count))
        if self._held is None:
            self._evidence.note(self._controller.proposed, 0, answers)
        self._drafted = any(proposal.drafts.token_ids for proposal in proposals)
        if self._drafted:
            self._evidence.note(self._controller.costs.add_bookkeeping, 0.0)  # the device does not wait for it
        for at, (made, size, timer) in enumerate(self._timed):
            if made is proposals:
                self._drafters.launched.append(Launched(0, size, 0.0, timer))
                del self._timed[: at + 1]  # those before it were of steps that failed
                break
        if self._held is None:
            self._unbooked += drafting + target.seconds
        self._end()

    @property
    def rest(self) -> int:
        """None: every step is planned with its drafts, or without."""
        return 0

    def _next_unmeasured(self, rows: Sequence[DraftRow], seconds: float) -> int:
        """None: others follow than those after which `propose` was asked."""
        return 0

    @property
    def _is_on_trial(self) -> bool:
        """Whether a drafter is being tried: what came of it is taken in before anything else is decided."""
        return any(lane.on_trial for lane in self._lanes)

    def _choose(self, rows: Sequence[RowPlan]) -> None:
        """Decide for the step that was planned, if that is due."""
        sampling = []
        prompt_tokens = 0
        for row, state in zip(rows, self._states, strict=True):
            if row.samples:
                sampling.append((row, state))
            else:
                prompt_tokens += row.num_tokens
        if sampling and self._controller.due(len(sampling), prompt_tokens > 0):
            for row, state in sampling:
                state.limit = row.max_new_drafts
                state.lag = self._lag(row.request) if self._drafters.has_layers else 0
                state.num_outputs = row.request.num_output_tokens + row.request.num_coming
            self._evidence.take_in()  # in the time of the step that runs: decisions cost nothing here
            self._controller.decide([state for _, state in sampling], prompt_tokens)
        self._controller.stepped(self._unbooked)
        self._unbooked = 0.0
        self._chosen = True

    def _lag(self, request: Request) -> int:
        """Tokens that the drafter will have to catch up with, as far as is known."""
        if request.is_late and request.under_way[-1].max_new_drafts:
            return 0
        return max(0, len(request.tokens) + request.num_coming - request.num_draft_computed - USUAL_LAG)

    def _take_in_drafting(self) -> float:
        launched = self._drafters.launched
        self._looked_up = [entry for entry in launched if entry.drafter != 0]
        self._drafters.launched = [entry for entry in launched if entry.drafter == 0]
        return super()._take_in_drafting()

    def _take_in_gap(self, num_rows: int, seconds: float) -> None:
        """Steps after which prompt lookup drafts do not overlap: that the device waits is part of its price."""
        if not self._looked_up:
            super()._take_in_gap(num_rows, seconds)
        waited = max(0.0, seconds) if seconds < LONGEST_GAP else 0.0
        for drafter, size, on_host, _ in self._looked_up:
            self._evidence.note(self._controller.costs.add_draft, drafter, size, on_host + waited)

    def _is_due(self, num_rows: int, mixed: bool) -> bool:
        return not self._chosen and super()._is_due(num_rows, mixed)

    def _stepped(self, seconds: float, steps: int = 1) -> None:
        if not self._chosen:
            super()._stepped(seconds, steps)
        elif self._held is None:
            self._unbooked += seconds
