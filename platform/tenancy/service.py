"""Tenancy of a running server: database, directory, limiter and ledger."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from .accounts.directory import Directory
from .database.connection import Database, parse_url
from .database.migrations.upgrade import upgrade
from .database.store import Store
from .ledger.ledger import Ledger
from .limits.counts import CountTable
from .limits.limiter import Limiter

JOURNAL_MAX_BYTES = 64 << 20
"""Some 100,000 requests while the database is away."""


class Tenancy:
    """One object a server, from `Tenancy.open`; belongs to the event loop."""

    def __init__(
        self, database: Database, directory: Directory, ledger: Ledger, limiter: Limiter, opened: AsyncExitStack
    ) -> None:
        """Use `open`. `opened` closes what has been opened."""
        self.database = database
        self.store = Store(database)
        """Blocking: call it through `database.run`, and `directory.refresh` after a change."""
        self.directory = directory
        self.ledger = ledger
        self.limiter = limiter
        self._opened = opened

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        admin_api_keys: Sequence[str] = (),
        journal: Path | None = None,
        journal_max_bytes: int = JOURNAL_MAX_BYTES,
        shared_limits: bool = False,
    ) -> Tenancy:
        """Connect, bring the tables up to date, read who there is, and replay the journal.

        Args:
            admin_api_keys: keys of operators that are in no database.
            journal: folder of the ledger's journal; None: see `default_journal`.
            journal_max_bytes: disk that it may take; when that is full, new requests are refused.
            shared_limits: count limits together with all servers of the database that do so too.

        Raises:
            InvalidRequestError: no such database, or one of a newer Outrider; or the journal's folder cannot be used.
            DatabaseUnavailableError: it cannot be reached.
        """
        database = Database(parse_url(url))
        async with AsyncExitStack() as opened:
            opened.push_async_callback(asyncio.to_thread, database.close)
            await database.run(upgrade, database)
            directory = Directory(database, admin_api_keys)
            opened.push_async_callback(directory.close)
            await directory.start()
            folder = journal or default_journal(database)
            ledger = await Ledger.open(database, folder, journal_max_bytes)
            opened.push_async_callback(ledger.close)
            limiter = Limiter(ledger.tokens_between, table=CountTable(database) if shared_limits else None)
            opened.push_async_callback(limiter.close)
            directory.subscribe(lambda snapshot: limiter.change_limits(e.principal for e in snapshot.by_id.values()))
            return cls(database, directory, ledger, limiter, opened.pop_all())

    async def close(self) -> None:
        """Write what the ledger still has, and let go of the database. The server calls this when no request is running
        any more."""
        await self._opened.aclose()


async def write_journal(database: Database, folder: Path, max_bytes: int) -> None:
    """Write into the ledger what a server that is dead has left in its journal.

    Raises:
        InvalidRequestError: the folder cannot be used.
    """
    ledger = await Ledger.open(database, folder, max_bytes)
    await ledger.close()


def default_journal(database: Database) -> Path:
    """Journal's folder: next to a SQLite file, else in the user's folder for state, one for each database. One server
    has it at a time."""
    if database.file is not None:
        return database.file.with_name(database.file.name + ".ledger")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    url = database.url  # without who connects, and how
    parts = (url.host, url.port, url.database, *(url.query.get(name) for name in ("host", "port", "dbname")))
    return Path(state) / "outrider" / "ledger" / hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
