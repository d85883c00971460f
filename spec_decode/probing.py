"""When to try what does not look best, and at what price.

Estimates of what is not done grow old: the step without drafts while drafting, drafting while not, a drafter that an
adapter has left. Each is tried again for a few steps, at intervals that double while nothing changes. What a trial is
predicted to cost is charged to one budget, a share of the engine's busy time: so that trials are frequent where the
alternatives are about equal, rare where one is far behind, and never cost more than that share. Whether to draft at all
matters most, and its trials cost most: while one is due and cannot be paid yet, cheaper ones of drafters wait for it,
but for the first one after each.
"""

from __future__ import annotations

import math

SHARE = 0.01
"""Of busy time, for all trials together..."""
CALM, CALM_SHARE, CALM_SHORT_SHARE = 1024, 0.0025, 0.001
"""...and steps without a change of any mode after which it is only that, or where steps are short that: what a trial
leaves in the processor's caches is not charged, and costs a small model two thirds of the whole."""
HEAD_START = 4.0
"""Steps' worth of trials before any time has passed."""
MOST_BORROWED = 8.0
"""Steps' worth of trials that may be borrowed, to repeat one that showed something new."""
MOST_SAVED = 16.0
"""Steps' worth of trials that may be saved up: after a long time without any, they do not come all at once."""
MOST_PAYABLE = HEAD_START + MOST_BORROWED + MOST_SAVED
"""Steps' worth of a trial that could ever be paid."""
CHARGED, MOST_CHARGED = 0.5, 8.0
"""Share of the budget that may go to what is spent in any case, and steps' worth of it that may come at once. The rest
stays for trials: else decisions that have other reasons, as adapters that come and go, would put these off for ever."""
MIN_INTERVAL, MAX_INTERVAL = 32, 1024
"""Steps between two trials of the same thing."""
TRIAL, TRIAL_WITHOUT, TRIAL_MORE = 2, 4, 8
"""Steps of a trial of drafting, of one of no drafts once settled, and of one of more drafts."""
SETTLING, SOON_SETTLED = 0.012, 0.01
"""Seconds after drafting for which steps without it take longer, at first by a quarter or more, since the processor's
caches hold what drafting left there; and those of a step for which that is little."""
UNSETTLED = 0.15
"""Share that such steps take longer, in the mean."""
MOST_SETTLING = 20
"""Steps that are waited for, at most."""
NOISE = 0.02
"""Seconds that a change of mode must be thought to save beyond its own cost: less may be the machine's noise, which
comes and goes in tenths of seconds."""
CLEARLY = 0.25
"""Gain or loss that is hardly an error: the contrary is tried most rarely."""
PROBE_DRAFTS, PROBE_ROWS = 2, 2
"""Drafts and rows of a trial of a drafter, at most; one draft where each costs a pass. Few rows: what a trial costs
says how soon the next one comes, and a text that has changed shows in any of its requests."""
SURPRISED_ROWS = 8
"""Rows of a trial that repeats one which showed something new: if it is true, they are all to be drafted for."""
SURPRISING = 0.2
"""Accepted drafts of a trial, beyond those expected, as a share: then it is repeated at once."""
SLOW_INTERVAL = 128
"""Steps between trials of what is known well: what steps take with and without drafts was measured at the start."""


def settling_steps(seconds: float) -> int:
    """Steps of so many seconds until they take as long as they will for ever."""
    return 0 if seconds >= SETTLING else min(MOST_SETTLING, math.ceil(SETTLING / max(seconds, 1e-6)))


class Budget:
    """Seconds that trials may cost."""

    __slots__ = ("_chargeable", "_charged_at", "_earned", "_enough", "elapsed", "spent")

    def __init__(self) -> None:
        self.elapsed = 0.0
        """Busy seconds."""
        self.spent = 0.0
        self._earned = 0.0  # a share of these
        self._charged_at = self._chargeable = 0.0  # what was earned, and seconds that might be charged then
        self._enough: float | None = None  # earnings with which the cheapest of what was refused can be paid

    def passed(self, seconds: float, steps: int = 1, *, is_calm: bool = False) -> None:
        """So many busy seconds, in so many steps. `is_calm`: nothing has changed for long."""
        self.elapsed += seconds
        share = SHARE
        if is_calm:
            share = CALM_SHARE if seconds >= SOON_SETTLED * steps else CALM_SHORT_SHARE
        self._earned += share * seconds

    @property
    def may_suffice(self) -> bool:
        """Whether something that was refused might not be now, or nothing was."""
        return self._enough is None or self._earned >= self._enough

    def forget_refusals(self) -> None:
        """All that is due will be asked for again."""
        self._enough = None

    def charge(self, cost: float, step_seconds: float) -> None:
        """Take off `cost` seconds that were spent in any case, as far as they are to be charged; what is wanted next
        has to wait for them."""
        earned = CHARGED * (self._earned - self._charged_at)
        chargeable = min(self._chargeable + earned, MOST_CHARGED * step_seconds)
        cost = min(cost, chargeable)
        self._charged_at, self._chargeable = self._earned, chargeable - cost
        self.spent = max(self.spent, self._earned - MOST_SAVED * step_seconds) + cost
        if self._enough is not None:
            self._enough += cost
        else:
            self._enough = self.spent - HEAD_START * step_seconds

    def spend(self, cost: float, step_seconds: float, *, borrow: bool = False) -> bool:
        """Charge `cost` seconds and return True, or return False and charge nothing: there is not enough. `borrow`:
        some may be missing, later trials have to wait."""
        self.spent = max(self.spent, self._earned - MOST_SAVED * step_seconds)
        spare = (HEAD_START + MOST_BORROWED * borrow) * step_seconds
        if self.spent + cost > self._earned + spare:
            enough = self.spent + cost - spare
            self._enough = enough if self._enough is None else min(self._enough, enough)
            return False
        self.spent += max(cost, 0.0)
        return True


class Backoff:
    """When one thing is due to be tried again."""

    __slots__ = ("interval", "last", "least")

    def __init__(self, step: int, least: int = MIN_INTERVAL) -> None:
        """`least`: the interval after something new; the first trial comes sooner."""
        self.interval, self.least = MIN_INTERVAL, least
        self.last = step

    def due(self, step: int, least: int = 0) -> bool:
        """Whether it is time; not before `least` steps have passed."""
        return step - self.last >= max(self.interval, least)

    def tried(self, step: int) -> None:
        """It is tried now; next after twice the time."""
        self.last = step
        self.interval = min(2 * self.interval, MAX_INTERVAL)

    def used(self, step: int) -> None:
        """It is in use: known, and should it be left, soon tried again."""
        self.last = step
        self.interval = self.least

    def hasten(self) -> None:
        """Something is new, such as the text: the next trial follows soon."""
        self.interval = self.least

    def surprised(self, step: int) -> None:
        """The last trial showed something new: the next follows at once."""
        self.interval = self.least
        self.last = step - self.least
