"""Token buckets that charge in advance and give back what was not used.

All arithmetic is in integers: nanoseconds, and debts in sixty-billionths of a token, of which a limit of one token a
minute pays one a nanosecond. So no rounding adds up to more than a limit allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SECOND = 10**9
"""One second in nanoseconds."""
MINUTE = 60 * SECOND


@dataclass(slots=True, eq=False)
class Charge:
    """Units that one request has taken from a bucket."""

    amount: int
    unpaid: int
    """Part that time has not yet paid for, in the bucket's units."""
    key: str = ""
    """Name while it may be given back, among servers that count together; "" afterwards, and for one that is alone."""
    is_shared: bool = False
    """True when other servers know of it."""


class RateBucket:
    """A bound per minute: at most `limit` at once, refilled evenly.

    Kept as a debt: a charge adds to it, time pays it off at `limit` a minute, and it never exceeds `limit`. Time pays
    the oldest charge first, and only what is still unpaid of a charge can be given back. So in any span of T minutes
    whatever was charged and not given back is at most `limit * (1 + T)`: giving back all of a charge, although time has
    paid for some of it, would let a client save up minutes in long requests.
    """

    __slots__ = ("_charges", "_debt", "_limit", "_now")

    def __init__(self, limit: int, now: int) -> None:
        """`now`, here and below: nanoseconds of a clock that never goes back."""
        self._limit = limit
        self._now = now
        self._debt = 0
        self._charges: deque[Charge] = deque()  # those with something unpaid, oldest first; `_debt` is their sum

    @property
    def limit(self) -> int:
        """Units a minute."""
        return self._limit

    def set_limit(self, limit: int, now: int) -> None:
        """Change it; what has been charged stays charged."""
        if limit != self._limit:
            self._pay(now)
            self._limit = limit

    def wait_for(self, amount: int, now: int) -> int:
        """Nanoseconds until `amount`, which is at most the limit, could be charged; 0: now."""
        self._pay(now)
        excess = self._debt + (amount - self._limit) * MINUTE
        return -(-max(0, excess) // self._limit)

    def charge(self, amount: int, now: int, key: str = "") -> Charge:
        """Take `amount`, whether or not there is enough: `wait_for` says."""
        self._pay(now)
        charge = Charge(amount, amount * MINUTE, key)
        self._debt += charge.unpaid
        self._charges.append(charge)
        return charge

    def give_back(self, charge: Charge, amount: int, now: int) -> None:
        """Return `amount` of a charge, as far as it is not paid for already."""
        self._pay(now)
        returned = min(amount * MINUTE, charge.unpaid)
        charge.unpaid -= returned
        self._debt -= returned

    def remaining(self, now: int) -> int:
        """Tokens that could be charged now."""
        self._pay(now)
        return max(0, self._limit - -(-self._debt // MINUTE))

    def reset(self, now: int) -> int:
        """Nanoseconds until all of it could be."""
        self._pay(now)
        return -(-self._debt // self._limit)

    def dump(self, now: int) -> list[tuple[int, str]]:
        """Unpaid part and key of each charge, oldest first. Adjacent ones that cannot be refunded are one entry."""
        self._pay(now)
        entries: list[tuple[int, str]] = []
        for charge in self._charges:
            if not charge.key and entries and not entries[-1][1]:
                entries[-1] = (entries[-1][0] + charge.unpaid, "")
            elif charge.unpaid:
                entries.append((charge.unpaid, charge.key))
        return entries

    @property
    def has_news(self) -> bool:
        """True when there are charges of which other servers do not know."""
        return bool(self._charges) and not self._charges[-1].is_shared

    def set_shared(self) -> None:
        """Note that other servers know of all charges."""
        for charge in reversed(self._charges):
            if charge.is_shared:
                break
            charge.is_shared = True

    def load(self, entries: Sequence[tuple[int, str]], at: int, now: int) -> None:
        """Take the charges that `dump` found at the time `at`, here or in another server, in place of those of which
        others know: one that is not among them has been paid. Those of which they do not know stay."""
        self._pay(now)
        known = {charge.key: charge for charge in self._charges if charge.key}
        own = [charge for charge in self._charges if not charge.is_shared]
        for charge in known.values():
            if charge.is_shared:
                charge.unpaid = 0
        self._charges.clear()
        for unpaid, key in entries:
            charge = known.get(key) or Charge(unpaid, unpaid, key)
            charge.unpaid, charge.is_shared = unpaid, True
            self._charges.append(charge)
        self._debt, self._now = sum(charge.unpaid for charge in self._charges), at
        self._pay(now)
        own = [charge for charge in own if not charge.is_shared]  # else they have come after all
        self._charges += own
        self._debt += sum(charge.unpaid for charge in own)

    def _pay(self, now: int) -> None:
        """Pay for the time since the last call."""
        if now <= self._now:
            return
        paid = (now - self._now) * self._limit
        self._now = now
        if paid >= self._debt:
            for charge in self._charges:
                charge.unpaid = 0
            self._charges.clear()
            self._debt = 0
            return
        self._debt -= paid
        while paid:  # ends before the charges do: the debt is their sum
            oldest = self._charges[0]
            part = min(paid, oldest.unpaid)
            oldest.unpaid -= part
            paid -= part
            if not oldest.unpaid:
                self._charges.popleft()
