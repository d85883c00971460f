"""The table in which servers that share a database count their tenants' requests together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy import Connection, func, literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import OperationalError

from ..database.connection import Database, DatabaseUnavailableError
from ..database.schema import limit_counts
from .buckets import SECOND

NUM_THREADS = 2
"""Tenants whose counts are changed at the same time by one server. Each needs one of the database's connections."""
CHANGE_SECONDS = 5.0
"""Seconds after which a server continues without the database."""
RETRY_SECONDS = 1.0
"""Seconds for which it does not try again then."""
LOCK_SECONDS = 0.1
"""Seconds for which a thread waits for a tenant's lock that another server has, before it looks after other tenants."""
LOCK_RETRY_SECONDS = 0.4
"""Seconds after which a thread waits for it again: each wait in vain is a line in PostgreSQL's own log."""

_FORMAT = 2  # of the counts; those of a server with another version are not read
_LOCK_NOT_AVAILABLE = "55P03"  # code of PostgreSQL

Counts = dict[str, list[Any]]
"""Counts of a tenant, by key ("" for the whole tenant): `ScopeState`s."""
Change = Callable[[Counts, int], Counts | None]
"""(counts, time of the database in nanoseconds since the epoch) -> new counts; None: there is nothing to write."""


class _LockedError(Exception):
    """Another server has the lock."""


class CountTable:
    """Counts of tenants; belongs to the event loop. They need not survive a power cut."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(NUM_THREADS, "outrider-limits")
        self._retry_at = 0.0
        self._retry_tenant_at: dict[str, float] = {}
        insert = (sqlite.insert if database.is_sqlite else postgresql.insert)(limit_counts)
        self._insert = insert.on_conflict_do_update(index_elements=["tenant"], set_={"counts": insert.excluded.counts})

    async def change(self, tenant: str, change: Change) -> None:
        """Call `change` on the event loop with a tenant's counts, which no other server changes meanwhile, and write
        what it returns.

        Raises:
            DatabaseUnavailableError: `change` was not called, or what it returned may not be written.
        """
        if time.monotonic() < max(self._retry_at, self._retry_tenant_at.get(tenant, 0.0)):
            raise DatabaseUnavailableError("The database was away a moment ago")
        self._retry_tenant_at.pop(tenant, None)
        loop = asyncio.get_running_loop()

        def call(counts: Counts, now: int) -> Counts | None:
            result: concurrent.futures.Future[Counts | None] = concurrent.futures.Future()

            def call_on_loop() -> None:
                if result.set_running_or_notify_cancel():
                    try:
                        result.set_result(change(counts, now))
                    except BaseException as error:
                        result.set_exception(error)

            loop.call_soon_threadsafe(call_on_loop)
            return result.result(CHANGE_SECONDS)  # unless the loop has ended

        try:
            async with asyncio.timeout(CHANGE_SECONDS):  # cancels what has not begun
                while not await loop.run_in_executor(self._threads, self._change, tenant, call):
                    await asyncio.sleep(LOCK_RETRY_SECONDS)
        except DatabaseUnavailableError:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            raise
        except TimeoutError:  # another server may hold the lock of this tenant alone
            self._retry_tenant_at[tenant] = time.monotonic() + RETRY_SECONDS
            raise DatabaseUnavailableError(f"no answer within {CHANGE_SECONDS:g} s") from None

    def _change(self, tenant: str, change: Change) -> bool:
        """One transaction, in a thread; False if another server has the lock, and nothing has been done."""
        with contextlib.suppress(_LockedError), self._database.write() as connection:
            counts, now = self._locked(connection, tenant)
            changed = change(counts, now)
            if changed is not None:
                connection.execute(self._insert, {"tenant": tenant, "counts": {"format": _FORMAT, "scopes": changed}})
            return True
        return False

    def _locked(self, connection: Connection, tenant: str) -> tuple[Counts, int]:
        """Counts of a tenant, locked until the transaction ends, and the time. In SQLite the transaction has the lock
        of all writers."""
        now: Any = literal(None)
        if not self._database.is_sqlite:
            now = func.extract("epoch", func.clock_timestamp())
            lock = select(
                func.set_config("lock_timeout", f"{LOCK_SECONDS:g}s", True),
                # A server that stops in its turn leaves the lock.
                func.set_config("idle_in_transaction_session_timeout", f"{CHANGE_SECONDS:g}s", True),
                func.set_config("synchronous_commit", "off", True),
                func.pg_advisory_xact_lock(func.hashtextextended(f"outrider limits {tenant}", 0)),
            )
            try:
                connection.execute(lock)
            except OperationalError as error:
                if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
                    raise _LockedError from None
                raise
        # A statement of its own: it sees what the one before it has waited for.
        query = select(now, select(limit_counts.c.counts).where(limit_counts.c.tenant == tenant).scalar_subquery())
        moment, found = connection.execute(query).one()
        counts = found["scopes"] if found and found.get("format") == _FORMAT else {}
        return counts, time.time_ns() if moment is None else int(moment * SECOND)

    async def close(self) -> None:
        """End the threads; no change is in flight."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
