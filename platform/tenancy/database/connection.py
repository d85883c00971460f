"""Connections to the database: its address, transactions, typed errors. No password appears in an error or a log
line."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sqlalchemy
from sqlalchemy import URL, Connection, event, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ...core.errors import InvalidRequestError, OutriderError

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 4
"""Threads of a database for queries on behalf of requests. The ledger's writer and the directory have their own."""
POOL_SIZE = 8
"""Connections: every thread has at most one, so no thread waits for one."""
SQLITE_BUSY_SECONDS = 10.0
"""Seconds that a writer waits for another one."""
CONNECT_SECONDS = 5
TCP_SILENCE_SECONDS = 10
"""Seconds after which a PostgreSQL server that does not even acknowledge what it is sent counts as gone."""

MIGRATION_SECONDS = 300
"""Seconds that a server waits for another one that changes the tables."""
MIGRATION_LOCK = 0x6F757472_69646572
"""Number of the advisory lock in PostgreSQL: "outrider"."""

_HARMLESS = ("host", "port", "dbname", "user", "sslmode")
_WRITES = "outrider_writes"  # an execution option of the connections that `write` uses


class DatabaseUnavailableError(OutriderError):
    """The database cannot be reached, or failed; trying again later may help."""

    type = "ServiceUnavailableError"
    status = 503


def parse_url(address: str) -> URL:
    """The address of a database: `sqlite:///file.db` or `postgresql://user@host/name`.

    Raises:
        InvalidRequestError: it is none, or of a kind that is not served; the message never repeats it, as there may be
            a password in it.
    """
    try:
        url = sqlalchemy.make_url(address)
        if url.port is not None and not 0 < url.port < 65536:
            raise ValueError
    except (ArgumentError, ValueError):  # whose texts may quote the address
        raise _refused("this is no database URL; write sqlite:///file.db or postgresql://user@host/name") from None
    if url.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise _refused(f"{url.drivername[:64]!r} is not supported; there are sqlite and postgresql")
    if url.query or url.host:
        raise _refused("a SQLite address is sqlite:///relative.db or sqlite:////absolute.db, without host and options")
    if not url.database or url.database == ":memory:":
        raise _refused("a SQLite database must be a file: sqlite:///file.db")
    return url.set(database=str(Path(url.database).absolute()))


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="database")


def shown_url(url: URL) -> str:
    """The address for people: with *** for the password, and for every option that could hold a secret."""
    query = {name: value if name in _HARMLESS else "***" for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


class Database:
    """Connections to one database. Its methods may be called from any thread; `run` from the event loop."""

    def __init__(self, url: URL, *, create: bool = True) -> None:
        """Prepare connections; none is made yet.

        Args:
            url: of `parse_url`.
            create: make a SQLite file that is not there.

        Raises:
            InvalidRequestError: there is no such SQLite file or folder, or the driver is not installed.
        """
        self.url = url
        self.shown = shown_url(url)
        self.is_sqlite = url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            self._check_file(create)
        try:
            self._engine = sqlalchemy.create_engine(
                url,
                pool_size=POOL_SIZE,
                max_overflow=0,
                pool_timeout=CONNECT_SECONDS,
                pool_pre_ping=not self.is_sqlite,  # a server may have been restarted since
                hide_parameters=True,  # of statements in the texts of errors
                connect_args=self._connect_args(),
            )
        except ModuleNotFoundError as error:
            raise _refused(f"{error.name} is not installed: pip install 'outrider[postgres]'") from None
        if self.is_sqlite:
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        self._writing = self._engine.execution_options(**{_WRITES: True})
        self._threads = ThreadPoolExecutor(NUM_THREADS, "outrider-database")

    @property
    def file(self) -> Path | None:
        """The SQLite file; None for a server."""
        return Path(self.url.database or "") if self.is_sqlite else None

    def _check_file(self, create: bool) -> None:
        file = self.file
        assert file is not None
        if file.exists():
            return
        if not create:
            raise _refused(f"there is no file {file}; `outrider admin database upgrade` makes one")
        if not file.parent.is_dir():
            raise _refused(f"there is no folder {file.parent}")
        try:  # its content is private
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise _refused(f"cannot make {file}: {error.strerror}") from None

    def _connect_args(self) -> dict[str, Any]:
        if self.is_sqlite:
            return {"timeout": SQLITE_BUSY_SECONDS, "check_same_thread": False}
        defaults = {
            "application_name": "outrider",
            "connect_timeout": CONNECT_SECONDS,
            "tcp_user_timeout": TCP_SILENCE_SECONDS * 1000,
            "keepalives_idle": TCP_SILENCE_SECONDS,
            "keepalives_interval": 2,
            "keepalives_count": 3,
        }
        return {name: value for name, value in defaults.items() if name not in self.url.query}

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads.

        Raises:
            DatabaseUnavailableError: the database failed.
        """
        with self._typed_errors(), self._engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction, committed at its end; an error inside rolls it back. In SQLite it holds the lock of writers
        from its start, so what it reads stays true.

        Raises:
            DatabaseUnavailableError: the database failed.
            IntegrityError: of SQLAlchemy: what was written contradicts what is there.
        """
        with self._typed_errors(), self._writing.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def change_tables(self) -> Iterator[Connection]:
        """A transaction for migrations, of which there is one at a time: others wait for it.

        Raises:
            DatabaseUnavailableError: the database failed, or another one's migration takes very long.
        """
        with self._typed_errors(), self._writing.connect() as connection:
            if not self.is_sqlite:
                with connection.begin():
                    connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_SECONDS}s'"))
                    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
                    yield connection
                return
            # A step that changes a table copies it and drops the old one, which would count as deleting its rows.
            sqlite = connection.connection.driver_connection
            assert isinstance(sqlite, sqlite3.Connection)
            sqlite.execute("PRAGMA foreign_keys = OFF")
            sqlite.execute(f"PRAGMA busy_timeout = {MIGRATION_SECONDS * 1000}")
            try:
                with connection.begin():
                    yield connection
                    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
                    assert not broken, f"a migration left rows that refer to nothing: {broken[:3]}"
            finally:
                connection.invalidate()  # the next one has the usual settings

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except (DataError, UnicodeEncodeError) as error:
            # PostgreSQL's texts hold no zero characters, and no database half a surrogate pair.
            raise InvalidRequestError("a value has characters that the database cannot hold") from error
        except (DBAPIError, PoolTimeoutError) as error:
            raise DatabaseUnavailableError(f"The database {self.shown} failed: {_reason(error)}") from error

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` on one of the database's own threads: a database that hangs holds up nothing else. What it logs
        has the request's id."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: context.run(work, *args, **kwargs)
        )

    def close(self) -> None:
        """Close all connections; waits for calls that are in flight, which time out by themselves."""
        self._threads.shutdown(cancel_futures=True)
        self._engine.dispose()


def _reason(error: DBAPIError | PoolTimeoutError) -> str:
    """The first line of what the driver said."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__


def _prepare_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions: the module itself would do so too late
    connection.execute("PRAGMA foreign_keys = ON")
    # Write-ahead: readers and the writer do not wait for each other. FULL: a commit survives a power cut.
    connection.execute("PRAGMA synchronous = FULL")
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        _set_write_ahead(connection)


def _set_write_ahead(connection: sqlite3.Connection) -> None:
    """Set write-ahead logging of a new file. SQLite does not always wait by itself when another process does the
    same."""
    deadline = time.monotonic() + SQLITE_BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
