"""What the controller of speculation remembers: of adapters, of requests, and of numbers of rows."""

from __future__ import annotations

from .acceptance import Rates, RequestRates
from .probing import MIN_INTERVAL, Backoff

ENTER, LEAVE = 0.025, 0.005
LEAST_REGRET, MOST_REGRET = 0.2, 3.2
LASTING = 200
"""Steps after which a change has lasted."""
MOST_STEPS = 8
"""Steps for which one prediction counts, at most."""


class Lane:
    """What is known of one adapter (or of the base model): the prior of its requests."""

    __slots__ = ("before", "drafter", "num_drafts", "rates", "surprising", "trials")

    def __init__(self, rates: list[Rates], step: int) -> None:
        self.rates = rates
        """By drafter."""
        self.trials = [Backoff(step - MIN_INTERVAL // 2) for _ in rates]
        self.drafter = 0
        self.num_drafts = 0
        """What a request of it was given last: where a new one starts."""
        self.before: list[float | None] = [None] * len(rates)
        """While a drafter is on trial: what it was thought to accept."""
        self.surprising = -1
        """The drafter whose last trial showed much more than was expected."""

    @property
    def on_trial(self) -> bool:
        """Whether the next step tries a drafter for it."""
        return any(before is not None for before in self.before)


class RowState:
    """One live request, as the controller sees it."""

    __slots__ = ("asked", "drafter", "drafts", "lag", "lane", "limit", "num_drafts", "proposed_by", "rates")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.rates = [RequestRates() for _ in lane.rates]
        self.drafter = lane.drafter
        """Who drafts for it now..."""
        self.num_drafts = lane.num_drafts
        """...and how many drafts: the decision."""
        self.limit = 0
        """Most drafts that it may get, set before each decision."""
        self.lag = 0
        """Tokens that the neural drafter lags behind it, set before each decision."""
        self.proposed_by = -1
        """Whose drafts the next step verifies; -1: there are none."""

    def rates_of(self, drafter: int) -> RequestRates:
        """How it differs from its lane; nothing is known of that when the lane's text has changed."""
        epoch = self.lane.rates[drafter].epoch
        if self.rates[drafter].epoch != epoch:
            self.rates[drafter] = RequestRates(epoch)
        return self.rates[drafter]


class Mode:
    """Whether drafting is thought to pay, for one class of rows: with many rows it may not where with few it does."""

    __slots__ = ("_limit", "_regret", "_seen", "_since", "drafting")

    def __init__(self, drafting: bool, step: int) -> None:
        self.drafting = drafting
        self._limit = LEAST_REGRET
        self._regret = 0.0
        self._since = step - LASTING
        self._seen = step - MOST_STEPS

    def has_lasted(self, step: int) -> bool:
        """Whether the last change was long ago."""
        return step - self._since >= LASTING

    def update(self, gain: float, step: int) -> bool:
        """Take in what drafting is predicted to gain now; returns whether that changed the mode."""
        steps = min(step - self._seen, MOST_STEPS)
        self._seen = step
        wrong = gain < -LEAVE if self.drafting else gain > ENTER
        self._regret = self._regret + abs(gain) * steps if wrong else 0.0
        if self._regret < self._limit:
            return False
        self._limit = LEAST_REGRET if self.has_lasted(step) else min(2 * self._limit, MOST_REGRET)
        self._regret = 0.0
        self._since = step
        self.drafting = not self.drafting
        return True
