"""A server's copy of the database's tenants and keys, never more than a moment old."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType

from sqlalchemy import select

from ...core.errors import OutriderError
from ...core.tasks import cancel
from ..database.connection import Database, DatabaseUnavailableError
from ..database.schema import api_keys
from ..database.store import read_prefixes, read_record, read_revision, read_tenants
from .authenticator import StaticKeys, hash_key
from .principal import Principal
from .records import Key, SharedPrefix, Tenant

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Seconds between reads of the revision: a change made elsewhere, such as a revoked key, counts after this and a
query."""
MAX_AGE_SECONDS = 3600.0
"""Seconds for which the last copy serves while the database is away. No key in it can be revoked meanwhile, but
another server may still reach it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The directory at one revision."""

    revision: int = -1
    reading: int = 0
    """Number of this server's readings. Unlike the revision, which a restored backup sets back, it only grows."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    prefixes: tuple[SharedPrefix, ...] = ()
    entries: Mapping[bytes, _Entry] = field(default_factory=dict, repr=False)
    """Keys that have not been revoked, of tenants that may enter, by the SHA-256 of the key."""
    by_id: Mapping[str, _Entry] = field(default_factory=dict, repr=False)
    """Entries by the id of the key."""


class Directory:
    """An `Authenticator` over the database's keys, in addition to those given to the server itself.

    Belongs to the event loop, but for what reads the database: that has a thread of its own, so that no long query of
    somebody else keeps a revoked key alive.
    """

    def __init__(
        self,
        database: Database,
        admin_api_keys: Sequence[str] = (),
        *,
        clock: Callable[[], float] = time.time,
        age_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._operators = StaticKeys(admin_api_keys, admin_api_keys) if admin_api_keys else None
        self._clock = clock
        self._age_clock = age_clock
        self._snapshot = Snapshot()
        self._checked_at = age_clock()
        self._failing = False
        self._listeners: list[Callable[[Snapshot], None]] = []
        self._thread = ThreadPoolExecutor(1, "outrider-directory")
        self._refreshing = asyncio.Lock()
        self._poller: asyncio.Task[None] | None = None

    # --- what it knows ---

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """All tenants by name, disabled ones too."""
        return self._snapshot.tenants

    @property
    def has_admin_key(self) -> bool:
        """True if this server can be administered over HTTP."""
        entries = self._snapshot.entries.values()
        return self._operators is not None or any(e.principal.is_admin and not self._is_expired(e) for e in entries)

    def authenticate(self, key: str) -> Principal | None:
        """See `Authenticator`. A digest reveals nothing about the key, so looking it up need not take constant time.

        Raises:
            DatabaseUnavailableError: what is known is too old to be trusted.
        """
        if not key:
            return None
        if self._operators is not None:
            operator = self._operators.authenticate(key)
            if operator is not None:
                return operator
        if self._age_clock() - self._checked_at > MAX_AGE_SECONDS:
            raise DatabaseUnavailableError("API keys cannot be checked: the database has been away for too long")
        entry = self._snapshot.entries.get(hash_key(key))
        return None if entry is None or self._is_expired(entry) else entry.principal

    def principal(self, key_id: str) -> Principal | None:
        """The principal of a key by its id, as it is now; None: the key would not be let in any more."""
        entry = self._snapshot.by_id.get(key_id)
        return None if entry is None or self._is_expired(entry) else entry.principal

    def is_valid(self, principal: Principal) -> bool:
        """True when the key behind a request, which may have waited for long, would still be let in."""
        return not principal.key_id or self.principal(principal.key_id) is not None

    def _is_expired(self, entry: _Entry) -> bool:
        return entry.expires_at is not None and entry.expires_at <= self._clock()

    # --- keeping it fresh ---

    def subscribe(self, listener: Callable[[Snapshot], None]) -> None:
        """Call `listener` on the event loop with what there is now, and again after every change."""
        self._listeners.append(listener)
        if self._snapshot.revision >= 0:
            listener(self._snapshot)

    async def start(self) -> None:
        """Read everything, and keep looking for changes from then on.

        Raises:
            DatabaseUnavailableError: the database cannot be read.
        """
        await self.refresh()
        self._poller = asyncio.create_task(self._poll(), name="outrider-directory")

    async def refresh(self) -> None:
        """See every change that was committed before this call.

        Raises:
            DatabaseUnavailableError: the database cannot be read; what was known stays.
        """
        async with self._refreshing:
            began = self._age_clock()
            loop = asyncio.get_running_loop()
            snapshot = await loop.run_in_executor(self._thread, self._read, self._snapshot)
            self._checked_at = began
            if snapshot is self._snapshot:
                return
            self._snapshot = snapshot
        for listener in self._listeners:
            listener(snapshot)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.refresh()
            except Exception as error:
                if not self._failing:  # once, not twice a second
                    known = isinstance(error, OutriderError)
                    logger.error("keys and tenants stay as they were, for an hour: %s", error, exc_info=not known)
                self._failing = True
            else:
                if self._failing:
                    logger.warning("the database is back")
                self._failing = False

    def _read(self, known: Snapshot) -> Snapshot:
        """The database's state; `known` itself when nothing has changed. In the directory's thread."""
        with self._database.read() as connection:
            # The revision first: if a statement sees more than the one before, the next look reads once too often.
            revision = read_revision(connection)
            if revision == known.revision:
                return known
            tenants = {tenant.name: tenant for tenant in read_tenants(connection)}
            entries = {}
            for row in connection.execute(select(api_keys).where(api_keys.c.revoked_at.is_(None))):
                key, tenant = read_record(Key, row), tenants.get(row.tenant)
                if tenant is None or tenant.disabled:
                    continue
                principal = Principal(
                    tenant=tenant.name,
                    key_id=key.id,
                    scopes=frozenset(key.scopes),
                    weight=tenant.weight,
                    tenant_limits=tenant.limits,
                    key_limits=key.limits,
                    max_adapters=tenant.max_adapters,
                    reading=known.reading + 1,
                )
                entries[bytes(row.digest)] = _Entry(principal, key.expires_at)
            prefixes = tuple(read_prefixes(connection))
        return Snapshot(
            revision,
            known.reading + 1,
            MappingProxyType(tenants),
            prefixes,
            MappingProxyType(entries),
            MappingProxyType({entry.principal.key_id: entry for entry in entries.values()}),
        )

    async def close(self) -> None:
        """Stop to follow the database."""
        await cancel(self._poller)
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
