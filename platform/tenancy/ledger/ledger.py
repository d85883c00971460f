"""The ledger: one row for each request that was admitted, whatever becomes of it.

A request is recorded in the local journal before it runs and when it ends, and its row is committed in the database
before the last byte of its answer is sent. While the database is away, the journal is brought to the disk instead and
its rows follow later. When the journal takes no more, new requests are refused; running ones finish.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import OverloadedError
from ..database.connection import Database, DatabaseUnavailableError
from .journal import Journal, JournalError
from .usage_row import UsageRow
from .writer import LedgerWriter, TokenQuery

logger = logging.getLogger(__name__)

COMMIT_SECONDS = 2.0
"""Seconds that an answer waits for the database; after that the journal's copy on the disk has to do."""
COUNT_SECONDS = 10.0
"""Seconds to wait for the sum of used tokens."""
CLOSE_SECONDS = 10.0
"""Seconds to write the last rows when the server ends; the others stay in the journal."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """State of the ledger."""

    num_pending: int
    """Requests that have ended and are not in the database."""
    lag_seconds: float
    """Seconds since the first of them ended; 0 without any."""
    database_is_away: bool
    journal_bytes: int
    journal_max_bytes: int
    problem: str | None
    """Reason why no new requests are taken; None: they are."""
    num_committed: int
    """Rows committed since the start."""
    num_commits: int
    """Transactions for them."""


@dataclass(slots=True)
class _Pending:
    """A row that is not in the database."""

    ended_at: float
    committed: asyncio.Future[bool]
    """True: it is in the database; False: not yet, which may take long."""


class Ledger:
    """Ledger of one server; it belongs to the event loop."""

    def __init__(self, database: Database, journal: Journal) -> None:
        """Begin to write the journal's rows to the database."""
        self._journal = journal
        self._open: dict[str, UsageRow] = {}
        self._pending: dict[str, _Pending] = {}  # in the order of their ends
        self._is_away = False
        self._sync_problem: str | None = None
        self._syncing = asyncio.Lock()
        self._next_sync: asyncio.Task[None] | None = None
        # Its own thread: answers wait for it, and must not wait for what others have given to the usual ones.
        self._disk = ThreadPoolExecutor(1, "outrider-journal")
        self._num_committed = self._num_commits = 0
        self._writer = LedgerWriter(database, self._on_report)
        recovered, journal.recovered.rows = journal.recovered.rows, []
        for row in recovered:
            self._add_pending(row)
            self._writer.put(row)
        if recovered:
            num_lost = sum(row.status == "lost" for row in recovered)
            logger.warning("the journal held %d requests, %d of them unfinished", len(recovered), num_lost)

    @classmethod
    async def open(cls, database: Database, folder: Path, max_bytes: int) -> Ledger:
        """A ledger with the journal in `folder`, which is read and replayed.

        Raises:
            InvalidRequestError: the folder cannot be used, or another server has it; `param` is "journal".
        """
        return cls(database, await asyncio.to_thread(Journal, folder, max_bytes))

    # --- one request's life ---

    def check(self) -> None:
        """Refuse a request that could not be recorded.

        Raises:
            OverloadedError: the journal takes no more.
        """
        if self._sync_problem is not None:
            self._sync_soon()
            raise OverloadedError(f"Requests cannot be accounted for: {self._sync_problem}")

    def begin(self, row: UsageRow) -> None:
        """Record a request that is about to run. `end` or `drop` must follow.

        Raises:
            OverloadedError: the journal takes no more.
        """
        self.check()
        try:
            self._journal.begin(row)
        except JournalError as error:
            raise OverloadedError(f"Requests cannot be accounted for: {error}") from None
        finally:
            self._sync_if_needed()
        self._open[row.request_id] = row

    def checkpoint(self, row: UsageRow) -> None:
        """Record how far a running request is."""
        if row.request_id in self._open:
            self._journal.update(row)
            self._sync_if_needed()

    def drop(self, row: UsageRow) -> None:
        """The engine refused the request before it did anything for it: it has not been admitted, and has no row."""
        if self._open.pop(row.request_id, None) is not None:
            self._journal.drop(row.request_id)

    def end(self, row: UsageRow) -> None:
        """Record how a request has ended, once; `row` must not change any more."""
        if self._open.pop(row.request_id, None) is None:
            return
        try:
            self._journal.end(row)
        except JournalError as error:  # the disk has failed; the database may still take it
            logger.error("%s; a request's usage is in memory alone: %s", error, row)
        self._add_pending(row)
        self._writer.put(row)

    async def committed(self, row: UsageRow) -> None:
        """Wait until a row that has ended is safe: in the database, or on the disk. Being cancelled changes nothing
        for the row."""
        pending = self._pending.get(row.request_id)
        if pending is None:
            return
        if not self._is_away:
            done, _ = await asyncio.wait((pending.committed,), timeout=COMMIT_SECONDS)
            if done and pending.committed.result():
                return
            self._set_away(True)
        await self._sync()

    # --- what has been used ---

    async def tokens_between(self, tenant: str, key_id: str, start: float, end: float) -> int:
        """Prompt and output tokens of the requests of a tenant, or of one of its keys, that ended in [start, end).
        Exact: all that had ended when this was called are counted, and no others of this server.

        Raises:
            DatabaseUnavailableError: the database cannot say, or hangs.
        """
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._writer.ask(TokenQuery(tenant, key_id, start, end, answer))
        try:
            return await asyncio.wait_for(answer, COUNT_SECONDS)
        except TimeoutError:
            raise DatabaseUnavailableError(f"The database does not answer within {COUNT_SECONDS:g} s") from None

    @property
    def problem(self) -> str | None:
        """Reason why no new requests can be accounted for; None: they can."""
        if self._sync_problem is not None:
            self._sync_soon()
        problem = self._sync_problem or self._journal.problem()
        self._sync_if_needed()
        return problem

    @property
    def status(self) -> LedgerStatus:
        """State at this moment."""
        oldest = next(iter(self._pending.values()), None)
        return LedgerStatus(
            num_pending=len(self._pending),
            lag_seconds=0.0 if oldest is None else time.monotonic() - oldest.ended_at,
            database_is_away=self._is_away,
            journal_bytes=self._journal.num_bytes,
            journal_max_bytes=self._journal.max_bytes,
            problem=self.problem,
            num_committed=self._num_committed,
            num_commits=self._num_commits,
        )

    async def close(self) -> None:
        """Write the last rows. Requests that still run, of which there should be none, count as lost."""
        for row in list(self._open.values()):
            self.end(row)
        if not await asyncio.to_thread(self._writer.stop, CLOSE_SECONDS):
            logger.error("the database does not answer: %d rows stay in the journal", len(self._pending))
        await asyncio.sleep(0)  # the writer's last reports
        if self._pending or self._next_sync is not None:
            await self._sync()
        async with self._syncing:  # one that is in flight
            self._journal.close()
        await asyncio.to_thread(self._disk.shutdown)

    # --- inside ---

    def _add_pending(self, row: UsageRow) -> None:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending[row.request_id] = _Pending(time.monotonic(), future)

    def _on_report(self, rows: Sequence[UsageRow], error: Exception | None) -> None:
        if error is not None:
            self._set_away(True, error)
            for row in rows:
                _resolve(self._pending[row.request_id].committed, False)
            return
        self._set_away(False)
        self._num_commits += 1
        self._num_committed += len(rows)
        for row in rows:
            _resolve(self._pending.pop(row.request_id).committed, True)
        self._journal.forget([row.request_id for row in rows])

    def _set_away(self, away: bool, error: Exception | None = None) -> None:
        if away and not self._is_away:
            reason = error or f"no answer within {COMMIT_SECONDS:g} s"
            logger.error("the ledger's database is away; usage goes to %s meanwhile: %s", self._journal.folder, reason)
        elif self._is_away and not away:
            logger.warning("the ledger's database is back; %d rows follow", len(self._pending))
        self._is_away = away

    async def _sync(self) -> None:
        """Bring the journal to the disk: once for all who ask while it is being done for others."""
        await asyncio.shield(self._sync_soon())

    def _sync_soon(self) -> asyncio.Task[None]:
        if self._next_sync is None:
            self._next_sync = asyncio.create_task(self._sync_once())
        return self._next_sync

    def _sync_if_needed(self) -> None:
        """Sync if space in the journal waits for the disk; no other caller waits for it."""
        if self._journal.needs_sync:
            self._sync_soon()

    async def _sync_once(self) -> None:
        async with self._syncing:
            self._next_sync = None  # what is written from now on needs another
            try:
                await asyncio.get_running_loop().run_in_executor(self._disk, self._journal.sync())
            except OSError as error:
                self._sync_problem = f"the journal cannot be brought to the disk: {error.strerror}"
                logger.error("%s", self._sync_problem)
            else:
                self._sync_problem = None
                self._journal.delete_dead()


def _resolve(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)
