"""Speculation that pays: decides for every row who drafts for it and how much, from what was measured so far.

    propose(rows, target)
      take in      what this step took, which drafts were accepted
      decide       every few steps: drafter and k of each row            (controller, goodput, step_costs, acceptance)
      draft        a drafter that serves a row sees every row; those that it does not serve have max_drafts 0. One that
                   serves none only watches
      merge        a row's drafts are its drafter's; num_draft_computed is the neural drafter's, whose KV it counts
      rest         while nothing is to be drafted nobody asks, whoever comes and goes, until there is something to
                   decide: what such steps took is taken in now and then, all at once

Text does not depend on any of this: whatever is drafted is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from ..platform.core.request import NO_DRAFTS, Request, Status
from .controller import Controller, DrafterTraits
from .device_timer import Timer
from .lanes import RowState
from .probing import SETTLING, SOON_SETTLED, settling_steps
from .proposer import AdapterPreparer, Drafter, DraftRow, Proposal, ProposerNeeds, TargetOutput
from .rests import Rests
from .step_costs import MIXED, DraftSize

if TYPE_CHECKING:
    from ..models.batch import LayerKV
    from ..platform.core.batch import RowPlan

USUAL_LAG = 2
"""Tokens that a drafter computes anyway before its first draft: the newest one, and one whose draft was the last."""
_UNDISTURBED = 0.8
"""Share of its time that a thread must have been running, for that time to count: another process had the rest."""
LONGEST_GAP = 1.0
"""Seconds between two steps after which the engine was idle, not slow."""


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
        self._drafters = [proposer for _, proposer in drafters]
        self._has_layers = bool(self._drafters[0].needs.kv_layers)
        self._max_drafts = max_drafts
        self._clock = clock
        self._cpu_clock = cpu_clock or clock
        self._timer = timer
        self._launched: list[tuple[int, DraftSize, float, Timer]] = []
        """Drafting that was launched: the drafter, what for, the host's seconds, the device's."""
        self._controller = Controller([traits for traits, _ in drafters], max_drafts, has_layers=self._has_layers)
        self._known: dict[Request, RowState] = {}  # of live requests only
        self._batch: list[Request] = []
        self._states: list[RowState] = []  # of the batch
        self._rest = 0
        self._rests = Rests()
        self._drafted = False  # the last step that somebody asked after
        self._in_drafters = 0.0  # seconds of this step
        self._held: tuple[int, int] | None = None
        self._ended: tuple[float, float] | None = None  # when the last step's drafting did, by both clocks
        self._undisturbed = True  # the step, up to its drafting
        self._settles = 0.0  # when a step without drafts will be like others

    @property
    def needs(self) -> ProposerNeeds:
        """Those of the first drafter; the fallback needs nothing."""
        return self._drafters[0].needs

    @property
    def controller(self) -> Controller:
        """What decides; to be read only."""
        return self._controller

    def bind(self, kv: Sequence[LayerKV], prepare_adapters: AdapterPreparer) -> None:
        """For all drafters."""
        for drafter in self._drafters:
            drafter.bind(kv, prepare_adapters)

    def forget_adapter(self, digest: bytes) -> None:
        """For all drafters, and the estimates of its acceptance."""
        for drafter in self._drafters:
            drafter.forget_adapter(digest)
        self._controller.forget(digest)

    def propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        """Drafts by the drafter and of the number that promise the best goodput; maybe none."""
        batch = [row.request for row in rows]
        drafting = self._take_in_drafting()
        began = self._clock()
        gap = self._gap_before(began, target.seconds + drafting)
        self._take_in_rest()
        if batch != self._batch:
            self._batch = batch
            self._update_states(batch)
        self._in_drafters = 0.0
        proposals = self._propose(rows, target)
        ended = self._clock()
        if gap is not None:
            self._take_in_gap(gap)
        self._drafted = any(proposal.drafts.token_ids for proposal in proposals)
        if self._drafted:
            self._controller.costs.add_bookkeeping(ended - began - self._in_drafters)
        self._stepped(drafting + target.seconds + ended - began)
        self._rest = self._next_rest(rows, target.seconds)
        self._ended = (ended, self._cpu_clock())
        return proposals

    @property
    def rest(self) -> int:
        """See `Resting`."""
        return self._rest

    def rested(self, rows: Sequence[RowPlan], target: TargetOutput) -> None:
        """See `Resting`."""
        self._rest -= 1
        self._rests.add(rows, target.seconds)
        self._drafters[0].rested(rows, target)
        batch = [row.request for row in rows]
        if batch != self._batch:
            self._batch = batch
            self._update_states(batch)
            if self._are_drafted_for or self._controller.due(len(batch), False):
                self._rest = 0
        if self._rest <= 0:
            self._rest = self._rest_on(rows, target)
        elif self._controller.drafting:  # a trial of no drafts: each step counts, not the last alone
            self._take_in_resting(rows, target.seconds)

    def _rest_on(self, rows: Sequence[RowPlan], target: TargetOutput) -> int:
        """For how many steps nobody need ask, still: as far as a look tells that is much shorter than a decision."""
        if not all(row.samples for row in rows):
            return 0
        began = self._clock()
        gap = self._gap_before(began, 0.0, 0)
        if gap is not None:
            self._take_in_gap(gap)
        if self._undisturbed:
            self._take_in_resting(rows, target.seconds)
        self._take_in_rest()
        self._ended = (self._clock(), self._cpu_clock())
        return 0 if self._are_drafted_for else self._controller.rest_on(self._states)

    def _take_in_resting(self, rows: Sequence[RowPlan], seconds: float) -> None:
        """Learn what such a step takes, once it is like those that follow."""
        if self._has_settled(seconds):
            num_tokens = sum(row.num_tokens for row in rows)
            mixed = num_tokens > len(rows)
            self._controller.costs.add_step(MIXED if mixed else len(rows), num_tokens, seconds)

    @property
    def _are_drafted_for(self) -> bool:
        """Whether any of the batch gets drafts as soon as it may have some."""
        return any(state.num_drafts for state in self._states)

    def _next_rest(self, rows: Sequence[DraftRow], seconds: float) -> int:
        """After a step of so many seconds: until something is decided, or steps are like others again."""
        if self._drafted or self._held is not None or self._are_drafted_for or not all(row.sampled for row in rows):
            return 0
        left = self._controller.steps_left
        return left if self._has_settled(seconds) else min(left, settling_steps(seconds))

    def _take_in_rest(self) -> None:
        """The steps after which nobody asked have passed all the same."""
        rests = self._rests
        if rests.num_steps:
            self._controller.workload.computed(rests.num_prompts, rests.num_outputs)
            self._stepped(rests.seconds, rests.num_steps)
            self._rests = Rests()

    def _stepped(self, seconds: float, steps: int = 1) -> None:
        if self._held is None:
            self._controller.stepped(seconds, steps)

    def _gap_before(self, began: float, computing: float, num_steps: int = 1) -> float | None:
        """Seconds between two steps, since the last time that was taken in: but for rests, the `num_steps` last ones
        computed for `computing` until `began`; also finds whether another process had the processor meanwhile."""
        if self._ended is None:
            return None
        spent = began - self._ended[0]
        self._undisturbed = self._cpu_clock() - self._ended[1] >= _UNDISTURBED * spent
        between = spent - computing - self._rests.seconds
        return between / (num_steps + self._rests.num_steps) if between < LONGEST_GAP else between

    def _has_settled(self, seconds: float) -> bool:
        """Whether a step without drafts that has ended now, and took `seconds`, is like those that follow."""
        return seconds >= SOON_SETTLED or self._clock() - seconds >= self._settles

    def _take_in_gap(self, seconds: float) -> None:
        """Time since the last step that is neither the target's nor a drafter's."""
        assert self._ended is not None
        if seconds < LONGEST_GAP and (self._drafted or self._ended[0] >= self._settles):
            self._controller.costs.add_gap(seconds, drafting=self._drafted)

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

    @property
    def is_settling(self) -> bool:
        """Whether steps without drafts take longer now than they will: the last one with drafts is not long ago."""
        return self._clock() < self._settles

    def release(self) -> None:
        """Decide again."""
        self._held = None

    def snapshot(self) -> dict[Hashable, dict[str, object]]:
        """What the controller thinks of each adapter, by its content's digest (b"" is the base model)."""
        return self._controller.snapshot()

    # ------------------------------------------------------------------ evidence

    def _update_states(self, batch: Sequence[Request]) -> None:
        for request in [request for request in self._known if request.status is Status.FINISHED]:
            del self._known[request]
        for request in batch:
            if request not in self._known:
                self._known[request] = self._controller.new_row(request.text_namespace[1])
        self._states = [self._known[request] for request in batch]

    def _propose(self, rows: Sequence[DraftRow], target: TargetOutput) -> list[Proposal]:
        states = self._states
        prompt_tokens = self._take_in(rows, states, target.seconds)
        num_sampling = sum(row.sampled for row in rows)
        if self._held is not None:
            for state in states:
                state.drafter, state.num_drafts = self._held
        elif num_sampling and self._is_due(num_sampling, prompt_tokens > 0):
            self._decide(rows, states, prompt_tokens)
        counts = [min(s.num_drafts, row.max_drafts) for row, s in zip(rows, states, strict=True)]
        proposals = self._without_drafts(rows)
        if any(counts):
            return self._draft(rows, states, counts, target, proposals)
        for drafter in self._drafters:
            drafter.watch(rows, target)
        return proposals

    def _is_due(self, num_rows: int, mixed: bool) -> bool:
        return self._controller.due(num_rows, mixed)

    def _take_in_drafting(self) -> float:
        """Learn what the last drafts took, which the device has made by now; returns its seconds after the host's."""
        launched, self._launched = self._launched, []
        behind = 0.0
        for drafter, size, on_host, timer in launched:
            seconds = timer.seconds()
            self._controller.costs.add_draft(drafter, size, max(seconds, on_host))
            behind += max(0.0, seconds - on_host)
        return behind

    def _take_in(self, rows: Sequence[DraftRow], states: Sequence[RowState | None], seconds: float) -> int:
        """Learn from the step; returns how many tokens were computed of rows that are not through their prompt. Of rows
        that were computed in vain, as their requests had ended, what they took is all that counts."""
        controller = self._controller
        num_tokens = num_drafts = prompt_tokens = num_prompts = num_outputs = 0
        mixed = False
        for row, state in zip(rows, states, strict=True):
            num_drafts += row.num_drafts
            computed = row.num_valid + row.num_drafts - row.num_accepted - row.start
            num_tokens += computed
            if not row.sampled:
                prompt_tokens += computed
            if computed != 1 + row.num_drafts:
                mixed = True
                num_prompts += computed
            if state is None or row.request.status is Status.FINISHED:
                continue
            if row.sampled:
                num_outputs += len(row.tokens) - row.num_valid + row.num_accepted
            if row.num_drafts and self._held is None:
                controller.verified(state, row.num_drafts, row.num_accepted)
            state.proposed_by = -1
        if self._held is None:
            controller.workload.computed(num_prompts, num_outputs)
        if num_drafts:
            self._settles = self._clock() + SETTLING
        if self._undisturbed and (num_drafts or mixed or self._has_settled(seconds)):
            controller.costs.add_step(MIXED if mixed else len(rows), num_tokens, seconds)
        return prompt_tokens

    # ------------------------------------------------------------------ drafting

    def _decide(self, rows: Sequence[DraftRow], states: Sequence[RowState], prompt_tokens: int) -> None:
        sampling = []
        for row, state in zip(rows, states, strict=True):
            if row.sampled:
                state.limit = row.max_drafts
                if self._has_layers:
                    state.lag = max(0, len(row.tokens) - row.num_draft_valid - USUAL_LAG)
                sampling.append(state)
        self._controller.decide(sampling, prompt_tokens)

    def _without_drafts(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """What the first drafter answers when it is not asked for anything."""
        if self._has_layers:
            return [Proposal(NO_DRAFTS, row.num_draft_valid) for row in rows]
        return [Proposal(NO_DRAFTS, len(row.tokens)) for row in rows]

    def _draft(
        self,
        rows: Sequence[DraftRow],
        states: Sequence[RowState],
        counts: Sequence[int],
        target: TargetOutput,
        results: list[Proposal],
    ) -> list[Proposal]:
        """Fill in `results`, one for each row. The first drafter sees all rows, the others those that they serve."""
        for index, drafter in enumerate(self._drafters):
            asked = {
                at: count
                for at, (count, state) in enumerate(zip(counts, states, strict=True))
                if count and state.drafter == index
            }
            if not asked:
                drafter.watch(rows, target)
                continue
            seen = range(len(rows)) if index == 0 else asked
            own_rows = [_asking(rows[at], asked.get(at, 0)) for at in seen]
            timer = self._timer() if self._timer is not None else None
            began, running = self._clock(), self._cpu_clock()
            found = drafter.propose(own_rows, target)
            seconds = self._clock() - began
            self._in_drafters += seconds
            if timer is not None:
                timer.stop()
                self._launched.append((index, self._size(index, own_rows), seconds, timer))
            elif self._cpu_clock() - running >= _UNDISTURBED * seconds:
                self._controller.costs.add_draft(index, self._size(index, own_rows), seconds)
            for at, proposal in zip(seen, found, strict=True):
                # What is computed is the first drafter's to say.
                results[at] = proposal if index == 0 else Proposal(proposal.drafts, results[at].num_draft_computed)
            if self._held is None:
                self._controller.proposed(
                    index, [(states[at], count, len(results[at].drafts.token_ids)) for at, count in asked.items()]
                )
        self._controller.drafted(self._in_drafters)
        return results

    def _size(self, drafter: int, rows: Sequence[DraftRow]) -> DraftSize:
        """What drafting for `rows` is made of."""
        served = passes = lag = 0
        mixed = False
        for row in rows:
            if row.max_drafts:
                served += 1
                passes = max(passes, row.max_drafts)
                if self._has_layers:
                    lag += max(0, len(row.tokens) - row.num_draft_valid - USUAL_LAG - row.num_accepted)
            mixed = mixed or not row.sampled
        if drafter > 0 or lag <= 4 * served:
            lag = 0
        return DraftSize(served, passes, lag, mixed and drafter == 0)


def _asking(row: DraftRow, count: int) -> DraftRow:
    """`row`, asking for `count` drafts."""
    return row if row.max_drafts == count else row._replace(max_drafts=count)
