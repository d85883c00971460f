"""Adapters: estimates of each adapter's requests, greedy and sampled ones separately, and the schedule of trials."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...platform.core.batch import RowPlan, RowResult
from ...platform.core.request import Drafts, Request
from ...platform.core.speculative_config import MAX_DRAFTS
from .acceptance import (
    ADAPTER_MEMORY,
    NUM_POOLS,
    REQUEST_MEMORY,
    AcceptanceRate,
    adapter_rates,
    expected_drafts,
    survival,
)
from .confidence import ConfidenceFit
from .goodput import Offer
from .matches import Match, MatchRates

MAX_ADAPTERS = 4096
"""Number of adapters that are remembered, least recently used dropped first. One takes some kilobytes."""
LEAST_LAG = MAX_DRAFTS + 1
"""Minimum of tokens by which a row lags: fewer may be drafts that a step in flight verifies."""
FIRST_TRIAL_SECONDS, MOST_TRIAL_SECONDS = 0.5, 60.0
"""Least and most seconds between two trials of a drafter; a trial that changes nothing doubles them. A text changes
within seconds, the requests of an adapter within minutes."""

FEW_ROUNDS = 32
"""Rounds of an adapter up to which each one counts: a useless drafter is detected within a tenth of a second."""

_ALL_MADE = [1.0] * NUM_POOLS
"""Shares of drafts that are made, before any was requested."""


class AdapterKey(NamedTuple):
    """Requests that share an estimate."""

    digest: bytes
    """Digest of the adapter's content; empty for the base model."""
    is_greedy: bool


def adapter_key(request: Request) -> AdapterKey:
    """The key of a request that was admitted."""
    return AdapterKey(request.text_namespace[1], request.params.greedy)


class DrafterTraits(NamedTuple):
    """Traits of a drafter for the policy."""

    name: str
    max_drafts: int
    """Most drafts of a row."""
    first_rate: float
    """Expected acceptance before any draft was verified."""
    is_free: bool = False
    """True if its drafts take next to no time, and have a confidence: as many as may be are made in each step, and
    chosen afterwards."""


class TrialSchedule:
    """Schedule of the trials of a drafter that an adapter does not use."""

    __slots__ = ("due_at", "interval")

    def __init__(self, now: float) -> None:
        self.interval = FIRST_TRIAL_SECONDS
        self.due_at = now + self.interval

    def ended(self, now: float, *, has_helped: bool) -> None:
        """Record the end of a trial."""
        self.interval = FIRST_TRIAL_SECONDS if has_helped else min(2 * self.interval, MOST_TRIAL_SECONDS)
        self.due_at = now + self.interval


class AdapterState:
    """One adapter's estimates and choices."""

    __slots__ = (
        "_first", "after", "counts", "drafter", "fits", "matches", "num_drafts",
        "trial_cost", "trial_drafter", "trial_rows", "trials",
    )  # fmt: skip

    def __init__(self, first_rates: Sequence[float], now: float) -> None:
        """`first_rates`: acceptance that is expected of each drafter before any draft was verified."""
        self._first = first_rates
        self.counts = [AcceptanceRate(ADAPTER_MEMORY) for _ in first_rates]
        """Rates of all rounds, by drafter. Those of the first one include matches that were verified instead of its
        drafts; those of prompt lookup include matches that were not verified."""
        self.after = [[AcceptanceRate(ADAPTER_MEMORY) for _ in (False, True)] for _ in first_rates]
        """[drafter][is_right] rates of the rounds that follow a round whose drafts were not all right, and one whose
        drafts were."""
        self.matches = MatchRates()
        self.drafter = 0
        """The drafter in use."""
        self.num_drafts: dict[int, int] = {}
        """Drafts for each of its rows by class of batch size, if steps are short."""
        self.fits = [ConfidenceFit() for _ in first_rates]
        """Fit of the drafts' confidence, by drafter."""
        self.trials = [TrialSchedule(now) for _ in first_rates]
        self.trial_drafter = -1
        """The drafter on trial, or -1."""
        self.trial_rows = 0
        """Rows that have not finished the trial."""
        self.trial_cost = 0.0
        """Seconds that the trial has cost so far."""

    def rates(self, drafter: int) -> Sequence[float]:
        """Acceptance by pool of positions."""
        return adapter_rates(self.counts[drafter], self._first[drafter])

    def rates_after(self, drafter: int, *, is_right: bool) -> Sequence[float]:
        """Acceptance by pool of positions in rounds after a right one, or after another."""
        return adapter_rates(self.after[drafter][is_right], self._first[drafter])

    def offer(self, drafter: int, count: int, rows: int = 1) -> Offer:
        """Offer of at most `count` drafts for each of `rows` of its requests."""
        shares = self.counts[drafter].made_shares(_ALL_MADE)
        return Offer(drafter, survival(self.rates(drafter), count), expected_drafts(shares, count), rows)

    def due_trial(self, now: float, *, is_drafting: bool) -> tuple[float, int]:
        """(time it was due, drafter) of the trial that is due longest; (inf, -1) if none is. The drafter in use needs
        none."""
        due = [
            (trial.due_at, index)
            for index, trial in enumerate(self.trials)
            if trial.due_at <= now and not (is_drafting and index == self.drafter)
        ]
        return min(due, default=(math.inf, -1))

    def begin_trial(self, drafter: int, num_rows: int) -> None:
        """Start a trial of `drafter` with some rows, for `TRIAL_ROUNDS` rounds."""
        self.trial_drafter, self.trial_rows, self.trial_cost = drafter, num_rows, 0.0

    def end_trial(self, now: float, *, has_helped: bool) -> None:
        """End the trial: its rows have finished, or are gone."""
        self.trials[self.trial_drafter].ended(now, has_helped=has_helped)
        self.trial_drafter, self.trial_rows = -1, 0


class RowState:
    """One running request."""

    __slots__ = (
        "adapter",
        "asked",
        "confidence",
        "counts",
        "drafter",
        "is_right",
        "lag",
        "match",
        "num_drafts",
        "num_unseen",
        "proposed_by",
        "trial_rounds",
    )

    def __init__(self, adapter: AdapterState, num_drafters: int) -> None:
        self.adapter = adapter
        self.counts = [[AcceptanceRate(REQUEST_MEMORY) for _ in (False, True)] for _ in range(num_drafters)]
        """[drafter][is_right] the request's own rates, as in `AdapterState.after`."""
        self.is_right = False
        """True when all drafts of its last round were right, and there were any: copied text continues."""
        self.drafter, self.num_drafts = adapter.drafter, 0
        """Drafter and number of drafts that were chosen for it."""
        self.proposed_by = 0
        """The drafter of the drafts that its next step verifies."""
        self.asked = (0, 0)
        """Numbers of these drafts: requested, and made. Drafts that are not worth verifying count as not made."""
        self.confidence: Sequence[float] = ()
        """`Drafts.confidence` of these drafts, if it was read."""
        self.match: Match | None = None
        """The last look-up in its text, with or without a match."""
        self.trial_rounds = 0
        """Remaining rounds of its trial."""
        self.lag = 0
        """Tokens that the first drafter had not seen when its row was planned."""
        self.num_unseen = 0
        """Tokens that the first drafter has to catch up with once: the prompt, or more if nothing was drafted since."""

    def see(self, row: RowPlan) -> None:
        """Update the first drafter's lag from a planned row."""
        lag = row.end - row.num_drafts - row.request.num_draft_computed
        self.lag = lag if lag >= LEAST_LAG else 0
        self.num_unseen = max(self.lag, row.request.num_prompt_tokens)

    @property
    def is_new(self) -> bool:
        """True while few rounds of its adapter were counted."""
        return self.adapter.counts[self.drafter].tried[0] < FEW_ROUNDS

    @property
    def copies(self) -> bool:
        """True if all of its last drafts were right, and its next step verifies those of a match."""
        return self.is_right and self.match is not None and self.match.is_used

    def prefers(self, drafts: Drafts, tokens: Sequence[int], num_drafts: int) -> bool:
        """Record prompt lookup's `drafts` after the request's `tokens`, and return whether more of them are expected to
        be right than of `num_drafts` of its own drafter."""
        adapter, before = self.adapter, self.match
        if before is not None:
            adapter.counts[1].add_round(*adapter.matches.compare(before, tokens))
        self.match = found = Match(len(tokens), drafts.token_ids, drafts.match_length, num_drafts)
        if not drafts.match_length or self.trial_rounds:
            return False
        right = adapter.matches.expected(drafts.match_length, len(drafts.token_ids))
        found.is_used = right > sum(survival(self._rates(), num_drafts))
        return found.is_used

    def count(self, row: RowPlan, got: RowResult) -> None:
        """Count the drafts of its row in a step, with those that were requested and not made."""
        asked, made = self.asked
        if row.is_forced or got.is_deferred:  # no drafter made them, or nothing was sampled
            return
        if row.num_drafts != made:  # no room for all, or a row planned before its request ended
            asked = made = row.num_drafts
        if not asked:
            return
        for counts in self._counts_of_round():
            counts.add_round(asked, made, got.num_accepted)
        if self.confidence:
            fit = self.adapter.fits[self.proposed_by]  # -1: prompt lookup, the last drafter
            fit.add_round(self.confidence[:made], min(got.num_accepted, made))

    def _counts_of_round(self) -> tuple[AcceptanceRate, ...]:
        """Counts that a round belongs to: its own and its adapter's; for a match that was verified instead of the first
        drafter's drafts, those of all rounds that were planned for that drafter."""
        adapter, is_right, drafter = self.adapter, self.is_right, self.proposed_by
        if drafter < 0:
            return (adapter.counts[0],)
        return self.counts[drafter][is_right], adapter.counts[drafter], adapter.after[drafter][is_right]

    def next_offer(self, limit: int, drafters: Sequence[DrafterTraits]) -> Offer:
        """Offer of at most `limit` drafts: of its drafter, or of the match that its next step verifies if the request
        copies text."""
        if self.drafter or not self.copies:
            return self.offer(min(limit, drafters[self.drafter].max_drafts))
        assert self.match is not None
        length = self.match.length + len(self.match.token_ids)
        return Offer(1, self.adapter.matches.survival(length, min(limit, drafters[1].max_drafts)))

    def offer(self, count: int) -> Offer:
        """Offer of at most `count` drafts by its drafter."""
        adapter, counts = self.adapter, self.counts[self.drafter][self.is_right]
        shares = counts.made_shares(adapter.after[self.drafter][self.is_right].made_shares(_ALL_MADE))
        return Offer(self.drafter, survival(self._rates(), count), expected_drafts(shares, count))

    def _rates(self) -> list[float]:
        """Acceptance of its drafter's next drafts, by pool of positions."""
        prior = self.adapter.rates_after(self.drafter, is_right=self.is_right)
        return self.counts[self.drafter][self.is_right].rates(prior)


class AdapterStates:
    """The recently used adapters."""

    def __init__(self, first_rates: Sequence[float]) -> None:
        self._first_rates = first_rates
        self._states: OrderedDict[AdapterKey, AdapterState] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[AdapterKey, AdapterState]]:
        return iter(self._states.items())

    def of(self, request: Request, now: float) -> AdapterState:
        """The state of a request's adapter."""
        key = adapter_key(request)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = AdapterState(self._first_rates, now)
            if len(self._states) > MAX_ADAPTERS:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        return state

    def forget(self, digest: bytes) -> None:
        """Drop the estimates of an adapter whose content is gone."""
        for key in [key for key in self._states if key.digest == digest]:
            del self._states[key]
