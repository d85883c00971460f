"""Who drafts how much for each row of the next step.

Every few steps, or when the batch has changed, `Controller.decide` does this:

1. Each adapter (more exactly, each *lane*: see `lanes`) takes the drafter that promises most for its mean request at
   the batch's prices (`pricing`); another than the present one must promise clearly more. So an adapter falls from the
   neural drafter to prompt lookup, and back.
2. `goodput.best_plan` shares out drafts over the rows. A drafter with layers also costs its pass over every prompt, so
   much for each token of an answer as prompts are long beside answers lately.
3. Drafting as a whole goes on while that plan loses less than `LEAVE` against no drafts, and starts when it gains more
   than `ENTER`: between the two nothing changes. Beyond, it changes when what staying is thought to have cost exceeds
   what a change costs, `NOISE` seconds and `LEAST_REGRET` steps: soon where much is lost, late where little is; of the
   last, twice as many each time that the last change did not last. It is on at first, and off at once where the first
   prediction for so many rows is that it loses; where all are of other lanes than the last ones, it changes at once,
   and where a trial has just shown another text, noise does not count. For few rows all this is one, whatever their
   number: what drafting gains is that of all such steps lately (`Pricing.gain_of_few`), and noise counts less.
4. Trials (`probing`): no drafts or the best plan for `TRIAL` steps; a draft or two by a drafter that a lane does not
   use, for one step.

While nothing is drafted, no trial is due and acceptance looks hardly better, all this would find what it found the last
time: then nothing of it is done (`_nothing_new`). Between decisions a row keeps what it was given, and a new one has
what its lane was given. Nothing here reads a clock or a token: time comes in as seconds, requests as `RowState`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .acceptance import Outcome
from .goodput import Plan, Prices, best_plan
from .lanes import ENTER, Before, Lane, LaneKey, Lanes, Mode, Modes, Outlook, RowState, mode_class
from .pace import DISTURBANCE, Pace
from .pricing import Pricing
from .probing import (
    CALM,
    CLEARLY,
    MAX_INTERVAL,
    MOST_PAYABLE,
    MOST_SAVED,
    PROBE_ROWS,
    SLOW_INTERVAL,
    SURPRISED_ROWS,
    TRIAL,
    TRIAL_MORE,
    TRIAL_WITHOUT,
    Backoff,
    Budget,
    settling_steps,
)
from .step_costs import MIXED, row_class
from .workload import FEW

UNKNOWN = 64
"""Steps in which a drafter that nobody knows yet is not judged."""


class DrafterTraits(NamedTuple):
    """What the controller knows of a drafter beforehand."""

    name: str
    has_passes: bool
    """Whether each further draft costs a pass of a network: a neural drafter."""


class Controller:
    """Estimates, and the decisions that follow from them."""

    def __init__(self, drafters: Sequence[DrafterTraits], max_drafts: int, *, has_layers: bool = False) -> None:
        """`drafters`: first the one that was asked for. `max_drafts`: for any row. `has_layers`: the first one computes
        every prompt before it can draft."""
        self._traits = tuple(drafters)
        self._max_drafts = max_drafts
        self._pricing = Pricing([traits.has_passes for traits in drafters], has_layers=has_layers)
        self.costs = self._pricing.costs
        self.workload = self._pricing.workload
        self._lanes = Lanes(len(drafters), max_drafts)
        self._budget = Budget()
        self._without: dict[int, Backoff] = {}  # trials of no drafts, by class of rows
        self._with: dict[int, Backoff] = {}  # trials of drafting, by class of rows
        self._more: dict[int, Backoff] = {}  # trials of one draft more, by class of rows
        self._outlooks: dict[int, Outlook] = {}  # by class of rows; 0: steps with prompts
        self._on_trial = 0.0  # seconds that the step's trials of drafters were charged, where nothing else is drafted
        self._modes = Modes()
        self._kind = MIXED  # class of the last decision's rows
        self._step = 0
        self._next_decision = 0
        self._pace = Pace()
        self._is_saving = False  # for a trial of the other mode, which is worth more than those of drafters...
        self._owes_probe = False  # ...but not than the first one after it: else, where little is earned, none follows
        self._trial_ends = 0
        self._tries_more = False  # drafts than planned, in such a trial
        self._passes = 0
        self._batch: tuple[int, bool] = (0, False)
        self._idle_seconds = 0.0
        """Of a step without drafts, as the last decision thought; 0: it found that nothing was new."""
        self._decided: set[Lane] = set()  # those of the last decision's rows...
        self._has_news = False  # ...and whether a request came since that they say too little of
        self._planned_for: set[Lane] = set()  # those of the last rows for which a plan was made

    @property
    def drafting(self) -> bool:
        """Whether drafting is thought to pay at present."""
        return self._mode.drafting

    @property
    def _mode(self) -> Mode:
        return self._modes.current

    @property
    def is_steady(self) -> bool:
        """Whether the next steps draft as this one does, until it is time to decide."""
        return self.drafting and (self._step >= self._trial_ends or self._tries_more)

    @property
    def is_time(self) -> bool:
        """Whether to decide, even if nothing has changed."""
        return self._step >= self._next_decision

    @property
    def steps_left(self) -> int:
        """Until it is time."""
        return max(0, self._next_decision - self._step)

    # ------------------------------------------------------------------ evidence

    def new_row(self, key: LaneKey) -> RowState:
        """A request that is new: a reason to try again what its lane has left."""
        lane = self.lane(key)
        for trial in lane.trials:
            trial.hasten()
        self._has_news |= not self.drafting or lane not in self._decided  # else it begins with what its lane has
        return RowState(lane)

    def lane(self, key: LaneKey) -> Lane:
        """What is known of requests of that kind."""
        return self._lanes.of(key, self._step)

    def forget(self, adapter: bytes) -> None:
        """It is gone."""
        self._lanes.forget(adapter)

    def verified(self, outcomes: Mapping[RowState, Sequence[Outcome]]) -> None:
        """A step, or several, verified drafts of rows that `RowState.proposed_by` made."""
        self._lanes.verified(outcomes)

    def proposed(self, drafter: int, answers: Sequence[tuple[RowState, int, int]]) -> None:
        """`drafter` was asked for drafts: (row, number asked for, number proposed) of each."""
        self._lanes.proposed(drafter, answers)

    def drafted(self, seconds: float) -> None:
        """All drafters together took that long in this step: trials are charged what they took, if that is more than
        was thought."""
        if self._on_trial:
            self._budget.spent += max(0.0, seconds - self._on_trial)
            self._on_trial = 0.0

    def stepped(self, seconds: float, steps: int = 1) -> None:
        """So many steps have passed; with all that belongs to them, they took `seconds`."""
        self._step += steps
        self._budget.passed(seconds, steps, is_calm=self._step - self._modes.changed_at >= CALM)

    # ------------------------------------------------------------------ decision

    def due(self, num_rows: int, mixed: bool, untold: float = 0.0) -> bool:
        """Whether to decide now: it is time, or the batch is not what it was.

        Args:
            num_rows: That sample; of them only few are worth a decision for new ones alone.
            mixed: Whether prompts are computed beside them.
            untold: Busy seconds of steps of which `stepped` was not told yet.
        """
        if self.is_time:
            return True
        rows, was_mixed = self._batch
        if self._step < self._trial_ends:
            return False
        has_news = self._has_news and num_rows <= FEW
        changed = row_class(num_rows) != row_class(rows) or mixed != was_mixed
        return (has_news or changed) and self._is_worth_deciding(num_rows, mixed, untold)

    def _is_worth_deciding(self, num_rows: int, mixed: bool, untold: float) -> bool:
        """Whether other rows are a reason to decide now: for a small model a decision is no trifle."""
        mode = self._modes.get(mode_class(num_rows, mixed))
        if mode is None or mode.drafting != self.drafting:
            return True
        return self._pace.is_worth_deciding(self._step, self._budget.elapsed + untold, self.costs.decision_seconds)

    def decided(self, seconds: float) -> None:
        """The last decision took that long, with all that was taken in before it. While nothing is drafted, it was made
        to find out whether something should be: such decisions share the budget of trials."""
        if self._idle_seconds:
            cost = DISTURBANCE * seconds
            self.costs.add_decision(cost)
            if not self.drafting:
                self._budget.charge(cost, self._idle_seconds)

    def decide(self, rows: Sequence[RowState], prompt_tokens: int) -> None:
        """Set `drafter` and `num_drafts` of all rows that sample; `prompt_tokens` are likely to be computed beside
        them in the next step."""
        batch = len(rows), prompt_tokens
        self._batch = (len(rows), prompt_tokens > 0)
        self._decided, self._has_news = {row.lane for row in rows}, False
        self._decide_later()
        self._pace.decided(self._budget.elapsed)
        self._on_trial, self._idle_seconds, self._tries_more = 0.0, 0.0, False
        for lane in self._decided:
            lane.end_trials(self._step)
        self._enter(len(rows), prompt_tokens > 0)
        if self._nothing_new():
            self._draft_nothing(rows)
            return
        self._budget.forget_refusals()
        self._pricing.limit_to_known(rows, prompt_tokens)
        offering = [row for row in rows if row.limit > 0]
        for row in rows:
            row.num_drafts = 0
        if not offering:
            self._next_decision = min(self._next_decision, self._step + self._pace.found_nobody())
            return
        # What was asked for is tried before it is judged.
        is_unknown = self.drafting and self._lanes.is_new and self._step < UNKNOWN
        if self._pricing.choose_drafters(offering, batch, keeps=is_unknown):
            self._modes.changed_at = self._step
        offers = [self._pricing.offer(row) for row in offering]
        prices = self._pricing.prices(offering, batch, drafting=self.drafting)
        plan = best_plan(offers, prices, self._passes)
        self._idle_seconds = prices.idle_seconds
        noise = 0.0 if self._is_surprised else self._modes.noise(self._step, drains=self._pricing.drains)
        cost = (self._pricing.change(offering, drafting=self.drafting) + noise) / prices.idle_seconds
        length = plan.seconds / prices.idle_seconds if self.drafting else 1.0
        few = self._modes.is_of_few
        gain = self._pricing.gain_of_few(offering, plan, prices, drafting=self.drafting) if few else plan.gain
        are_others = bool(self._planned_for) and self._decided.isdisjoint(self._planned_for)
        self._planned_for = self._decided
        if not is_unknown and self._mode.is_outdone(gain, cost, length, are_others=are_others):
            self._modes.change(self._step)
        before = None if self.drafting else self._outlooks.get(self._modes.kind)
        self._outlooks[self._modes.kind] = Outlook.of(self._decided, self._step, gain, cost, before)
        self._pace.found(plan.seconds if self.drafting else prices.idle_seconds, self._mode.loss(gain))
        self._decide_later()
        self._is_saving = False
        shown = self._trial_of_the_other(offering, plan, gain, prices)
        if shown:
            self._passes = plan.passes
            for row, count in zip(offering, plan.num_drafts, strict=True):
                row.num_drafts = count
        begins_with = {row.lane: row.lane.num_drafts for row in offering}
        for row in offering:
            if row.num_drafts and self.drafting:
                row.lane.trials[row.drafter].used(self._step)
            elif not row.num_drafts:
                row.rates_of(row.drafter).fade(0.9)
            if row.limit == self._max_drafts and (not shown or row.is_usual or not begins_with[row.lane]):
                row.lane.num_drafts = row.num_drafts
        if shown and self.drafting and not self._is_saving:
            self._try_more(offering, plan)
        if shown == self.drafting:
            self._probe(offering, plan, prices)

    def rest_on(self, rows: Sequence[RowState]) -> int:
        """For how many more steps nothing need be decided, after steps in which nothing was drafted for `rows`, all of
        which sample. 0: it is to be decided, after the next one."""
        if self.due(len(rows), False):
            self._decided = {row.lane for row in rows}
            if self._modes.get(mode_class(len(rows), False)) is None:
                return 0
            self._enter(len(rows), False)
            if not self._nothing_new():
                return 0
            self._batch, self._has_news = (len(rows), False), False
            self._decide_later()
            self._pace.decided(self._budget.elapsed)
            self._draft_nothing(rows)
        return self.steps_left

    def _enter(self, num_rows: int, mixed: bool) -> None:
        """It is about to be decided for so many rows."""
        self._kind = MIXED if mixed else row_class(num_rows)
        self._modes.enter(mode_class(num_rows, mixed), self._step)

    @staticmethod
    def _draft_nothing(rows: Sequence[RowState]) -> None:
        for row in rows:
            row.num_drafts = row.lane.num_drafts = 0

    def _nothing_new(self) -> bool:
        """Whether nothing is drafted, and a decision would find what the last one for such a batch did."""
        outlook = self._outlooks.get(self._modes.kind)
        if outlook is None or self.drafting or self._step - outlook.step >= outlook.lasts:
            return False
        if self._mode.is_outdone(outlook.gain, outlook.cost):
            return False
        if not self._decided <= outlook.promises.keys() or outlook.is_outdone:
            return False
        if self._is_surprised:
            return False  # what is refused to others may be lent to these
        if not self._budget.may_suffice:
            return True
        drafting = self._with.get(self._kind)
        if drafting is not None and drafting.due(self._step, MAX_INTERVAL if outlook.gain < -CLEARLY else 0):
            return False
        return not any(trial.due(self._step) for lane in self._decided for trial in lane.trials)

    @property
    def _is_surprised(self) -> bool:
        """Whether a trial has just shown an adapter's text to be another, which is no noise of the machine's."""
        return any(lane.surprising >= 0 for lane in self._decided)

    def _decide_later(self) -> None:
        self._next_decision = self._step + self._pace.steps(self._step, self._mode, self.costs.decision_seconds)

    # ------------------------------------------------------------------ trials

    def _trial_of_the_other(self, offering: Sequence[RowState], plan: Plan, gain: float, prices: Prices) -> bool:
        """Whether the next steps show the plan: as `drafting` says, or for `TRIAL` steps the contrary."""
        if self._batch[1]:
            return self.drafting
        backoffs = self._without if self.drafting else self._with
        backoff = backoffs.setdefault(self._kind, Backoff(self._step, SLOW_INTERVAL))
        unknown = self.drafting and not self.costs.target.knows(prices.base_rows, prices.base_tokens)
        if not (unknown or backoff.due(self._step, MAX_INTERVAL if abs(gain) > CLEARLY else 0)):
            return self.drafting
        if self.drafting:
            num_steps = TRIAL_WITHOUT + settling_steps(prices.idle_seconds)
            cost = num_steps * max(1.0 - 1.0 / (1.0 + plan.gain), 0.0) * prices.idle_seconds
            cost += self._pricing.pause(offering, num_steps)
        else:
            num_steps = TRIAL
            cost = num_steps * max(-plan.gain, 0.0) * plan.seconds + self._pricing.catch_up(offering)
        if not self._budget.spend(cost, prices.idle_seconds):
            self._is_saving = cost <= MOST_SAVED * prices.idle_seconds  # else it can never be paid
            return self.drafting
        backoff.tried(self._step)
        self._owes_probe = True
        if abs(gain) < 3 * ENTER:
            backoff.hasten()
        self._trial_ends = self._next_decision = self._step + num_steps
        return not self.drafting

    def _try_more(self, offering: Sequence[RowState], plan: Plan) -> None:
        """One draft more for each row that has some, where that is due: steps between those measured may be shorter
        than the line between them (products are padded to tiles). Not each step is measured, as of others: a small
        model's steps are a tenth longer where each is."""
        backoff = self._more.setdefault(row_class(self._batch[0]), Backoff(self._step, SLOW_INTERVAL))
        if backoff.due(self._step) and self._budget.spend(0.0125 * TRIAL_MORE * plan.seconds, plan.seconds):
            backoff.tried(self._step)
            for row in offering:
                if row.num_drafts:
                    row.num_drafts = min(row.num_drafts + 1, row.limit)
            self._trial_ends = self._next_decision = self._step + TRIAL_MORE
            self._tries_more = True

    def _probe(self, offering: Sequence[RowState], plan: Plan, prices: Prices) -> None:
        """Lets some rows of each lane try a drafter that the lane does not use, where that is due."""
        for drafter in range(len(self._traits)):
            due: dict[Lane, list[RowState]] = {}
            for row in offering:
                if row.lane.trials[drafter].due(self._step):
                    due.setdefault(row.lane, []).append(row)
            for lane, rows in due.items():
                if lane.on_trial or (self._is_saving and not self._owes_probe and lane.surprising != drafter):
                    continue
                rows.sort(key=lambda row: row.lag)
                is_surprising = lane.surprising == drafter
                for most in (SURPRISED_ROWS, PROBE_ROWS) if is_surprising else (PROBE_ROWS,):
                    cost = self._pricing.probe_cost(drafter, rows[:most], plan, prices)
                    if self.drafting:  # else decisions are charged themselves
                        cost += self.costs.decision_seconds
                    if self._budget.spend(cost, prices.idle_seconds, borrow=is_surprising):
                        self._start_probe(drafter, lane, rows[:most])
                        self._on_trial += 0.0 if self.drafting else cost
                        break
                else:
                    if is_surprising and cost > MOST_PAYABLE * prices.idle_seconds:
                        lane.surprising = -1  # it would be asked for for ever

    def _start_probe(self, drafter: int, lane: Lane, rows: Sequence[RowState]) -> None:
        lane.trials[drafter].tried(self._step)
        self._owes_probe = False
        if lane.surprising != drafter:
            lane.rates[drafter].look_again()
        rates = lane.rates[drafter]
        lane.before[drafter] = Before(rates.probabilities[0], rates.num_tried)
        for row in rows:
            row.drafter, row.num_drafts = drafter, self._pricing.probe_drafts(drafter, row)
        self._trial_ends = self._next_decision = self._step + 1

    # ------------------------------------------------------------------ introspection

    def snapshot(self) -> dict[LaneKey, dict[str, object]]:
        """By lane: its drafter, the drafts that its last request got, and the acceptance by position thought of."""
        return {
            key: {
                "drafter": self._traits[lane.drafter].name,
                "num_drafts": lane.num_drafts,
                "acceptance": [round(p, 3) for p in lane.rates[lane.drafter].probabilities],
            }
            for key, lane in self._lanes
        }
