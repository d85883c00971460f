"""Token budgets: how much of a day's, week's or month's tokens has been used."""

from __future__ import annotations

from calendar import timegm
from collections import Counter
from time import gmtime
from typing import NamedTuple

from ..accounts.principal import Period

DAY = 86_400
RECENT_SECONDS = 10
"""Unit in which the ends of requests are known, in seconds. Rows are in the ledger one unit after their end, at the
latest, and the clocks of servers differ by less."""
SET_BACK_SECONDS = 60
"""Seconds by which a clock that was set back leaves a budget as it was: it is read to the same moment again. A reading
that ends even longer before the last one is not late, but of a clock that was set back further."""


def period_bounds(period: Period, now: float) -> tuple[int, int]:
    """Start and end of the period that `now` falls into: seconds since the epoch, in UTC. Weeks begin on
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
    """A reading of the ledger that is in flight: of the requests of a period that ended before `until`."""

    start: int
    until: float
    is_first: bool = False


class BudgetState(NamedTuple):
    """Use of a budget as servers that count together keep it; the names are those of `Budget`."""

    start: int
    used_in_ledger: int
    recent: list[tuple[int, int]]
    read_at: float | None
    read_until: float


class Budget:
    """Budget of one tenant or key: the ledger's sum, the tokens of requests that have ended since, and those that
    running requests reserve.

    The ledger is asked when the server first needs it, and again now and then, since other servers may write into the
    same one. It is asked for what ended before some moment, and what has ended since is counted here: so a request
    counts once, although its row and its end here do not come at the same time. A new period begins at zero without
    asking.
    """

    __slots__ = (
        *("end", "limit", "news", "period", "read_at", "read_until", "recent"),
        *("reserved", "reserved_elsewhere", "start", "used_in_ledger"),
    )

    def __init__(self, limit: int, period: Period, now: float) -> None:
        """`now`: seconds since the epoch."""
        self.limit = limit
        self.period = period
        self.start, self.end = period_bounds(period, now)
        self.used_in_ledger = 0
        self.recent: Counter[int] = Counter()
        """Tokens of ended requests that are not in `used_in_ledger`, by their end in units of `RECENT_SECONDS`."""
        self.news: Counter[int] = Counter()
        """The same of those of which other servers that count together do not know."""
        self.reserved = 0
        """Tokens that running requests may still use."""
        self.reserved_elsewhere = 0
        """The same of the requests of other servers that count together with this one."""
        self.read_at: float | None = None
        """Time of the last answer of the ledger, on a clock that never goes back; None: it must be asked."""
        self.read_until = 0.0
        """Time before which all that ended is in `used_in_ledger`."""

    def roll(self, now: float) -> None:
        """Begin another period if `now` is in one. The clock may have been set, too: ask the ledger soon."""
        if self.start <= now < self.end:
            return
        self.start, self.end = period_bounds(self.period, now)
        self.used_in_ledger, self.read_until = 0, 0.0
        self.recent.clear()
        self.news.clear()
        self.read_at = None if self.read_at is None else float("-inf")

    def set_limit(self, limit: int, period: Period, now: float) -> None:
        """Change it. Another period begins with its use in the ledger."""
        self.limit = limit
        if period != self.period:
            self.period = period
            self.start = self.end = 0
            self.roll(now)
            self.read_at = None

    @property
    def used(self) -> int:
        """Tokens of requests that have ended in this period."""
        return self.used_in_ledger + self.recent.total() + self.news.total()

    @property
    def remaining(self) -> int:
        """Tokens that may still be reserved."""
        return max(0, self.limit - self.used - self.reserved - self.reserved_elsewhere)

    def count(self, tokens: int, ended_at: float) -> None:
        """Count a request that has ended, at the time that its row in the ledger has."""
        if tokens and ended_at >= max(self.start, self.read_until):
            self.news[int(ended_at // RECENT_SECONDS)] += tokens

    def begin_reading(self, now: float) -> Reading:
        """Begin to read the ledger: the first time all that is in it, later what ended some seconds ago. `now`: of the
        clock that the rows have."""
        if self.read_at is None:
            self.recent.clear()
            self.news.clear()
            self.read_until = now
            return Reading(self.start, now, is_first=True)
        until = max(self.start, (now // RECENT_SECONDS - 1) * RECENT_SECONDS)
        if 0 < self.read_until - until <= SET_BACK_SECONDS:
            until = self.read_until
        return Reading(self.start, until)

    def end_reading(self, reading: Reading, tokens: int, now: float) -> None:
        """Take the answer, unless another period has begun, or that of a later reading has been taken: what ended
        between the two is not counted here any more. `now` as in `read_at`."""
        if reading.is_first:
            is_late = self.read_at is not None and reading.until <= self.read_until  # another server's was later
        else:
            is_late = 0 < self.read_until - reading.until <= SET_BACK_SECONDS
        if reading.start == self.start and not is_late:
            self.used_in_ledger, self.read_at, self.read_until = tokens, now, reading.until
            self._drop_read()

    def _drop_read(self) -> None:
        for counts in (self.recent, self.news):
            for moment in [moment for moment in counts if (moment + 1) * RECENT_SECONDS <= self.read_until]:
                del counts[moment]

    def count_lost(self, tokens: int) -> None:
        """Count tokens of a dead server's requests until the ledger is read again."""
        self.recent[int(max(self.start, self.read_until) // RECENT_SECONDS)] += tokens

    def set_shared(self) -> None:
        """Note that other servers know of all requests that have ended."""
        self.recent += self.news
        self.news.clear()

    def dump(self) -> BudgetState:
        """Use of the budget."""
        read_at = None if self.read_at is None else max(0.0, self.read_at)
        recent = sorted((self.recent + self.news).items())
        return BudgetState(self.start, self.used_in_ledger, recent, read_at, self.read_until)

    def load(self, state: BudgetState | None, now: float) -> None:
        """Take what `dump` gave, here or in another server, unless it is of another period. Without a state the ledger
        must be asked again."""
        self.roll(now)
        if state is None:
            self.read_at = None
            self.recent.clear()  # all servers count from here
        elif state.start == self.start:
            _, self.used_in_ledger, recent, self.read_at, read_until = state
            if self.read_at is not None or read_until > self.read_until:  # else this server's reading is in flight
                self.read_until = read_until
            self.recent = Counter(dict(recent))
            self._drop_read()
