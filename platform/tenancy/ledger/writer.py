"""The thread that brings rows to the database, many in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from ...core.errors import InvalidRequestError, OutriderError
from ..database.connection import Database, DatabaseUnavailableError
from ..database.schema import usage
from .usage_row import UsageRow

logger = logging.getLogger(__name__)

MAX_BATCH = 500
"""Rows in a transaction."""
FIRST_RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 10.0
"""Largest pause in seconds between attempts while the database is away; each pause is twice as long as the one
before."""


class TokenQuery(NamedTuple):
    """Query for the tokens of a tenant, or of one of its keys, whose requests ended in [start, end)."""

    tenant: str
    key_id: str
    start: float
    end: float
    answer: asyncio.Future[int]


Report = Callable[[Sequence[UsageRow], Exception | None], None]
"""Report on the event loop: rows that are committed, or (with an error) will be tried again."""


class LedgerWriter:
    """Writes rows, each once. What comes while a transaction is in flight goes into the next one (group commit). While
    the database is away it keeps what it could not write, and tries again with growing delays."""

    def __init__(self, database: Database, report: Report) -> None:
        """Starts the thread; belongs to the event loop that runs now."""
        self._database = database
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._items: queue.SimpleQueue[UsageRow | TokenQuery | None] = queue.SimpleQueue()
        self._backlog: deque[UsageRow] = deque()  # not written, oldest first; the thread's own, as all below
        self._queries: list[TokenQuery] = []
        self._stopping = False
        self._delay = 0.0
        self._retry_at = 0.0
        insert = sqlite.insert if database.is_sqlite else postgresql.insert
        # A row that is there already came from a commit whose answer was lost, or from a journal that is replayed.
        self._insert = insert(usage).on_conflict_do_nothing(index_elements=["request_id"])
        self._thread = threading.Thread(target=self._run, name="outrider-ledger", daemon=True)
        self._thread.start()

    def put(self, row: UsageRow) -> None:
        """Write a row."""
        self._items.put(row)

    def ask(self, query: TokenQuery) -> None:
        """Answer a query once all rows that were put before are written; an error if they cannot be."""
        self._items.put(query)

    def stop(self, seconds: float) -> bool:
        """Try to write the waiting rows, and end; returns True when it took no longer. Not on the event loop."""
        self._items.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- in the thread ---

    def _run(self) -> None:
        while not self._stopping or (self._backlog and not self._delay):
            new = self._take()
            if new and self._is_away():
                self._backlog.extend(new)
                self._tell(new, DatabaseUnavailableError("The database is away"))
            elif new or (self._backlog and not self._is_away()):
                # New ones first: callers wait for them.
                rows = new + [self._backlog.popleft() for _ in range(min(len(self._backlog), MAX_BATCH - len(new)))]
                self._write(rows, num_new=len(new))
            self._answer()

    def _is_away(self) -> bool:
        return self._delay > 0 and time.monotonic() < self._retry_at and not self._stopping

    def _take(self) -> list[UsageRow]:
        """The rows that have come; waits for one unless there are others to write."""
        rows: list[UsageRow] = []
        if self._stopping:
            return rows
        timeout = max(0.0, self._retry_at - time.monotonic()) if self._backlog else None
        with contextlib.suppress(queue.Empty):
            item = self._items.get(timeout=timeout)
            while True:
                if item is None:
                    self._stopping = True
                elif isinstance(item, TokenQuery):
                    self._queries.append(item)
                    break  # what comes after it is not to be in its answer
                else:
                    rows.append(item)
                if len(rows) >= MAX_BATCH:
                    break
                item = self._items.get_nowait()
        return rows

    def _write(self, rows: list[UsageRow], num_new: int) -> None:
        """Commit rows, of which the first are new."""
        try:
            self._commit(rows)
        except Exception as error:
            if not isinstance(error, OutriderError):
                logger.exception("usage cannot be written to the database")
            self._backlog.extendleft(reversed(rows[num_new:]))
            self._backlog.extend(rows[:num_new])
            self._delay = min(max(FIRST_RETRY_SECONDS, 2 * self._delay), MAX_RETRY_SECONDS)
            self._retry_at = time.monotonic() + self._delay
            self._tell(rows[:num_new], error)
        else:
            self._delay = self._retry_at = 0.0
            self._tell(rows, None)

    def _commit(self, rows: list[UsageRow]) -> None:
        try:
            with self._database.write() as connection:
                connection.execute(self._insert, [row.values() for row in rows])
        except (InvalidRequestError, IntegrityError):
            # The database is there, and takes one of the rows for wrong. It must not hold up all others forever.
            if len(rows) > 1:
                for row in rows:
                    self._commit([row])
                return
            logger.critical("the database refuses a row of usage, which is lost but for this line: %s", rows[0])

    def _answer(self) -> None:
        queries, self._queries = self._queries, []
        for query in queries:
            result: int | Exception
            try:
                if self._backlog:
                    raise DatabaseUnavailableError("The database has not all of the usage yet")
                result = self._count(query)
            except Exception as error:
                result = error
            self._call(_settle, query.answer, result)

    def _count(self, query: TokenQuery) -> int:
        columns = usage.c
        tokens = select(func.coalesce(func.sum(columns.prompt_tokens + columns.output_tokens), 0)).where(
            columns.tenant == query.tenant, columns.finished_at >= query.start, columns.finished_at < query.end
        )
        if query.key_id:
            tokens = tokens.where(columns.key_id == query.key_id)
        with self._database.read() as connection:
            return int(connection.scalar(tokens) or 0)

    def _tell(self, rows: Sequence[UsageRow], error: Exception | None) -> None:
        self._call(self._report, rows, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self._loop.call_soon_threadsafe(function, *args)


def _settle(answer: asyncio.Future[int], result: int | Exception) -> None:
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
