"""Turns of servers that count a tenant's limits together.

    take the tenant's counts from the database -> do all work that has come -> bring the counts back

One server at a time has a tenant's turn, and does in it what a server that is alone would do with its own counts. All
requests that have come since the last turn are in one turn, so the price is two statements for all of them. While the
database is away each server continues alone with the counts that it saw last, and adds its own afterwards.
What is counted in a turn whose commit comes too late counts twice if it has no key: calls that generate nothing, and
the tokens of requests that have ended, until time has paid for them or the ledger is read again.

A server's share (its running, waiting and reserved) ends by a lease that the server renews, so `kill -9` frees the
slots of its requests. What they have taken from a bucket is paid by time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..accounts.principal import Principal
from ..database.connection import DatabaseUnavailableError
from .buckets import SECOND
from .counts import Counts, CountTable
from .scopes import Clock, Scope, ScopeState, ScopeTable

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""Seconds for which a server's share counts after its last turn: longer than a server that lives is ever silent."""
POLL_SECONDS = 0.1
"""Seconds between two turns of a tenant whose requests wait for slots: another server may leave one."""
FORGET_SECONDS = 120
"""Seconds after which the counts of an unused scope are dropped. Time has paid its buckets in 60 s."""


class CommonClock:
    """The database's clock, between two looks at it."""

    def __init__(self, own: Clock) -> None:
        self._own = own
        self._offset = int(own.time() * SECOND) - own.monotonic_ns()

    def set(self, now: int) -> None:
        """Continue from `now`, in nanoseconds since the epoch."""
        self._offset = now - self._own.monotonic_ns()

    def monotonic_ns(self) -> int:
        """See Clock. A time earlier than the last one counts as the last one."""
        return self._own.monotonic_ns() + self._offset

    def time(self) -> float:
        """See Clock."""
        return self.monotonic_ns() / SECOND


class _Work(NamedTuple):
    principal: Principal
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class SharedTurns:
    """Turns of one server; belongs to the event loop."""

    def __init__(self, table: CountTable, scopes: ScopeTable, clock: CommonClock, lease_seconds: float) -> None:
        self._table = table
        self._scopes = scopes
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._server = secrets.token_hex(4)
        self._keys = itertools.count()
        self._work: dict[str, list[_Work]] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._beat: asyncio.Task[None] | None = None
        self._alone: set[str] = set()  # tenants whose counts are not to be had

    def new_key(self) -> str:
        """Key for the charges of one request."""
        return f"{self._server}.{next(self._keys)}"

    def do(self, principal: Principal, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Do `work` in the next turn of the principal's tenant, whether or not anybody waits for its result."""
        if self._beat is None:
            self._beat = asyncio.create_task(self._keep_shares(), name="outrider-limits")
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work.setdefault(principal.tenant, []).append(_Work(principal, work, done))
        self._wake(principal.tenant)
        return done

    def _wake(self, tenant: str) -> None:
        if tenant not in self._workers:
            self._workers[tenant] = asyncio.create_task(self._take_turns(tenant))

    async def _take_turns(self, tenant: str) -> None:
        try:
            await self._take_turn(tenant, self._work.pop(tenant, []))
            while tenant in self._work:
                await self._take_turn(tenant, self._work.pop(tenant))
        finally:
            del self._workers[tenant]

    async def _keep_shares(self) -> None:
        """Look for slots for those who wait, and renew the lease of all who run."""
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            renew = time.monotonic() - renewed_at > self._lease_seconds / 4
            for scope in self._scopes.all():
                if scope.num_waiting or (renew and scope.is_active):
                    self._wake(scope.tenant)
            if renew:
                renewed_at = time.monotonic()

    async def _take_turn(self, tenant: str, items: list[_Work]) -> None:
        outcomes: list[tuple[Any, Exception | None]] | None = None
        scopes: list[Scope] = []

        def change(counts: Counts, now: int) -> Counts | None:
            nonlocal outcomes, scopes
            if outcomes is not None:
                return None  # too late
            self._clock.set(now)
            scopes = self._in_turn(tenant, items)
            until = now + int(self._lease_seconds * SECOND)
            states = []
            for scope in scopes:
                state = ScopeState(*counts.get(scope.key_id, _unused(now)))
                scope.load(state, self._server, now, self._clock.time())
                # Counts before the work, but for what this server had: a slot may have been given already.
                loaded = scope.dump(self._server, now, until)
                states.append(loaded._replace(shares=state.shares))
            outcomes = _outcomes(items, scopes)
            if items and all(error for _, error in outcomes) and not any(scope.is_active for scope in scopes):
                return None
            return self._dump(counts, scopes, states, now)

        try:
            await self._table.change(tenant, change)
            for scope in scopes:
                scope.set_shared()
            self._set_alone(tenant, None)
        except Exception as error:
            self._set_alone(tenant, error)
        if outcomes is None:
            scopes = self._in_turn(tenant, items)
            for scope in scopes:
                scope.forget_others()
            outcomes = _outcomes(items, scopes)
        for item, (result, refusal) in zip(items, outcomes, strict=True):
            if refusal is None:
                item.done.set_result(result)
            else:
                item.done.set_exception(refusal)

    def _in_turn(self, tenant: str, items: list[_Work]) -> list[Scope]:
        """Scopes that the work needs or that other servers must get, with the limits of now."""
        scopes = {scope.key_id: scope for item in items for scope in self._scopes.of(item.principal)}
        return list(scopes.values()) + [
            scope for scope in self._scopes.all(tenant) if scope.is_active and scope.key_id not in scopes
        ]

    def _dump(self, counts: Counts, scopes: list[Scope], loaded: list[ScopeState], now: int) -> Counts | None:
        """New counts; None if the work has changed nothing and no lease is to be renewed."""
        until = now + int(self._lease_seconds * SECOND)
        changed = {}
        for scope, before in zip(scopes, loaded, strict=True):
            state = scope.dump(self._server, now, until)
            if scope.has_news or state._replace(at=before.at) != before:
                changed[scope.key_id] = list(state)
        if not changed:
            return None
        oldest = now - FORGET_SECONDS * SECOND
        return {key: state for key, state in counts.items() if ScopeState(*state).at > oldest} | changed

    def _set_alone(self, tenant: str, error: Exception | None) -> None:
        if error is not None and tenant not in self._alone:
            self._alone.add(tenant)
            known = isinstance(error, DatabaseUnavailableError)
            logger.error("limits of tenant %r hold for this server alone: %s", tenant, error, exc_info=not known)
        elif error is None and tenant in self._alone:
            self._alone.discard(tenant)
            logger.warning("limits of tenant %r hold for all servers again", tenant)

    async def close(self) -> None:
        """Do all work that has come, and end."""
        if self._beat is not None:
            self._beat.cancel()
        while self._workers:
            await asyncio.wait(list(self._workers.values()))
        await self._table.close()


def _unused(now: int) -> list[Any]:
    """State of a scope that was never used."""
    return list(ScopeState(now, [], [], None, {}))


def _outcomes(items: list[_Work], scopes: list[Scope]) -> list[tuple[Any, Exception | None]]:
    """Result or error of each piece of work; afterwards no request gets a slot until the next turn."""
    outcomes: list[tuple[Any, Exception | None]] = []
    for item in items:
        try:
            outcomes.append((item.work(), None))
        except Exception as error:
            outcomes.append((None, error))
    for scope in scopes:
        scope.slots.is_known = False
    return outcomes
