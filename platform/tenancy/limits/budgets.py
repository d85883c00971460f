"""Token budgets: how much of a day's, week's or month's tokens has been used."""

from __future__ import annotations

from calendar import timegm
from time import gmtime
from typing import NamedTuple

from ..accounts.principal import Period

DAY = 86_400


def period_of(period: Period, now: float) -> tuple[int, int]:
    """The beginning and the end of the period that `now` falls into: seconds since the epoch, in UTC. Weeks begin on
    Monday."""
    time = gmtime(now)
    midnight = timegm((time.tm_year, time.tm_mon, time.tm_mday, 0, 0, 0))
    if period == "day":
        return midnight, midnight + DAY
    if period == "week":
        start = midnight - time.tm_wday * DAY
        return start, start + 7 * DAY
    next_month = (time.tm_year + 1, 1) if time.tm_mon == 12 else (time.tm_year, time.tm_mon + 1)
    return timegm((time.tm_year, time.tm_mon, 1, 0, 0, 0)), timegm((*next_month, 1, 0, 0, 0))


class Reading(NamedTuple):
    """A reading of the ledger that is under way: a period, and the tokens that had `ended` when it began."""

    start: int
    end: int
    ended: int


class BudgetState(NamedTuple):
    """Use of a budget as servers that count together keep it; the names are those of `Budget`."""

    start: int
    used_in_ledger: int
    ended: int
    ended_in_ledger: int
    read_at: float | None


class Budget:
    """Budget of one tenant or key: the ledger's sum, the tokens of requests that have ended here since, and those that
    running requests reserve.

    The ledger is asked when the server first needs it, and again now and then, since other servers may write into the
    same one. A new period begins at zero without asking.
    """

    __slots__ = (
        *("end", "ended", "ended_in_ledger", "limit", "period", "read_at"),
        *("reserved", "reserved_elsewhere", "start", "used_in_ledger"),
    )

    def __init__(self, limit: int, period: Period, now: float) -> None:
        """`now`: seconds since the epoch."""
        self.limit = limit
        self.period = period
        self.start, self.end = period_of(period, now)
        self.used_in_ledger = 0
        self.ended = 0
        """Tokens of requests that have ended since this was made, in the period."""
        self.ended_in_ledger = 0
        """Part of `ended` that is in `used_in_ledger` too."""
        self.reserved = 0
        """Tokens that running requests may still use."""
        self.reserved_elsewhere = 0
        """The same of the requests of other servers that count together with this one."""
        self.read_at: float | None = None
        """Time of the last answer of the ledger, on a clock that never goes back; None: it must be asked."""

    def roll(self, now: float) -> None:
        """Begin another period if `now` is in one. The clock may have been set, too: ask the ledger soon."""
        if self.start <= now < self.end:
            return
        self.start, self.end = period_of(self.period, now)
        self.used_in_ledger = self.ended = self.ended_in_ledger = 0
        self.read_at = None if self.read_at is None else float("-inf")

    def set_limit(self, limit: int, period: Period, now: float) -> None:
        """Change it. Another period begins with what the ledger says of it."""
        self.limit = limit
        if period != self.period:
            self.period = period
            self.start = self.end = 0
            self.roll(now)
            self.read_at = None

    @property
    def used(self) -> int:
        """Tokens of requests that have ended in this period."""
        return self.used_in_ledger + self.ended - self.ended_in_ledger

    @property
    def remaining(self) -> int:
        """Tokens that may still be reserved."""
        return max(0, self.limit - self.used - self.reserved - self.reserved_elsewhere)

    def begin_reading(self) -> Reading:
        """Begin to read the ledger. A request that ends from now on is not in the answer, and all that ended before
        are."""
        return Reading(self.start, self.end, self.ended)

    def end_reading(self, reading: Reading, tokens: int, now: float) -> None:
        """Take the answer, unless another period has begun; `now` as in `read_at`."""
        if reading.start == self.start:
            self.used_in_ledger = tokens
            self.ended_in_ledger = min(reading.ended, self.ended)  # less: the counts were dropped meanwhile
            self.read_at = now

    def dump(self) -> BudgetState:
        """Use of the budget."""
        read_at = None if self.read_at is None else max(0.0, self.read_at)
        return BudgetState(self.start, self.used_in_ledger, self.ended, self.ended_in_ledger, read_at)

    def load(self, state: BudgetState | None, now: float) -> None:
        """Take what `dump` gave, here or in another server, unless it is of another period. Without a state the ledger
        must be asked again."""
        self.roll(now)
        if state is None:
            self.read_at = None
            self.ended = self.ended_in_ledger = 0  # all servers count from here
        elif state.start == self.start:
            _, self.used_in_ledger, self.ended, self.ended_in_ledger, self.read_at = state
