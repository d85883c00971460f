"""SpeculationPolicy: each row's drafter and number of drafts, chosen before a step runs. See the package."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from ...platform.core.batch import RowPlan, StepPlan, StepResult
from ...platform.core.request import NO_DRAFTS, Drafts, Request, Status
from .adapters import AdapterState, AdapterStates, DrafterTraits, RowState
from .asked import Asked, asked_after, is_decode, is_overridden
from .costs import DraftCosts, Padded, StepCosts, size_class
from .goodput import DraftPrice, StepPrices, best_plan, draft_price
from .trials import Trials, is_on_trial

SHORT_STEP = 0.003
"""Steps shorter than this, in seconds, get no choice of their own: one for one row takes 0.13 ms and one for 16 rows
1.5 ms, which is a fifth or more of a step of the demo model of 3.5M parameters."""
SHORT_INTERVAL, FIRST_SHORT_INTERVAL = 1.0, 0.1
"""Seconds between two choices for a class of batch sizes whose steps are short, and after the first of them; in between
they double. The first choice uses expected acceptance, the next ones measured."""
DECISION_SHARE = 0.01
"""Share of time that choices may take: the next one waits until a hundred times the last one's time has passed."""
START_GAIN, KEEP_GAIN = 1.03, 1.005
"""Minimum goodput ratio to start drafting, and to keep drafting. Estimates of step times are off by one to three per
cent (SmolLM2-135M, 494M model), and switching costs one round without drafts."""
OTHER_DRAFTER = 1.05
"""Least ratio of gains for which an adapter changes its drafter: the other's gain is known only from a few trials."""
LONGEST_GAP = 0.05
"""Gaps without drafting longer than this, in seconds, mean the engine was idle and are not recorded. Drafting may take
longer."""
OBSERVED_ROW = 0.0005
"""Steps shorter than this, in seconds for each row, are sampled: observing a row and looking up its text takes 0.02 ms,
4% of such a step."""
SAMPLED_STEPS, QUIET_STEPS = 4, 16
"""Numbers of sampled steps with drafts, and without, of which two in a row are observed: the second one counts the
drafts that were requested after the first, and the gap between them."""
ANSWER_TOKENS = 128.0
"""Initial estimate of an answer's tokens, over which a drafter's catching up with the request is spread."""
ANSWER_MEMORY = 16.0
"""Answers after which the weight of one's length has faded to 1/e."""

EXPLORED_STEPS = 64
"""Number of steps after which the first draft of each row is verified, worthwhile or not: an adapter whose fit of the
drafts' confidence is too low gets no other results."""


class SpeculationPolicy:
    """Chooses numbers of drafts from measured costs and acceptance. Used by the engine's thread alone."""

    def __init__(
        self,
        drafters: Sequence[DrafterTraits],
        clock: Callable[[], float] = time.perf_counter,
        padded: Padded | None = None,
    ) -> None:
        """Start without measurements.

        Args:
            drafters: The configured one, then the fallback if there is one.
            clock: Seconds.
            padded: See `StepCosts`.
        """
        self._drafters = drafters
        self._clock = clock
        self._steps = StepCosts(padded)
        self._drafts = DraftCosts(self._steps)
        self._adapters = AdapterStates([traits.first_rate for traits in drafters])
        self._rows: dict[Request, RowState] = {}
        self._held: tuple[int, int] | None = None
        self._decide_at = 0.0
        self._compare_at = 0.0
        self._trials = Trials([traits.max_drafts for traits in drafters], self._has_helped)
        self._draft_price: DraftPrice | None = None  # of the drafts that are made next; None: all are verified
        self._answer_tokens = ANSWER_TOKENS
        self._class_due: dict[int, tuple[float, float]] = {}  # by class of rows: due time, interval
        self._is_drafting = False
        self._nothing_chosen = False
        self._asked: Asked | None = None  # of the step before
        self._num_steps = 0
        self._last_observed = -1
        self._is_sampled = False  # the step that was planned last
        self._has_new = True  # an adapter with few rounds

    # ------------------------------------------------------------------ choice

    @property
    def plans_no_drafts(self) -> bool:
        """True if the next step is planned without drafts, and without a choice."""
        return self._nothing_chosen and self._clock() < self._decide_at

    @property
    def reads_confidence(self) -> bool:
        """True if it reads the confidence of the drafts that are made next, to leave some out."""
        return self._draft_price is not None

    def choose(self, rows: Sequence[RowPlan], *, requests_wait: bool = False) -> None:
        """Set `drafter` and lower `max_new_drafts` of the rows of a step that is being planned.

        Args:
            requests_wait: True if requests are queued.
        """
        now = self._clock()
        states = [self._rows.get(row.request) or self._new_row(row.request, now) for row in rows]
        for row, state in zip(rows, states, strict=True):
            state.see(row)
        if self._held is not None:
            for state in states:
                state.drafter, state.num_drafts = self._held
        else:
            self._choose(rows, states, now, requests_wait=requests_wait)
        for row, state in zip(rows, states, strict=True):
            row.drafter = state.drafter
            row.max_new_drafts = min(row.max_new_drafts, state.num_drafts)

    def _choose(self, rows: Sequence[RowPlan], states: list[RowState], now: float, *, requests_wait: bool) -> None:
        offering = [(state, row.max_new_drafts) for row, state in zip(rows, states, strict=True) if row.max_new_drafts]
        if not offering:
            return
        num_rows = sum(row.samples for row in rows)
        is_known = self._steps.curve(num_rows) is not None
        seconds = self._steps.seconds(num_rows, 0) if is_known else math.inf
        self._is_sampled = seconds < max(SHORT_STEP, OBSERVED_ROW * num_rows)
        if seconds < SHORT_STEP:
            self._choose_for_class(offering, num_rows, now, requests_wait=requests_wait)
        elif now >= self._decide_at:
            self._choose_for_rows(offering, num_rows, now, requests_wait=requests_wait)
            took = self._clock() - now
            self._decide_at = now + took / DECISION_SHARE
        self._nothing_chosen = not any(state.num_drafts for state in states)

    def _new_row(self, request: Request, now: float) -> RowState:
        for gone in [known for known in self._rows if known.status is Status.FINISHED]:
            self._end_trial(has_ended=self._trials.leave(self._rows.pop(gone), now), now=now)
            self._answer_tokens += (gone.num_output_tokens - self._answer_tokens) / ANSWER_MEMORY
        state = self._rows[request] = RowState(self._adapters.of(request, now), len(self._drafters))
        self._decide_at = now
        self._has_new |= state.is_new
        return state

    def _choose_for_rows(
        self, offering: Sequence[tuple[RowState, int]], num_rows: int, now: float, *, requests_wait: bool
    ) -> None:
        """Choose for each row by its own acceptance."""
        self._end_trial(has_ended=self._trials.end_lost(self._rows, now), now=now)
        self._compare_drafters(offering, num_rows, now)
        offers, rated = [], []
        for state, limit in offering:
            if state.trial_rounds:
                continue
            state.drafter = state.adapter.drafter
            offers.append(state.next_offer(limit, self._drafters))
            rated.append(state)
        prices = self._prices(num_rows, offering)
        plan = best_plan(offers, prices, num_rows, fair=not requests_wait)
        if rated:  # else all are on trial
            self._is_drafting = plan.gain >= (KEEP_GAIN if self._is_drafting else START_GAIN)
        for state, count in zip(rated, plan.num_drafts, strict=True):
            state.num_drafts = count if self._is_drafting else 0
            if self._drafters[state.drafter].is_free:
                state.num_drafts = self._drafters[state.drafter].max_drafts
        self._draft_price = draft_price(plan, prices, num_rows, len(offering), is_fair=not requests_wait)
        self._trials.begin(offering, now)

    def _choose_for_class(
        self, offering: Sequence[tuple[RowState, int]], num_rows: int, now: float, *, requests_wait: bool
    ) -> None:
        """Choose for all rows of an adapter alike, about once a second for each class of batch sizes."""
        rows, self._draft_price = size_class(num_rows), None
        due, interval = self._class_due.get(rows, (now, FIRST_SHORT_INTERVAL))
        if now >= due or any(rows not in state.adapter.num_drafts for state, _ in offering):
            by_adapter = Counter(state.adapter for state, _ in offering)
            self._end_trial(has_ended=self._trials.end_lost(self._rows, now), now=now)  # it may clear the due times
            self._class_due[rows] = now + interval, min(2 * interval, SHORT_INTERVAL)
            self._compare_drafters(offering, num_rows, now)
            offers = []
            for adapter, count in by_adapter.items():
                most = self._drafters[adapter.drafter].max_drafts
                offers.append(adapter.offer(adapter.drafter, most, count))
            plan = best_plan(offers, self._prices(num_rows, offering), num_rows, fair=not requests_wait)
            is_drafting = plan.gain >= (KEEP_GAIN if any(a.num_drafts.get(rows) for a in by_adapter) else START_GAIN)
            for adapter, count in zip(by_adapter, plan.num_drafts, strict=True):
                adapter.num_drafts[rows] = count if is_drafting else 0
            self._trials.begin(offering, now)
        for state, _ in offering:
            if not state.trial_rounds:
                state.drafter, state.num_drafts = state.adapter.drafter, state.adapter.num_drafts[rows]
        self._decide_at = self._class_due[rows][0]

    def looks_up(self, request: Request) -> bool:
        """Return whether prompt lookup is asked after a step for drafts in place of the first drafter's: after sampled
        steps now and then, and while a request's matches are used."""
        state = self._rows.get(request)
        if state is None or self._held is not None:
            return False
        is_due = not self._is_sampled or self._num_steps % SAMPLED_STEPS == SAMPLED_STEPS - 1 or self._has_new
        return is_due or (state.match is not None and state.match.is_used)

    def prefers_match(self, request: Request, drafts: Drafts, num_drafts: int) -> bool:
        """Return whether `drafts` of prompt lookup are verified instead of the first drafter's, of which `num_drafts`
        are planned. Called after a step, for each request that `looks_up` is true for; see `matches`."""
        return self._rows[request].prefers(drafts, request.tokens, num_drafts)

    def _prices(self, num_rows: int, offering: Sequence[tuple[RowState, int]]) -> StepPrices:
        """Prices of rounds. The first drafter catches up with each request once, which its rounds share."""
        steps, drafts = self._steps, self._drafts
        unseen = drafts.catch_up_seconds(sum(state.num_unseen for state, _ in offering))
        unseen /= max(1.0, self._answer_tokens)
        known: dict[tuple[int, int], float] = {}

        def draft(drafter: int, count: int) -> float:
            found = known.get((drafter, count))
            if found is None:
                found = drafts.seconds(drafter, num_rows, count) + (unseen if count and drafter == 0 else 0.0)
                known[drafter, count] = found
            return found

        return StepPrices(lambda count: steps.seconds(num_rows, count), draft)

    # ------------------------------------------------------------------ trials

    def _compare_drafters(self, offering: Sequence[tuple[RowState, int]], num_rows: int, now: float) -> None:
        """Let each adapter use the drafter with the largest gain, about once a second."""
        if len(self._drafters) < 2 or now < self._compare_at:
            return
        self._compare_at = now + SHORT_INTERVAL
        for adapter in {id(state.adapter): state.adapter for state, _ in offering}.values():
            self._compare(adapter, num_rows, offering)

    def _compare(self, adapter: AdapterState, num_rows: int, offering: Sequence[tuple[RowState, int]]) -> None:
        prices = self._prices(num_rows, offering)
        gains = []
        for index, traits in enumerate(self._drafters):
            offer = adapter.offer(index, traits.max_drafts, num_rows)
            is_known = adapter.counts[index].tried[0] > 0 or index == adapter.drafter
            gains.append(best_plan([offer], prices, num_rows, fair=False).gain if is_known else 0.0)
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] > OTHER_DRAFTER * gains[adapter.drafter]:
            adapter.drafter = best
            adapter.num_drafts.clear()

    def _end_trial(self, *, has_ended: bool, now: float) -> None:
        """Choose again if a trial has ended."""
        if has_ended:
            self._compare_at = self._decide_at = now
            self._class_due.clear()

    def _has_helped(self, adapter: AdapterState) -> bool:
        gain = self._gain(adapter, adapter.trial_drafter)
        in_use = 1.0 if adapter.trial_drafter == adapter.drafter else self._gain(adapter, adapter.drafter)
        return gain >= START_GAIN * in_use

    def _gain(self, adapter: AdapterState, drafter: int) -> float:
        """Goodput of one request of an adapter with a drafter, over that without drafts."""
        offer = adapter.offer(drafter, self._drafters[drafter].max_drafts)
        return best_plan([offer], self._prices(1, ()), 1, fair=False).gain

    # ------------------------------------------------------------------ observation

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Update the estimates from a finished step, and leave out drafts for the next one that are not worth it.

        Call once per step, in order, after its drafts were made.
        """
        now = self._clock()
        self._num_steps += 1
        rows, seconds = plan.rows, result.seconds
        is_next = self._num_steps == self._last_observed + 1
        before, self._asked = self._asked if is_next else None, None
        if self._is_skipped(rows):
            if self._draft_price is not None:
                self._leave_out(rows, self._draft_price)
            return
        self._last_observed = self._num_steps
        if seconds > 0.0 and rows and all(is_decode(row) for row in rows):
            self._steps.add(len(rows), sum(row.num_drafts for row in rows), seconds)
            # The time since the step before is that of the drafts made after it.
            if before is not None and result.gap is not None and (result.gap < LONGEST_GAP or before.num_drafts):
                self._drafts.add(before.drafter, before.num_rows, before.num_drafts, result.gap, before.lag)
            self._charge_trial(rows, seconds, result.gap or 0.0)
            self._asked = asked_after(rows, self._rows)
        elif (asked := asked_after(rows, self._rows)) is not None and asked.lag:
            self._asked = asked  # drafters catch up with prompts
        if self._held is None:
            self._count(rows, result, now, counts=is_next)
            self._note_drafts(rows, result)

    def _is_skipped(self, rows: Sequence[RowPlan]) -> bool:
        """True if a sampled step is not observed, as most are."""
        if not self._is_sampled or self._held is not None or self._trials.is_running or self._has_new:
            return False
        has_drafts = any(row.num_drafts or row.max_new_drafts for row in rows)
        return self._num_steps % (SAMPLED_STEPS if has_drafts else QUIET_STEPS) > 1

    def _charge_trial(self, rows: Sequence[RowPlan], seconds: float, gap: float) -> None:
        """Charge the adapter on trial for the time that its drafts added, for each part of a round."""
        if not self._trials.is_running:
            return
        on_trial = [is_on_trial(row, self._rows) for row in rows]
        others = [(row.num_drafts, row.drafter) for row, is_own in zip(rows, on_trial, strict=True) if not is_own]
        base, (most, drafter) = self._steps.seconds(len(rows), sum(n for n, _ in others)), max(others, default=(0, 0))
        for longer in (seconds - base, gap - self._drafts.seconds(drafter, len(rows), most)):
            self._trials.charge(longer, base)

    def _count(self, rows: Sequence[RowPlan], result: StepResult, now: float, *, counts: bool) -> None:
        """Count right and wrong drafts, if the step before was observed: `counts`."""
        counts_all = counts and (not self._is_sampled or self._num_steps % SAMPLED_STEPS == 1)
        self._has_new = False
        for row, got in zip(rows, result.rows, strict=True):
            state = self._rows.get(row.request)
            if state is None or got.error is not None:
                continue
            if counts_all or (counts and (state.trial_rounds or state.is_new)):
                state.count(row, got)
            if row.num_drafts:
                self._has_new |= state.is_new
            state.is_right = 0 < row.num_drafts == got.num_accepted
            if state.trial_rounds and row.samples:
                self._end_trial(has_ended=self._trials.count(state, now), now=now)

    def _note_drafts(self, rows: Sequence[RowPlan], result: StepResult) -> None:
        """Record the drafts that were made after a step."""
        if self._draft_price is not None:
            self._leave_out(rows, self._draft_price)
        for row, got in zip(rows, result.rows, strict=True):
            state = self._rows.get(row.request)
            if state is None or got.error is not None:
                continue
            if row.max_new_drafts:
                state.proposed_by = -1 if is_overridden(row) else row.drafter
            drafts = row.request.drafts
            state.confidence = drafts.confidence
            state.asked = (0, 0) if got.is_deferred else (row.max_new_drafts, len(drafts.token_ids))

    def _leave_out(self, rows: Sequence[RowPlan], price: DraftPrice) -> None:
        """Leave out drafts that are not worth verifying. Those that the device has made for a step in flight have no
        confidence."""
        for row in rows:
            drafts, state = row.request.drafts, self._rows.get(row.request)
            if not drafts.confidence or state is None or state.trial_rounds:
                continue
            is_certain = drafts.probs is None and drafts.match_length > 0
            count = state.adapter.fits[drafts.drafter].num_worthwhile(drafts.confidence, price, is_certain=is_certain)
            if self._num_steps % EXPLORED_STEPS == 0:
                count = max(count, 1)
            row.request.drafts = drafts.truncated(count) if count else NO_DRAFTS

    # ------------------------------------------------------------------ life

    def forget(self, digest: bytes) -> None:
        """Drop the estimates of an adapter whose content is gone from the engine."""
        self._adapters.forget(digest)

    @property
    def choices(self) -> list[tuple[int, int]]:
        """(drafter, number of drafts) to measure with `hold`, from which other times are interpolated; the first is no
        drafts."""
        first, *others = self._drafters
        most = first.max_drafts
        own = [(0, count) for count in dict.fromkeys((0, most, 1, max(1, most // 2)))]
        return [*own, *[(index, traits.max_drafts) for index, traits in enumerate(others, 1)]]

    def hold(self, drafter: int, num_drafts: int) -> None:
        """Give every row `num_drafts` of a drafter until `release`, to measure its cost."""
        self._held, self._draft_price = (drafter, num_drafts), None
        self._nothing_chosen = False

    def release(self) -> None:
        """Resume choosing, and drop the estimates since `hold`."""
        self._held, self._asked = None, None
        self._trials = Trials([traits.max_drafts for traits in self._drafters], self._has_helped)
        self._answer_tokens = ANSWER_TOKENS
        self._rows.clear()
        self._adapters = AdapterStates([traits.first_rate for traits in self._drafters])

    def snapshot(self) -> dict[str, dict[str, object]]:
        """By adapter digest and "greedy" or "sampled": drafter in use and acceptance by pool of positions."""
        return {
            f"{key.digest.hex()} {'greedy' if key.is_greedy else 'sampled'}": {
                "drafter": self._drafters[state.drafter].name,
                "acceptance": [round(rate, 3) for rate in state.rates(state.drafter)],
            }
            for key, state in self._adapters
        }
