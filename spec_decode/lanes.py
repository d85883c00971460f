"""What the controller of speculation remembers: of adapters, of requests, and of numbers of rows.

A *lane* is an adapter (or the base model) and whether its requests are greedy: what is sampled is harder to guess
(EAGLE-2, arXiv:2406.16858, table 1: temperature 0 against 1), and is often of another kind, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .acceptance import FALLBACK, HOPEFUL, Outcome, Rates, RequestRates
from .probing import MIN_INTERVAL, NOISE, SURPRISING, Backoff
from .step_costs import MIXED, row_class
from .workload import FEW

if TYPE_CHECKING:
    from ..platform.core.request import Request

ENTER, LEAVE = 0.025, 0.005
LEAST_REGRET, MOST_REGRET = 0.2, 3.2
LASTING = 200
"""Steps after which a change has lasted."""
MOST_STEPS = 64
"""Steps without drafts, or as long, for which one prediction counts, at most."""
FEW_VERIFIED = 8.0
"""Verified rows that say something of a drafter."""
LEAST_OUTLOOK, MOST_OUTLOOK = 256, 2048
"""Steps after which it is decided anew although nothing has changed but, slowly, what steps take: at first, and when
that never showed anything new..."""
NOTABLE = 0.05
"""...beyond this, of gain."""
NOTICED = 0.5
"""Share of what drafting lacks to pay that is not to come unnoticed."""
_NOISE_OF_MEAN = 0.25
"""Share of it where few rows' steps are judged together: by trial, with the demo."""
USUAL = 0.1
"""By how much a request's drafts are right more often than its lane's, or less, where it is like others."""
MAX_LANES = 4096
"""Remembered, by last use."""
LaneKey = tuple[bytes, bool]
"""The digest of an adapter (b"": the base model), and whether requests are greedy."""


def lane_key(request: Request) -> LaneKey:
    """Whose text it writes, and how."""
    return request.text_namespace[1], request.params.greedy


def lane_keys(adapter: bytes) -> tuple[LaneKey, LaneKey]:
    """All that it may have."""
    return (adapter, False), (adapter, True)


def mode_class(num_rows: int, mixed: bool) -> int:
    """Whose mode is one: a class of rows, but all with few. A batch that drains passes them one after the other, so
    that what would be gained in each alone, and lost by catching up each time, is not seen in any."""
    return MIXED if mixed else max(row_class(num_rows), FEW)


class Before(NamedTuple):
    """What was known of a drafter when its trial began."""

    probability: float
    """Of its first draft."""
    num_tried: int
    """`Rates.num_tried`."""


class Lane:
    """What is known of requests of one kind: the prior of each."""

    __slots__ = ("before", "drafter", "means", "num_drafts", "rates", "surprising", "trials", "usual_limit")

    def __init__(self, means: Sequence[Rates], max_drafts: int, step: int) -> None:
        self.means = means
        """By drafter: of all adapters' requests of the kind..."""
        self.rates = [Rates(max_drafts, mean) for mean in means]
        """...and of these."""
        self.trials = [Backoff(step - MIN_INTERVAL // 2) for _ in means]
        self.drafter = 0
        self.num_drafts = 0
        """What a request of it was given last: where a new one starts."""
        self.usual_limit = 0
        """Drafts that its requests may have, as a rule: all but at their ends. It falls by one a decision at most."""
        self.before: list[Before | None] = [None] * len(means)
        """While a drafter is on trial."""
        self.surprising = -1
        """The drafter whose last trial showed much more than was expected."""

    @property
    def promise(self) -> float:
        """Tokens that a step brings a mean request of it at most: all drafts of the better drafter."""
        return max(rates.promise for rates in self.rates)

    @property
    def on_trial(self) -> bool:
        """Whether the next step tries a drafter for it."""
        return any(before is not None for before in self.before)

    def end_trials(self, step: int) -> None:
        """What the last step tried is known now: whether it is so surprising that it is tried again at once."""
        for drafter, before in enumerate(self.before):
            if before is not None:
                self.before[drafter] = None
                self.surprising = -1
                rates = self.rates[drafter]
                if rates.num_tried == before.num_tried:
                    continue
                if rates.recent > before.probability + SURPRISING:
                    self.trials[drafter].surprised(step)
                    rates.doubt()
                    self.surprising = drafter
                else:
                    rates.trust()


class RowState:
    """One live request, as the controller sees it."""

    __slots__ = ("_rates", "drafter", "lag", "lane", "limit", "num_drafts", "num_outputs", "proposed_by")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._rates: list[RequestRates | None] = [None] * len(lane.rates)  # made when they are needed
        self.drafter = lane.drafter
        """Who drafts for it now..."""
        self.num_drafts = lane.num_drafts
        """...and how many drafts: the decision."""
        self.limit = 0
        """Most drafts that it may get, set before each decision."""
        self.lag = 0
        """Tokens that the neural drafter lags behind it, set before each decision..."""
        self.num_outputs = 0
        """...and those of its answer."""
        self.proposed_by = -1
        """Whose drafts the next step verifies; -1: there are none."""

    @property
    def is_usual(self) -> bool:
        """Whether its drafts are about as often right as those of its lane: it says how a new one is to begin."""
        return abs(self.rates_of(self.drafter).factor - 1.0) <= USUAL

    def rates_of(self, drafter: int) -> RequestRates:
        """How it differs from its lane; nothing is known of that when the lane's text has changed."""
        epoch, rates = self.lane.rates[drafter].epoch, self._rates[drafter]
        if rates is None or rates.epoch != epoch:
            rates = self._rates[drafter] = RequestRates(epoch)
        return rates


class Lanes:
    """All of them, and what their requests have in common."""

    def __init__(self, num_drafters: int, max_drafts: int) -> None:
        """Of the drafters, the first is the one that was asked for."""
        priors = [HOPEFUL, *[FALLBACK] * (num_drafters - 1)]
        self._means = {
            is_greedy: [Rates(max_drafts, prior, memory=512.0) for prior in priors] for is_greedy in (False, True)
        }
        self._max_drafts = max_drafts
        self._lanes: OrderedDict[LaneKey, Lane] = OrderedDict()

    @property
    def is_new(self) -> bool:
        """Whether the drafter that was asked for has hardly been tried: nobody knows what it is worth."""
        return sum(means[0].evidence for means in self._means.values()) < FEW_VERIFIED

    def __iter__(self) -> Iterator[tuple[LaneKey, Lane]]:
        return iter(self._lanes.items())

    def of(self, key: LaneKey, step: int) -> Lane:
        """That lane, which may be new in this step."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = Lane(self._means[key[1]], self._max_drafts, step)
            self._lanes[key] = lane
            if len(self._lanes) > MAX_LANES:
                self._lanes.popitem(last=False)
        else:
            self._lanes.move_to_end(key)
        return lane

    def forget(self, adapter: bytes) -> None:
        """It is gone."""
        for key in lane_keys(adapter):
            self._lanes.pop(key, None)

    def verified(self, outcomes: Mapping[RowState, Sequence[Outcome]]) -> None:
        """See `Controller`. Rows of one lane count together: which of their drafts were verified last is not known."""
        by_rates: dict[Rates, list[Outcome]] = {}
        for row, found in outcomes.items():
            drafter, lane = row.proposed_by, row.lane
            if drafter >= 0:
                rates = lane.rates[drafter]
                row.rates_of(drafter).count(rates.recent_probabilities, found)
                by_rates.setdefault(rates, []).extend(found)
                by_rates.setdefault(lane.means[drafter], []).extend(found)
        for rates, found in by_rates.items():
            rates.count(found)

    def proposed(self, drafter: int, answers: Sequence[tuple[RowState, int, int]]) -> None:
        """See `Controller`."""
        by_lane: dict[Lane, list[tuple[int, int]]] = {}
        for row, num_asked, num_proposed in answers:
            row.proposed_by = drafter if num_proposed else -1
            by_lane.setdefault(row.lane, []).append((num_asked, num_proposed))
        for lane, counts in by_lane.items():
            lane.rates[drafter].count_proposals(counts)
            lane.means[drafter].count_proposals(counts)


class Mode:
    """Whether drafting is thought to pay, for one class of rows: with many rows it may not where with few it does.

    What the other way would have saved since the last change is added up, and what it would have cost is taken off
    again (a cumulative sum: Page 1954): the change comes when the sum exceeds what a change costs."""

    __slots__ = ("_is_new", "_limit", "_passed", "_saved", "_since", "drafting")

    def __init__(self, drafting: bool, step: int) -> None:
        self.drafting = drafting
        self._limit = LEAST_REGRET
        self._saved = 0.0  # by the other way, in steps
        self._since = step - LASTING
        self._passed = 1  # steps of this class since the last prediction
        self._is_new = True  # nothing was predicted yet

    def passed(self, steps: int) -> None:
        """So many steps had this number of rows."""
        self._passed += steps

    def has_lasted(self, step: int) -> bool:
        """Whether the last change was long ago."""
        return step - self._since >= LASTING

    def is_outdone(self, gain: float, cost: float, length: float = 1.0, *, are_others: bool = False) -> bool:
        """Take in what drafting is predicted to gain now, which also tells what was lost in the steps that have passed;
        returns whether a change is due. That drafting was on before anything was predicted was nobody's decision: it
        ends at once if it loses.

        Args:
            cost: of a change, in steps without drafts.
            length: of a step of the present mode, in such steps.
            are_others: the steps that have passed were none of these requests, nor of any like them. What those made of
                them says nothing.
        """
        if are_others:
            self._passed, self._saved = 0, 0.0
            return self.loss(gain) > 0.0
        steps, self._passed = min(self._passed * length, MOST_STEPS), 0
        is_first, self._is_new = self._is_new, False
        better = self.loss(gain)
        self._saved = max(0.0, self._saved + better * steps)
        return better > 0.0 and (self._saved >= self._limit + cost or (is_first and self.drafting))

    def loss(self, gain: float) -> float:
        """What the present mode loses where drafting gains so much, as a share of its time, beyond what is borne."""
        return -gain - LEAVE if self.drafting else gain - ENTER

    def change(self, step: int) -> None:
        """To the other way."""
        self._limit = LEAST_REGRET if self.has_lasted(step) else min(2 * self._limit, MOST_REGRET)
        self._saved = 0.0
        self._since = step
        self.drafting = not self.drafting


class Modes:
    """Those of all classes of rows."""

    __slots__ = ("_counted", "_last_change", "_modes", "changed_at", "current", "kind", "num_changes")

    def __init__(self) -> None:
        self._modes: dict[int, Mode] = {}
        self.current = Mode(True, 0)
        """That of the last decision's rows..."""
        self.kind = -1
        """...and their `mode_class`."""
        self.num_changes = 0
        self.changed_at = 0
        """Step in which one of them, or an adapter's drafter, became another; 0: never."""
        self._counted = 0  # steps that were counted for their class of rows
        self._last_change = (True, -LASTING)  # of any mode: whether it drafts since, and when it was

    def get(self, kind: int) -> Mode | None:
        """That of a class of rows; None: nothing was decided for it yet."""
        return self._modes.get(kind)

    def enter(self, kind: int, step: int) -> None:
        """It is about to be decided for this class of rows. Until now they were those of the last decision."""
        self.current.passed(step - self._counted)
        self._counted, self.kind = step, kind
        self.current = self._modes.setdefault(kind, Mode(self.current.drafting, step))

    @property
    def is_of_few(self) -> bool:
        """Whether the rows of the last decision, or of the one that is made now, are few."""
        return self.kind == FEW

    def noise(self, step: int, *, drains: bool = False) -> float:
        """Seconds that a change must save for it not to be noise: none, if it was none lately for other rows. `drains`:
        whether batches pass several numbers of few rows: for these it is less then."""
        drafting, changed = self._last_change
        if drafting != self.current.drafting and step - changed < LASTING:
            return 0.0
        return NOISE * (_NOISE_OF_MEAN if drains and self.is_of_few else 1.0)

    def change(self, step: int) -> None:
        """The present mode changes."""
        self.current.change(step)
        self.num_changes += 1
        self.changed_at = step
        self._last_change = (self.current.drafting, step)


class Outlook(NamedTuple):
    """What a decision for a class of rows found."""

    promises: dict[Lane, float]
    """What was known of acceptance then: `Lane.promise` of those that took part."""
    step: int
    gain: float
    """That drafting promised..."""
    cost: float
    """...and what it would cost to begin, in steps."""
    lasts: int
    """Steps after which it is looked again, although all seems to be as it was."""

    @classmethod
    def of(cls, lanes: Iterable[Lane], step: int, gain: float, cost: float, before: Outlook | None) -> Outlook:
        """What a decision now finds for rows of these lanes; `before`: what the last one did."""
        is_as_before = before is not None and abs(gain - before.gain) < NOTABLE
        lasts = min(2 * before.lasts, MOST_OUTLOOK) if before is not None and is_as_before else LEAST_OUTLOOK
        return cls({lane: lane.promise for lane in lanes}, step, gain, cost, lasts)

    @property
    def is_outdone(self) -> bool:
        """Whether acceptance looks so much better by now that drafting may pay: what is lacking comes with tokens."""
        much = 1.0 + NOTICED * ((1.0 + ENTER) / (1.0 + min(self.gain, ENTER)) - 1.0)
        return any(lane.promise > much * promise for lane, promise in self.promises.items())
