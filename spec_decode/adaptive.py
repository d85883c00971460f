"""Speculation that pays: decides for every row who drafts for it and how much, from what was measured so far.

    propose(rows, target)
      note         what this step took, which drafts were accepted                                          (evidence)
      decide       every few steps: drafter and k of each row, once all notes are taken in
                                                                         (controller, goodput, step_costs, acceptance)
      draft        a drafter that serves a row sees every row; those that it does not serve have max_drafts 0. One that
                   serves none only watches
      merge        a row's drafts are its drafter's; num_draft_computed is the neural drafter's, whose KV it counts
      rest         while nothing is to be drafted nobody asks, whoever comes and goes, until there is something to
                   decide: such steps are looked at now and then, some at once                                 (rests)

Text does not depend on any of this: whatever is drafted is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..platform.core.request import Request, Status
from .controller import Controller, DrafterTraits
from .device_timer import Timer
from .drafter_mix import USUAL_LAG, Drafters
from .drafters.base import AdapterPreparer, DefersAdapters, Drafter, DraftRow, Proposal, ProposerNeeds, TargetOutput
from .evidence import Evidence
from .lanes import LaneKey, RowState, lane_key
from .outcome import StepOutcome
from .rests import WORTH_WAITING, Rests
from .steady import MEASURED_ONE_IN, SteadySteps
from .step_costs import MIXED
from .stopwatch import LONGEST_GAP, Stopwatch, begin_all

if TYPE_CHECKING:
    from ..models.batch import LayerKV
    from ..platform.core.batch import RowPlan

HELD_RESTS = 4
"""Steps without drafts between two looks, while it is measured what they take."""


class AdaptiveProposer:
    """Drafters composed into one. The first is the one asked for, and the only one that may own layers."""

    def __init__(
        self,
        drafters: Sequence[tuple[DrafterTraits, Drafter]],
        max_drafts: int,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] | None = None,
        timer: Callable[[], Timer] | None = None,
    ) -> None:
        """`max_drafts`: for any row; `clock`: seconds; `cpu_clock`: those that the thread was running, where it is the
        thread that computes; `timer`: where drafts are only launched, and the device takes its time."""
        self._max_drafts = max_drafts
        self._watch = Stopwatch(clock, cpu_clock)
        self._evidence = Evidence()
        has_layers = bool(drafters[0][1].needs.kv_layers)
        self._controller = Controller([traits for traits, _ in drafters], max_drafts, has_layers=has_layers)
        self._drafters = Drafters(
            [drafter for _, drafter in drafters], self._controller, self._evidence, self._watch, timer
        )
        self._first = drafters[0][1]
        self._known: dict[Request, RowState] = {}  # of live requests only
        self._batch: list[Request] = []
        self._states: list[RowState] = []  # of the batch
        self._rest, self._on_trial = 0, False  # and whether each of these steps is measured
        self._resting: set[LaneKey] | None = None  # those of the last batch that was looked at, once they are needed
        self._paused = False  # nothing was drafted once, though drafting goes on
        self._is_put_off = False  # the last step was one to decide after, but all were at their ends
        self._rests = Rests(are_watched=drafters[0][1].needs.watches_rests)
        self._drafted = False  # in the last step that somebody asked after
        self._deciding = 0.0  # seconds in that step
        self._held: tuple[int, int] | None = None
        self._steady = SteadySteps(self._first, self._controller, self._evidence)

    @property
    def needs(self) -> ProposerNeeds:
        """Those of the first drafter; the fallback needs nothing."""
        return self._first.needs

    @property
    def controller(self) -> Controller:
        """What decides, knowing all that was noted so far; not to be told anything."""
        self._take_in_notes()
        return self._controller

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """For all drafters."""
        for drafter in self._drafters:
            drafter.bind(kv, prepare_adapters)

    def forget_adapter(self, digest: bytes) -> None:
        """For all drafters, and the estimates of its acceptance."""
        self._watch_rests()
        self._take_in_notes()
        for drafter in self._drafters:
            drafter.forget_adapter(digest)
        self._controller.forget(digest)
        self._resting = set()  # whoever comes next is looked at

    def adapter_leaves(self, digest: bytes) -> None:
        """See `DefersAdapters`; for the first drafter, which alone may own layers."""
        if isinstance(self._first, DefersAdapters):
            self._watch_rests()
            self._first.adapter_leaves(digest)

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts by the drafter and of the number that promise the best goodput; maybe none."""
        steady = self._steady
        if steady.left > 0:
            steady.left -= 1
            fitting = steady.fit(rows)
            proposals = self._join(rows, target) if fitting is None else steady.draft(fitting, target)
            if proposals is not None:
                if steady.left == 0:  # the next one is to be measured
                    self._drafted = any(proposal.drafts.token_ids for proposal in proposals)
                    self._watch.unsettle()
                    self._end()
                return proposals
            steady.left = 0
        began = self._watch.clock()
        unmeasured = steady.tell()
        self._watch_rests()
        drafting = self._take_in_drafting()
        gap = self._watch.gap_before(began, *self._rests.timed(target.seconds + drafting))
        if begin_all(rows):
            gap = None  # the engine may have waited for them
        self._take_in_rest()
        batch = [row.request for row in rows]
        self._update_states(batch)
        self._drafters.seconds = self._deciding = 0.0
        proposals = self._propose(rows, target)
        ended = self._watch.clock()
        if gap is not None:
            self._take_in_gap(len(rows), gap)
        self._drafted = any(proposal.drafts.token_ids for proposal in proposals)
        if self._drafted:
            self._paused = False
            spent = ended - began - self._drafters.seconds - self._deciding
            like_it = 1 + unmeasured if self._controller.is_steady and self._held is None else 0  # trials are others
            self._evidence.note(self._controller.costs.add_bookkeeping, spent, like_it)
        steady.usual = ended - began - self._deciding
        self._stepped(drafting + target.seconds + ended - began)
        self._rest = self._next_rest(rows)
        self._on_trial = self._controller.drafting or self._held is not None
        steady.left = self._next_unmeasured(rows, target.seconds)
        if steady.left:
            steady.begin(batch, self._states)
            self._watch.lose()
        else:
            self._end()
        return proposals

    def _end(self) -> None:
        """A step ends now: gaps are measured from here."""
        self._watch.end()
        self._rests.time_anew()

    def _next_unmeasured(self, rows: Sequence[DraftRow], seconds: float) -> int:
        """How many of the next steps need not be measured, after one of so many seconds that was."""
        if seconds >= WORTH_WAITING or not self._drafted or self._held is not None or not self._controller.is_steady:
            return 0
        if not all(row.sampled for row in rows):
            return 0
        return max(0, min(MEASURED_ONE_IN - 1, self._controller.steps_left - 1))

    def _join(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal] | None:
        """After a step that is not measured, of others than before, or whom another drafts for: take them over, and
        draft as was decided before; None, if it is to be decided anew."""
        steady, batch = self._steady, [row.request for row in rows]
        if batch != self._batch:
            if not all(row.sampled for row in rows):
                return None
            self._update_states(batch)
            steady.begin(batch, self._states)
            if self._controller.due(len(batch), False, steady.seconds):
                return None
        fitting = steady.fit(rows)
        if fitting is not None:
            return steady.draft_first(fitting, target)
        steady.tell()
        self._note(StepOutcome.of(rows, self._states))
        self._controller.stepped(target.seconds + steady.usual)
        return self._drafters.propose(rows, self._states, target, measures=False, counts=self._held is None)

    def _take_in_notes(self) -> None:
        """Have the controller know all that happened."""
        self._steady.tell()
        self._evidence.take_in()

    @property
    def rest(self) -> int:
        """See `Resting`."""
        return self._rest

    def rested(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """See `Resting`."""
        self._rest -= 1
        if self._rest > 0 and not self._on_trial and self._rests.goes_on(rows, target):
            return
        may_wait = self._rests.add(rows, target)
        if self._rests.is_other_class(len(rows)):
            self._end()  # gaps are those of one class of rows
        if rows[-1].start < rows[-1].request.num_prompt_tokens:
            if self._resting is None:
                self._resting = set(map(lane_key, self._batch))
            may_wait = may_wait and all(lane_key(row.request) in self._resting for row in rows)
            if begin_all(rows):
                self._end()  # the engine may have waited for them
        if not may_wait or self._rest <= 0 or (self._on_trial and [row.request for row in rows] != self._batch):
            self._look_at_rests(rows, target)
        elif self._on_trial:  # each step counts, not the last alone
            self._take_in_resting(rows, target.seconds)

    def _look_at_rests(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """Take in the steps that were put off, of which the last one was just computed."""
        gap = self._watch.gap_before(self._watch.clock(), *self._rests.timed())
        if gap is not None:
            self._take_in_gap(len(rows), gap)
        self._watch_rests()
        batch = [row.request for row in rows]
        if batch != self._batch:
            self._update_states(batch)
            if self._are_drafted_for or self._controller.due(len(batch), False, self._rests.seconds):
                self._rest = 0
        if self._rest <= 0:
            self._rest = self._rest_on(rows, target)
        elif self._on_trial:
            self._take_in_resting(rows, target.seconds)
        self._on_trial = self._controller.drafting or self._held is not None
        self._end()

    def _watch_rests(self) -> None:
        """Look at the steps that were put off."""
        spells = self._rests.look()
        if spells:
            self._first.watch_rests(spells)

    def _rest_on(self, rows: Sequence[RowPlan], target: TargetOutput) -> int:
        """For how many steps nobody need ask, still: as far as a look tells that is much shorter than a decision."""
        if not all(row.samples for row in rows):
            return 0
        if self._watch.is_undisturbed:
            self._take_in_resting(rows, target.seconds)
        self._take_in_rest()
        if self._are_drafted_for:
            return 0
        if self._held is not None:
            return HELD_RESTS
        self._evidence.take_in()
        return self._controller.rest_on(self._states)

    def _take_in_resting(self, rows: Sequence[RowPlan], seconds: float) -> None:
        """Learn what such a step takes, once it is like those that follow."""
        if self._watch.has_settled(seconds):
            if not self._watch.was_settled:
                self._end()
            num_tokens = sum(row.num_tokens for row in rows)
            kind = MIXED if num_tokens > len(rows) else len(rows)
            self._evidence.note(self._controller.costs.add_step, kind, num_tokens, seconds)

    @property
    def _are_drafted_for(self) -> bool:
        """Whether any of the batch gets drafts as soon as it may have some."""
        return any(state.num_drafts for state in self._states)

    def _next_rest(self, rows: Sequence[DraftRow]) -> int:
        """After a step: until something is decided."""
        if self._drafted or self._are_drafted_for or not all(row.sampled for row in rows):
            return 0
        if self._held is not None:
            return HELD_RESTS
        if self._controller.is_steady and not self._paused:
            self._paused = True  # all may be at their end: who comes next is drafted for at once
            return 0
        return self._controller.steps_left

    def _take_in_rest(self) -> None:
        """The steps after which nobody asked have passed all the same."""
        rests = self._rests
        if rests.num_steps:
            self._note(rests.outcome)
            self._stepped(rests.seconds, rests.num_steps)
            rests.taken_in()

    def _stepped(self, seconds: float, steps: int = 1) -> None:
        if self._held is None:
            self._controller.stepped(seconds, steps)

    def _take_in_gap(self, num_rows: int, seconds: float) -> None:
        """Time since the last step that is neither the target's nor a drafter's."""
        if seconds < LONGEST_GAP and (self._drafted or self._watch.was_settled):
            costs = self._controller.costs
            if self._drafted:
                self._evidence.note(costs.add_drafting_gap, num_rows, seconds)
            else:
                self._evidence.note(costs.add_gap, num_rows, seconds, max(1, self._rests.timed_steps))

    @property
    def choices(self) -> list[tuple[int, int]]:
        """(drafter, number of drafts): those whose times, once measured, say most of all others, the best first."""
        most = self._max_drafts
        neural = [(0, count) for count in dict.fromkeys((0, most, 1, max(1, most // 2)))]
        return [*neural, *[(index, most) for index in range(1, len(self._drafters))]]

    def hold(self, drafter: int, num_drafts: int) -> None:
        """Until `release`, every row gets `num_drafts` by that drafter, so far as it may: to measure what that takes.
        Nothing is learned of acceptance."""
        self._held = (drafter, num_drafts)
        self._steady.left = self._rest = 0
        for state in self._states:
            state.drafter, state.num_drafts = drafter, num_drafts

    @property
    def is_settling(self) -> bool:
        """Whether steps without drafts take longer now than they will: the last one with drafts is not long ago."""
        return self._watch.is_settling

    def release(self) -> None:
        """Decide again."""
        self._rest = 0
        self._watch_rests()
        self._take_in_rest()
        self._held = None
        self._evidence.take_in()  # so much is no part of what the next decision takes

    def snapshot(self) -> dict[LaneKey, dict[str, object]]:
        """What the controller thinks of each lane, by `LaneKey`."""
        return self.controller.snapshot()

    # ------------------------------------------------------------------ evidence

    def _update_states(self, batch: list[Request]) -> None:
        if batch == self._batch:
            return
        self._known = {r: state for r, state in self._known.items() if r.status is not Status.FINISHED}
        for request in batch:
            if request not in self._known:
                self._known[request] = self._controller.new_row(lane_key(request))
        self._batch, self._states = batch, [self._known[request] for request in batch]
        self._resting = None

    def _propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        states = self._states
        prompt_tokens = self._take_in(rows, states, target.seconds)
        num_sampling = sum(row.sampled for row in rows)
        was_put_off, self._is_put_off = self._is_put_off, False
        if self._held is not None:
            for state in states:
                state.drafter, state.num_drafts = self._held
        elif num_sampling and self._is_due(num_sampling, prompt_tokens > 0):
            is_vain = self._controller.is_steady and not any(row.max_drafts for row in rows)
            self._is_put_off = is_vain and not was_put_off
            if not self._is_put_off:
                self._decide(rows, states, prompt_tokens)
        proposals = self._drafters.propose(rows, states, target, measures=True, counts=self._held is None)
        self._controller.drafted(self._drafters.seconds)
        return proposals

    def _is_due(self, num_rows: int, mixed: bool) -> bool:
        return self._controller.due(num_rows, mixed)

    def _take_in_drafting(self) -> float:
        return self._drafters.take_in_launched()

    def _take_in(self, rows: Sequence[DraftRow], states: Sequence[RowState | None], seconds: float) -> int:
        """Note what the step tells; returns how many tokens were computed of rows that are not through their prompt."""
        going_on = [None if row.request.status is Status.FINISHED else s for row, s in zip(rows, states, strict=True)]
        outcome = StepOutcome.of(rows, going_on)
        self._note(outcome)
        if outcome.num_drafts:
            self._watch.unsettle()
        if self._watch.is_undisturbed and (outcome.num_drafts or outcome.is_mixed or self._watch.has_settled(seconds)):
            kind = MIXED if outcome.is_mixed else len(rows)
            self._evidence.note(self._controller.costs.add_step, kind, outcome.num_tokens, seconds)
        return outcome.unfinished

    def _note(self, outcome: StepOutcome) -> None:
        self._evidence.note(partial(outcome.tell, counts=self._held is None), self._controller)

    # ------------------------------------------------------------------ drafting

    def _decide(self, rows: Sequence[DraftRow], states: Sequence[RowState], prompt_tokens: int) -> None:
        """Have the controller decide, which is told everything first; and what that takes."""
        began = self._watch.clock()
        self._evidence.take_in()
        sampling = []
        for row, state in zip(rows, states, strict=True):
            if row.sampled:
                state.limit = row.max_drafts
                if self._drafters.has_layers:
                    state.lag = max(0, len(row.tokens) - row.num_draft_valid - USUAL_LAG)
                    state.num_outputs = len(row.tokens) - row.request.num_prompt_tokens
                sampling.append(state)
        self._controller.decide(sampling, prompt_tokens)
        self._deciding = self._watch.clock() - began
        self._controller.decided(self._deciding)
