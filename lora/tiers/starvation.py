"""Nobody waits for ever: less urgent requests stop keeping in use what one needs that has waited too long for room.

    waits for                             less urgent requests yield
    host memory                           one adapter on the device, so that it can leave host memory
    rank rows                             all rows that come free, and those of adapters that together have enough
    one of max_loras running adapters     such a place, and the adapter that runs with the fewest requests

So a request waits at most `AGING_SECONDS`, and then for each adapter that more urgent requests wait for as long as one
running request takes, and one load.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from ...platform.core.request import Request
from ..registry.registry import AdapterRegistry
from ..registry.versions import AdapterVersion, Order
from .residency import Residency

# Seconds after which a request that waits for room may have others' adapters drained.
AGING_SECONDS = 2.0
# Seconds after which to look again who has waited that long.
LOOK_SECONDS = 0.05


class Aging:
    """Who has waited too long, and who must yield to it. Reads the tiers, never changes them."""

    def __init__(self, registry: AdapterRegistry, residency: Residency, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._host, self._pool = residency.host, residency.pool
        self._clock = clock
        self._short: dict[AdapterVersion, None] = {}  # refused room, and not admitted since
        self._aged: deque[AdapterVersion] = deque()  # of them, those that have waited too long, most urgent first
        self._next_look = -math.inf
        self._draining: set[bytes] | None = None  # since the last change

    @property
    def any_short(self) -> bool:
        """Return whether any version was refused room and has not had it since."""
        return bool(self._short)

    def set_short(self, version: AdapterVersion) -> None:
        """The version was refused room: its requests may starve from now on."""
        if version not in self._short:
            self._short[version] = None
            self._next_look = -math.inf

    def clear_short(self, version: AdapterVersion) -> bool:
        """The version has what it was refused, or needs it no more; whether it had been refused any."""
        if version not in self._short:
            return False
        del self._short[version]
        self._draining = None
        return True

    def changed(self) -> None:
        """Room may have come free, or requests may have gone."""
        self._draining = None

    def must_yield(self, request: Request, version: AdapterVersion) -> bool:
        """Return whether the request must wait so that a more urgent one, which has waited too long, gets the room it
        needs.

        The version's content is in host memory. It yields what it would have to take, and what it has when that is
        among what is to be drained.
        """
        starving = self._find_starving()
        if starving is None or starving.loading or version.digest is None or version.digest == starving.digest:
            return False
        first = starving.first_waiting()
        if first is None or first.order >= request.order:
            return False
        pool = self._pool
        if starving.digest in self._host:
            if version.digest not in pool and starving.digest not in pool:
                return True
            seats = pool.max_running - pool.num_running
            if seats <= 1 and not pool.num_users(starving.digest) and not pool.num_users(version.digest):
                return True
        if self._draining is None:
            self._draining = self._to_drain(starving, first.order)
        return version.digest in self._draining

    def _find_starving(self) -> AdapterVersion | None:
        """The version with the most urgent request among those that have waited too long for room."""
        if not self._short:
            return None
        now = self._clock()
        if now >= self._next_look:
            before = self._aged[0] if self._aged else None
            self._next_look = now + LOOK_SECONDS
            self._aged = deque(version for _, version in sorted(self._look(now), key=lambda item: item[0]))
            if not self._aged or self._aged[0] is not before:
                self._draining = None
        while self._aged and (self._aged[0] not in self._short or self._aged[0].first_waiting() is None):
            self._aged.popleft()
            self._draining = None
        return self._aged[0] if self._aged else None

    def _look(self, now: float) -> list[tuple[Order, AdapterVersion]]:
        aged: list[tuple[Order, AdapterVersion]] = []
        for version in list(self._short):
            first = version.first_waiting()
            if first is None:
                del self._short[version]
            elif version.waiting[first] < now - AGING_SECONDS:
                aged.append((first.order, version))
        return aged

    def _to_drain(self, starving: AdapterVersion, order: Order) -> set[bytes]:
        """The adapters on the device that must go, or stop running.

        Preferably those without requests more urgent than `order`, as these do not yield, and of these the ones with
        the fewest users. What preempted requests began with stays in host memory, so it is of no use to one that waits
        to get there: if they yielded, both would wait for ever.
        """
        pool = self._pool
        ranked = sorted(pool.digests(), key=lambda digest: (self._is_urgent(digest, order), pool.num_users(digest)))
        able = [digest for digest in ranked if not pool.is_pinned(digest)]
        if starving.digest is None or starving.digest not in self._host:
            return set([digest for digest in able if not self._registry.is_held(digest)][:1])
        chosen: set[bytes] = set()
        if starving.digest not in pool:
            rows = pool.num_free
            for digest in able:
                if rows >= starving.rows:
                    break
                chosen.add(digest)
                rows += len(pool.allocation(digest).rows)
        if not pool.can_run(starving.digest) and not any(pool.num_users(digest) for digest in chosen):
            chosen.update([digest for digest in ranked if pool.num_users(digest)][:1])
        return chosen

    def _is_urgent(self, digest: bytes, order: Order) -> bool:
        """Return whether any request for a content is more urgent than `order`."""
        for version in self._registry.with_content(digest):
            first = version.first_waiting()
            if (first is not None and first.order < order) or any(request.order < order for request in version.running):
                return True
        return False
