"""Slots that requests take while they run, and the queue of those that wait for one."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Claim:
    """Slots that a request has, or waits for."""

    count: int
    since: int
    """Time of the request's arrival in nanoseconds, for servers that count together."""
    granted: asyncio.Future[None]

    @property
    def is_held(self) -> bool:
        """True when the request has the slots."""
        return self.granted.done() and not self.granted.cancelled() and self.granted.exception() is None


class Slots:
    """A bound on how much runs at once. Without a free slot a request waits, first come first served: none overtakes
    one that needs several slots. Belongs to one event loop.

    Servers that count together exchange what they have taken, and since when their first one waits. Between two
    looks at that (`is_known` is false) no request gets a slot.
    """

    __slots__ = ("_limit", "_queue", "first_elsewhere", "is_known", "taken", "taken_elsewhere")

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._queue: deque[Claim] = deque()
        self.taken = 0
        self.is_known = True
        """False: other servers may have taken slots that this one does not know of."""
        self.taken_elsewhere = 0
        self.first_elsewhere: int | None = None
        """Time since when a request waits in another server, in nanoseconds; None: none does."""

    def set_limit(self, limit: int | None) -> None:
        """Change the bound; None: there is none. Running requests continue if there are fewer slots now."""
        if limit != self._limit:
            self._limit = limit
            self._grant()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def first_waiting(self) -> int | None:
        """Time since when the first one in the queue waits; None: none does."""
        return self._queue[0].since if self._queue else None

    def has_room(self, count: int) -> bool:
        """True when a claim would not wait."""
        return self.is_known and not self._queue and self.first_elsewhere is None and self._fits(count)

    def _fits(self, count: int) -> bool:
        # More than there are slots now, alone: the limit was higher when it came, and it must not wait forever.
        taken = self.taken + self.taken_elsewhere
        return self._limit is None or taken + count <= self._limit or taken == 0

    def claim(self, count: int, since: int = 0) -> Claim:
        """Claim slots: they are granted once there is room and all who came before have theirs. `leave` must follow,
        whatever becomes of the claim."""
        claim = Claim(count, since, asyncio.get_running_loop().create_future())
        if self.has_room(count):
            self._give(claim)
        else:
            self._queue.append(claim)
        return claim

    def leave(self, claim: Claim) -> None:
        """Give the slots of a claim back, or wait for them no longer; the first in the queue get what they need."""
        if claim.is_held:
            self.taken -= claim.count
        elif claim in self._queue:
            self._queue.remove(claim)
        self._grant()

    def load(self, taken_elsewhere: int, first_elsewhere: int | None) -> None:
        """Take the counts of other servers, and admit the requests that have room now."""
        self.taken_elsewhere, self.first_elsewhere = taken_elsewhere, first_elsewhere
        self.is_known = True
        self._grant()

    def refuse_waiting(self, error: Exception) -> None:
        """Fail all waiting requests."""
        while self._queue:
            claim = self._queue.popleft()
            if not claim.granted.done():
                claim.granted.set_exception(error)

    def _grant(self) -> None:
        while self.is_known and self._queue and self._fits(self._queue[0].count):
            if self.first_elsewhere is not None and self.first_elsewhere < self._queue[0].since:
                return
            self._give(self._queue.popleft())

    def _give(self, claim: Claim) -> None:
        if not claim.granted.done():
            self.taken += claim.count
            claim.granted.set_result(None)
