"""Aging: a request that has waited too long for room makes less urgent requests yield it.

    room that it waits for                what less urgent requests give up
    host memory                           one adapter on the device, so that it can leave host memory
    rank rows                             all rows that come free, and adapters that together have enough rows
    one of max_loras running adapters     a slot that comes free, and the adapter with the fewest running requests

So a request waits at most `AGING_SECONDS`. After that it waits for one running request and one load, for each adapter
that more urgent requests wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from ...platform.core.request import Request
from ..registry.registry import AdapterRegistry
from ..registry.versions import AdapterVersion, Order
from .residency import Residency

AGING_SECONDS = 2.0
"""Time after which other requests must yield to one that waits for room."""
LOOK_SECONDS = 0.05
"""Time between two checks for requests that have waited that long."""


class Aging:
    """Versions whose requests wait for room, and the requests that must yield to them. It only reads the tiers."""

    def __init__(self, registry: AdapterRegistry, residency: Residency, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._host, self._pool = residency.host, residency.pool
        self._clock = clock
        self._blocked: dict[AdapterVersion, None] = {}  # refused room, and not admitted since
        self._starving: deque[AdapterVersion] = deque()  # of these the ones that waited too long, most urgent first
        self._next_look = -math.inf
        self._draining: set[bytes] | None = None  # digests to evict, until the next change

    @property
    def any_blocked(self) -> bool:
        """True when a version was refused room and has not had it since."""
        return bool(self._blocked)

    def block(self, version: AdapterVersion) -> None:
        """Record that a version was refused room."""
        if version not in self._blocked:
            self._blocked[version] = None
            self._next_look = -math.inf

    def unblock(self, version: AdapterVersion) -> bool:
        """Record that a version has room, or needs none any more. Returns whether it was blocked."""
        if version not in self._blocked:
            return False
        del self._blocked[version]
        self._draining = None
        return True

    def changed(self) -> None:
        """Record that room may have become free, or that requests may have ended."""
        self._draining = None

    def must_yield(self, request: Request, version: AdapterVersion) -> bool:
        """Return whether a request must wait, so that a more urgent one that is starving gets the room it needs.

        The version's content is in host memory. The request may not take free room that the other one needs, and may
        not run on an adapter that is to be evicted from the device.
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
            num_places = pool.max_running - pool.num_running
            if num_places <= 1 and not pool.num_users(starving.digest) and not pool.num_users(version.digest):
                return True
        if self._draining is None:
            self._draining = self._to_drain(starving, first.order)
        return version.digest in self._draining

    def _find_starving(self) -> AdapterVersion | None:
        """Return the version of the most urgent request that has waited too long for room."""
        if not self._blocked:
            return None
        now = self._clock()
        if now >= self._next_look:
            before = self._starving[0] if self._starving else None
            self._next_look = now + LOOK_SECONDS
            self._starving = deque(version for _, version in sorted(self._look(now), key=lambda item: item[0]))
            if not self._starving or self._starving[0] is not before:
                self._draining = None
        while self._starving and (self._starving[0] not in self._blocked or self._starving[0].first_waiting() is None):
            self._starving.popleft()
            self._draining = None
        return self._starving[0] if self._starving else None

    def _look(self, now: float) -> list[tuple[Order, AdapterVersion]]:
        """Return the versions with a request that has waited too long, and unblock those without requests."""
        found: list[tuple[Order, AdapterVersion]] = []
        for version in list(self._blocked):
            first = version.first_waiting()
            if first is None:
                del self._blocked[version]
            elif version.waiting[first] < now - AGING_SECONDS:
                found.append((first.order, version))
        return found

    def _to_drain(self, starving: AdapterVersion, order: Order) -> set[bytes]:
        """Return the adapters that must leave the device, or stop running.

        Adapters with requests more urgent than `order` come last, since these requests do not yield; the fewest users
        come first. A starving version that is not in host memory needs room there. An adapter that a preempted request
        began with stays in host memory, so draining it would not help.
        """
        pool = self._pool
        ranked = sorted(pool.digests(), key=lambda digest: (self._is_urgent(digest, order), pool.num_users(digest)))
        unpinned = [digest for digest in ranked if not pool.is_pinned(digest)]
        if starving.digest is None or starving.digest not in self._host:
            return set([digest for digest in unpinned if not self._registry.is_held(digest)][:1])
        chosen: set[bytes] = set()
        if starving.digest not in pool:
            rows = pool.num_free
            needed = pool.size(starving.rows, starving.bytes_outside_rows)
            for digest in unpinned:
                if rows >= needed:
                    break
                chosen.add(digest)
                rows += pool.allocation(digest).size
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
