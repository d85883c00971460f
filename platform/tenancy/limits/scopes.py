"""Scopes of limits: all that a tenant does, or all that one of its keys does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..accounts.principal import NO_LIMITS, Limits
from .buckets import RateBucket
from .budgets import Budget
from .places import Places

logger = logging.getLogger(__name__)

ReadUsage = Callable[[str, str, float, float], Awaitable[int]]
"""(tenant, key id or "" for all keys, beginning, end) -> tokens; see `Ledger.tokens_between`."""


class Scope:
    """The state of one tenant's or one key's limits."""

    def __init__(self, tenant: str, key_id: str) -> None:
        """`key_id`: "" for the whole tenant."""
        self.tenant = tenant
        self.key_id = key_id
        self.limits = NO_LIMITS
        self.reading = 0
        """Version of the principal whose limits these are."""
        self.requests: RateBucket | None = None
        self.tokens: RateBucket | None = None
        self.budget: Budget | None = None
        self.places = Places(None)
        self.num_waiting = 0
        """Sequences that wait for places, this scope's or the other's."""
        self._reading: asyncio.Task[None] | None = None

    @property
    def shown(self) -> str:
        """Text for messages."""
        return f"API key {self.key_id}" if self.key_id else f"tenant {self.tenant!r}"

    def set_limits(self, limits: Limits, now: int, wall: float) -> None:
        """Hold other limits from now on; what has been used stays used. Times: of `RateBucket` and `Budget`."""
        if limits == self.limits:
            self.limits = limits
            return
        self.limits = limits
        self.requests = _with_limit(self.requests, limits.requests_per_minute, now)
        self.tokens = _with_limit(self.tokens, limits.tokens_per_minute, now)
        self.places.set_limit(limits.max_concurrent_requests)
        if limits.token_budget is None:
            self.budget = None
        elif self.budget is None:
            self.budget = Budget(limits.token_budget, limits.budget_period, wall)
        else:
            self.budget.set_limit(limits.token_budget, limits.budget_period, wall)

    def is_idle(self, now: int) -> bool:
        """True when forgetting it would lose nothing but a budget, which the ledger has too."""
        in_use = self.places.taken or self.num_waiting or self._reading is not None
        return not in_use and all(b is None or b.remaining(now) == b.limit for b in (self.requests, self.tokens))

    async def read(self, read_usage: ReadUsage, clock: Callable[[], float]) -> None:
        """Ask the ledger what has been used of the budget; once for all who ask at the same time."""
        self.read_in_background(read_usage, clock)
        assert self._reading is not None
        await asyncio.shield(self._reading)

    def read_in_background(self, read_usage: ReadUsage, clock: Callable[[], float]) -> None:
        """Read the budget without waiting; the known value stays where the ledger cannot be read."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(read_usage, clock))
            self._reading.add_done_callback(_log_failure)

    async def _read(self, read_usage: ReadUsage, clock: Callable[[], float]) -> None:
        try:
            budget = self.budget
            if budget is not None:
                start, end = budget.begin_reading()
                budget.end_reading(start, await read_usage(self.tenant, self.key_id, start, end), clock())
        finally:
            self._reading = None


def _with_limit(bucket: RateBucket | None, limit: int | None, now: int) -> RateBucket | None:
    if limit is None:
        return None
    if bucket is None:
        return RateBucket(limit, now)
    bucket.set_limit(limit, now)
    return bucket


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.warning("the use of a budget cannot be read from the ledger: %s", task.exception())
