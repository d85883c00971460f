"""What drafts would bring and cost the rows of the next step, of what is known of steps, drafters and acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import mul

from .acceptance import cumulative
from .goodput import Offer, Plan, Prices, mean_goodput, mean_plan
from .lanes import Lane, RowState
from .probing import PROBE_DRAFTS, SETTLING, UNSETTLED
from .step_costs import MIXED, Curve, StepCosts, row_class
from .workload import Workload

_PRESENT = 0.125
"""Of all steps with few rows, as many at least count as if they had the present number."""
UNTOLD = 4e-5
"""Seconds that a step costs of a batch that drains while it is drafted for, beyond what steps tell. Measured with the
demo, whose steps that draft take two milliseconds: 2 to 5% of them."""
SWITCH = 0.03
"""What another drafter than a lane's present one must promise more."""
AMORTISED_OVER = 64
"""Steps after which drafting may end in any case, over which a drafter's catching up is spread. It ends with the
answers, too, of which half is still to come in the mean: the sooner the more tokens a step brings. As the rates of both
do, the two shares add up."""


class Pricing:
    """From estimates to what `goodput` compares."""

    def __init__(self, has_passes: Sequence[bool], *, has_layers: bool) -> None:
        """`has_passes`: for each drafter, whether each further draft costs a pass. `has_layers`: the first one computes
        every prompt before it can draft."""
        self.costs = StepCosts(has_passes)
        self.workload = Workload()
        self._has_passes = has_passes
        self._has_layers = has_layers
        self._are_at_ends = False  # all of the last decision's rows had fewer drafts left than is usual

    def limit_to_known(self, rows: Sequence[RowState], prompt_tokens: int) -> None:
        """At most twice as many tokens a step as were ever measured, or two drafts a row: a step that is far too long
        is not found out by running it. What requests may have as a rule is learned before."""
        limits: dict[Lane, int] = {}
        for row in rows:
            if row.limit:
                limits[row.lane] = max(row.limit, limits.get(row.lane, 0))
        for lane, limit in limits.items():
            lane.usual_limit = max(limit, lane.usual_limit - 1)
        self._are_at_ends = all(limit < lane.usual_limit for lane, limit in limits.items())
        if prompt_tokens == 0:
            most = max(2, int(2 * self.costs.target.reach / max(len(rows), 1)) - 1)
            for row in rows:
                row.limit = min(row.limit, most)

    def offer(self, row: RowState) -> Offer:
        """What the row's drafter may do for it."""
        drafter = row.drafter
        rates = row.lane.rates[drafter]
        return Offer(
            drafter,
            cumulative(rates.probabilities, row.rates_of(drafter).factor * self._goes_on, row.limit),
            rates.available[: row.limit],
        )

    def prices(self, offering: Sequence[RowState], batch: tuple[int, int], *, drafting: bool) -> Prices:
        """Of drafts for `offering`, in a batch of so many rows that sample, and prompt tokens beside them. `drafting`:
        whether such batches are drafted for already: then what the drafter lags of these will be so of others, too, as
        where a batch drains from more rows, which are not drafted for. Else it lags once, which is part of `change`."""
        costs = self.costs
        num_rows, prompt_tokens = batch
        drafts: list[tuple[Curve, Curve, int]] = []
        for drafter in range(len(self._has_passes)):
            served = sum(row.drafter == drafter for row in offering)
            one = costs.draft_curve(drafter, 1)
            drafts.append((one, costs.draft_curve(drafter, served) if served > 1 else one, served))
        extra = costs.drafting_seconds(num_rows)
        token_extra = self._token_extra
        late = self.catch_up(offering, with_prompts=False) if drafting else 0.0
        extra += late / AMORTISED_OVER
        token_extra += late / (num_rows * max(1.0, self.workload.answer_length / 2))
        target = costs.target_curve(MIXED if prompt_tokens else num_rows)
        base, host = num_rows + prompt_tokens, costs.host_seconds(num_rows)
        return Prices(num_rows, base, host, target, drafts, self._has_passes, extra, token_extra)

    def gain_of_few(self, offering: Sequence[RowState], plan: Plan, prices: Prices, *, drafting: bool) -> float:
        """What it gains to draft, as `Plan.gain`, for all numbers of rows up to `FEW` as they were met lately: for the
        present one by `plan`, for others as if their requests were mean ones of the lanes of `offering`. A batch that
        drains meets its decisions with many rows, and takes most of its time with one. At their ends requests may have
        fewer drafts than before, which says nothing of others: then the present number is like the others."""
        untold = UNTOLD if self.drains else 0.0
        present, met = row_class(prices.base_rows), dict(self.workload.steps_by_rows)
        met[present] = max(met.get(present, 0.0), _PRESENT * sum(met.values()), 1.0)
        before = after = 0.0
        for rows, count in met.items():
            idle, seconds, gain = prices.idle_seconds, plan.seconds, plan.gain
            if rows != present or self._are_at_ends:
                idle = self.costs.host_seconds(rows) + self.costs.target_curve(rows)(rows)
                goodput, seconds = self._mean_plan(offering, rows)
                gain = goodput * idle / rows - 1.0
            gain = (1.0 + gain) * seconds / (seconds + untold) - 1.0
            seconds += untold
            # As if all steps that were counted had been of the present mode: most are, a while after each change.
            after += count * (seconds if drafting else idle / (1.0 + gain))
            before += count * (seconds * (1.0 + gain) if drafting else idle)
        return before / after - 1.0

    def _mean_plan(self, offering: Sequence[RowState], rows: int) -> tuple[float, float]:
        """Goodput, and the seconds of a step, of so many rows like those of `offering`, one kind after the other."""
        costs = self.costs
        target, fixed = costs.target_curve(rows), costs.host_seconds(rows) + costs.drafting_seconds(rows)
        goodputs = times = 0.0
        for (lane, drafter), count in Counter((row.lane, row.drafter) for row in offering).items():
            extra = fixed, 0.0 if drafter else self._token_extra
            curve, asks = costs.draft_curve(drafter, rows), (self._goes_on, lane.usual_limit)
            goodput, seconds = mean_plan(lane.rates[drafter], (rows, 0), target, curve, extra, asks)
            goodputs += count * goodput
            times += count * seconds
        return goodputs / len(offering), times / len(offering)

    def catch_up(self, rows: Iterable[RowState], *, with_prompts: bool = True) -> float:
        """Seconds that it takes until the neural drafter can draft for those that are given to it; without prompts,
        only what it takes because they were not drafted for meanwhile."""
        late = [row for row in rows if self._has_passes[row.drafter]]
        return self.costs.catch_up(0, sum(row.lag if with_prompts else min(row.lag, row.num_outputs) for row in late))

    def change(self, rows: Iterable[RowState], *, drafting: bool) -> float:
        """Seconds that it costs to begin drafting for `rows`, or to stop: what the drafter lags, or steps that are
        longer until the caches have settled."""
        return UNSETTLED * SETTLING if drafting else self.catch_up(rows)

    def pause(self, rows: Iterable[RowState], num_steps: int) -> float:
        """Seconds that it costs to begin to draft for `rows` again after so many steps without."""
        lag = sum(num_steps for row in rows if row.drafter == 0 and self._has_layers)
        return self.costs.catch_up(0, lag)

    def choose_drafters(self, offering: Sequence[RowState], batch: tuple[int, int], *, keeps: bool) -> bool:
        """Every lane's drafter, as if the whole `batch`, see `prices`, were like it, and that of its rows; returns
        whether one is another. `keeps`: lanes have what they had."""
        num_rows, prompt_tokens = batch
        changes = False
        if len(self._has_passes) > 1 and not keeps:
            costs = self.costs
            target = costs.target_curve(MIXED if prompt_tokens else num_rows)
            drafts = [costs.draft_curve(drafter, num_rows) for drafter in range(len(self._has_passes))]
            fixed = costs.host_seconds(num_rows) + costs.drafting_seconds(num_rows)
            for lane in {row.lane for row in offering}:
                values = [
                    mean_goodput(
                        lane.rates[drafter],
                        batch,
                        target,
                        draft,
                        (fixed, 0.0 if drafter else self._token_extra),
                    )
                    for drafter, draft in enumerate(drafts)
                ]
                best = max(range(len(values)), key=values.__getitem__)
                if values[best] > values[lane.drafter] * (1.0 + SWITCH):
                    lane.drafter, changes = best, True
        for row in offering:
            row.drafter = row.lane.drafter
        return changes

    def probe_drafts(self, drafter: int, row: RowState) -> int:
        """Drafts that the trial of a drafter takes."""
        return min(1 if self._has_passes[drafter] else PROBE_DRAFTS, row.limit)

    def probe_cost(self, drafter: int, rows: Sequence[RowState], plan: Plan, prices: Prices) -> float:
        """Seconds that a step takes longer which tries `drafter`, and those that its lost drafts are worth."""
        costs = self.costs
        drafts = costs.draft_curve(drafter, len(rows))
        count = max(self.probe_drafts(drafter, row) for row in rows)
        cost = costs.measured_bookkeeping_seconds + drafts(count) - drafts(0)
        cost += prices.target(prices.base_tokens + count * len(rows)) - prices.target(prices.base_tokens)
        if self._has_passes[drafter]:
            cost += costs.catch_up(drafter, sum(row.lag for row in rows))
        for row in rows:
            if row.num_drafts:
                _, chances, available = self.offer(row)
                cost += sum(map(mul, chances[: row.num_drafts], available[: row.num_drafts])) / plan.goodput
        return cost

    @property
    def drains(self) -> bool:
        """Whether there were several numbers of few rows lately, one step in eight at least of others than most had."""
        steps = self.workload.steps_by_rows.values()
        return 8 * (sum(steps) - max(steps, default=0.0)) >= max(sum(steps), 1.0)

    @property
    def _goes_on(self) -> float:
        """Chance that an answer does not end before its next token: drafts beyond its end are in vain."""
        return 1.0 - 1.0 / max(self.workload.answer_length, 1.0)

    @property
    def _token_extra(self) -> float:
        """Seconds that the neural drafter's catching up with prompts takes for each token of their answers."""
        return self.workload.prompts_per_token * self.costs.catch_up(0, 1) if self._has_layers else 0.0
