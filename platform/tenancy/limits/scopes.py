"""Scopes of limits: all that a tenant does, or all that one of its keys does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, Protocol

from ..accounts.principal import NO_LIMITS, Limits, Principal
from .buckets import SECOND, RateBucket
from .budgets import Budget, BudgetState, Reading
from .slots import Slots

logger = logging.getLogger(__name__)

ReadUsage = Callable[[str, str, float, float], Awaitable[int]]
"""(tenant, key id or "" for all keys, start, end) -> tokens; see `Ledger.tokens_between`."""
Counted = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Does work while the counts of all servers that count together are known and stay as they are; returns its result."""


class Clock(Protocol):
    """Source of time: intervals from a clock that never goes back, periods from the calendar."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment."""

    def time(self) -> float:
        """Seconds since the epoch."""


class Share(NamedTuple):
    """Share of one server in a scope, in sequences and tokens. It ends at `until` unless the server renews it."""

    until: int
    taken: int
    num_waiting: int
    first_waiting: int | None
    reserved: int


class ScopeState(NamedTuple):
    """Counts of a scope as servers that count together keep them: values of JSON. Times are nanoseconds."""

    at: int
    requests: list[tuple[int, str]]
    tokens: list[tuple[int, str]]
    budget: list[Any] | None
    """A `BudgetState`."""
    shares: dict[str, list[Any]]
    """`Share` of each server in which there are requests of the scope."""


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
        self.slots = Slots(None)
        self.num_waiting = 0
        """Sequences that wait for slots, this scope's or the other's."""
        self.num_waiting_elsewhere = 0
        """The same in other servers that count together with this one."""
        self._others: dict[str, Share] = {}
        self._own: Share | None = None
        """Share of this server as the others know it."""
        self._reading: asyncio.Task[None] | None = None

    @property
    def description(self) -> str:
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
        self.slots.set_limit(limits.max_concurrent_requests)
        if limits.token_budget is None:
            self.budget = None
        elif self.budget is None:
            self.budget = Budget(limits.token_budget, limits.budget_period, wall)
        else:
            self.budget.set_limit(limits.token_budget, limits.budget_period, wall)

    @property
    def in_use(self) -> bool:
        """True when requests run or wait in this server."""
        reserved = self.budget is not None and self.budget.reserved
        return bool(self.slots.taken or self.num_waiting or reserved)

    @property
    def has_news(self) -> bool:
        """True when something was used of which other servers do not know."""
        buckets = (self.requests, self.tokens)
        return any(b is not None and b.has_news for b in buckets) or bool(self.budget is not None and self.budget.news)

    @property
    def is_active(self) -> bool:
        """True if other servers must be notified."""
        return self.in_use or self.has_news

    def set_shared(self) -> None:
        """Note that other servers know of all that was used."""
        for counts in (self.requests, self.tokens, self.budget):
            if counts is not None:
                counts.set_shared()

    @contextlib.contextmanager
    def wait(self, count: int) -> Iterator[None]:
        """Count sequences that wait for slots."""
        self.num_waiting += count
        try:
            yield
        finally:
            self.num_waiting -= count

    def is_idle(self, now: int) -> bool:
        """True when forgetting it would lose nothing but a budget, which the ledger has too."""
        in_use = self.in_use or self._reading is not None
        return not in_use and all(b is None or b.remaining(now) == b.limit for b in (self.requests, self.tokens))

    # --- the ledger's sum ---

    async def read(self, read_usage: ReadUsage, clock: Clock, wall: float, counted: Counted) -> None:
        """Ask the ledger what has been used of the budget; once for all who ask at the same time. `wall`: time of this
        server, as in the rows of the ledger."""
        self.read_in_background(read_usage, clock, wall, counted)
        if self._reading is not None:
            await asyncio.shield(self._reading)

    def read_in_background(self, read_usage: ReadUsage, clock: Clock, wall: float, counted: Counted) -> None:
        """Read the budget without waiting; the known value stays if the ledger cannot be read."""
        if self._reading is None and self.budget is not None:
            reading = self.budget.begin_reading(wall)
            self._reading = asyncio.create_task(self._read(self.budget, reading, read_usage, clock, counted))
            self._reading.add_done_callback(_log_failure)

    async def _read(
        self, budget: Budget, reading: Reading, read_usage: ReadUsage, clock: Clock, counted: Counted
    ) -> None:
        try:
            tokens = await read_usage(self.tenant, self.key_id, reading.start, reading.until)
            await counted(lambda: budget.end_reading(reading, tokens, clock.monotonic_ns() / SECOND))
        finally:
            self._reading = None

    # --- servers that count together ---

    def load(self, state: ScopeState, server: str, now: int, wall: float) -> None:
        """Take the counts of all servers, of which this one is `server`. A server whose share has ended is
        dead: its requests leave their slots, and count as if they had used all that they reserved, until the ledger
        is read again."""
        shares = {name: Share(*share) for name, share in state.shares.items()}
        self._own = shares.pop(server, None)
        self._others = {name: share for name, share in shares.items() if share.until > now}
        for bucket, entries in ((self.requests, state.requests), (self.tokens, state.tokens)):
            if bucket is not None:
                bucket.load(entries, min(state.at, now), now)
        if self.budget is not None:
            self.budget.load(None if state.budget is None else BudgetState(*state.budget), wall)
            if lost := sum(share.reserved for share in shares.values() if share.until <= now):
                self.budget.count_lost(lost)
        self._count_elsewhere()

    def forget_others(self) -> None:
        """Continue alone: the state of other servers is unknown."""
        self._others = {}
        self._count_elsewhere()

    def _count_elsewhere(self) -> None:
        others = self._others.values()
        if self.budget is not None:
            self.budget.reserved_elsewhere = sum(share.reserved for share in others)
        self.num_waiting_elsewhere = sum(share.num_waiting for share in others)
        first = min((share.first_waiting for share in others if share.first_waiting is not None), default=None)
        self.slots.load(sum(share.taken for share in others), first)

    def dump(self, server: str, now: int, until: int) -> ScopeState:
        """Counts of all servers; the share of this one is good for the time `until`, or up to an eighth less when it
        is what the others know."""
        shares: dict[str, list[Any]] = {name: list(share) for name, share in self._others.items()}
        if self.in_use:
            reserved = 0 if self.budget is None else self.budget.reserved
            share = Share(until, self.slots.taken, self.num_waiting, self.slots.first_waiting, reserved)
            own = self._own
            if own is not None and own[1:] == share[1:] and until - own.until < (until - now) / 8:
                share = own
            shares[server] = list(share)
        requests, tokens = ([] if b is None else b.dump(now) for b in (self.requests, self.tokens))
        budget = None if self.budget is None else list(self.budget.dump())
        return ScopeState(now, requests, tokens, budget, shares)


class ScopeTable:
    """Scopes that a server knows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._scopes: dict[tuple[str, str], Scope] = {}
        self.num_kept = 1000
        """Number of scopes after which idle ones are looked for."""

    def of(self, principal: Principal) -> list[Scope]:
        """The tenant's and the key's, as far as they have limits, with the limits of now: a principal of before the
        latest change, such as that of a request which runs long, does not bring the old ones back."""
        scopes = []
        for key_id, limits in (("", principal.tenant_limits), (principal.key_id, principal.key_limits)):
            name = (principal.tenant, key_id)
            scope = self._scopes.get(name)
            if scope is None:
                if limits == NO_LIMITS:
                    continue
                scope = self._scopes[name] = Scope(principal.tenant, key_id)
            if principal.reading >= scope.reading:
                scope.reading = principal.reading
                if scope.limits is not limits:
                    scope.set_limits(limits, self._clock.monotonic_ns(), self._clock.time())
            scopes.append(scope)
        return scopes

    def all(self, tenant: str | None = None) -> list[Scope]:
        """All scopes, or those of a tenant."""
        return [scope for scope in self._scopes.values() if tenant is None or scope.tenant == tenant]

    def forget_idle(self) -> None:
        """Keep the number of scopes in bounds; to be called before any is looked up."""
        if len(self._scopes) >= self.num_kept:
            now = self._clock.monotonic_ns()
            self._scopes = {name: scope for name, scope in self._scopes.items() if not scope.is_idle(now)}
            self.num_kept = max(1000, 2 * len(self._scopes))


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
