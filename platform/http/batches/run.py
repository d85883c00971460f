"""One batch, from its present state to its end.

    validating -> in_progress -> finalizing -> completed, expired or failed
         |             `------> cancelling -> cancelled
         `-> failed

A server that is killed leaves the batch as it was; the next one that runs it continues from the record and the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.types import ASGIApp

from ...core.tasks import cancel
from ...core.text import shorten
from ...tenancy.accounts.principal import Principal
from ..files.store import FileRecord, expiry
from ..protect.acting import Acting
from .answers import Answers
from .lines import LineError, LineParser, LineRequest, numbered
from .sender import Sender, answer_line, error_line, new_line_id
from .store import BatchRecord, Ending, Problem
from .validation import StoppedError, check_file

if TYPE_CHECKING:
    from .service import Batches

logger = logging.getLogger(__name__)

PRIORITY = 1000
"""Priority of a line whose body names none: after clients' requests, which have 0 (lower runs first)."""
TICK_SECONDS = 0.5
"""Seconds between two looks at whether the batch is to end, and two updates of its counts."""
MAX_HELD_BYTES = 64 << 20
"""Bytes of lines that all batches hold, above which each holds no further one before its last one is answered."""
_LOOKS_AT_USAGE = 20
"""Number of looks of which one counts what the tenant has stored: that reads the whole folder."""


class _End(NamedTuple):
    """End of a batch before all of its lines have an answer, and the reason."""

    ending: Ending
    problem: Problem | None = None


class BatchRun:
    """A run of one batch, by the server that has its lock."""

    def __init__(self, batches: Batches, record: BatchRecord, folder: Path, app: ASGIApp) -> None:
        self._batches = batches
        self._record = record
        self._folder = folder
        self._app = app
        self._stop = threading.Event()
        self._input = batches.files.data(record.tenant, record.input_file_id)
        self._answers: Answers
        self._looks = 0

    async def run(self) -> None:
        """Take the batch to its end.

        Raises:
            OSError: the disk is full, or failed; the batch can continue later.
        """
        record = self._record
        try:
            if record.ending is None:
                end = await self._check() or await self._validate()
                if end is None or record.in_progress_at is not None:
                    end = await self._answer(end)
                await self._begin_end(end)
            await self._finish()
        finally:
            self._stop.set()

    async def _save(self, *, durable: bool = True) -> None:
        await self._batches.call(lambda: self._batches.store.save(self._record, durable=durable))

    def _parser(self) -> LineParser:
        batches = self._batches
        return LineParser(
            max_bytes=batches.max_line_bytes, max_values=batches.max_values(), endpoint=self._record.endpoint
        )

    # --- before ---------------------------------------------------------------------------------------------------

    async def _validate(self) -> _End | None:
        """Check the input, unless that has been done."""
        record = self._record
        if record.in_progress_at is not None:
            return None
        parser = self._parser()
        checking = asyncio.ensure_future(self._batches.call_long(check_file, self._input, parser, self._stop))
        try:
            end = await self._until_end(checking)
        finally:
            self._stop.set()
        if end is not None:
            return end
        self._stop.clear()
        try:
            checked = checking.result()
        except StoppedError:
            raise asyncio.CancelledError from None
        if checked.problems:
            record.errors = checked.problems
            return _End("failed")
        record.request_counts.total = checked.num_requests
        record.status = "in_progress"
        record.in_progress_at = self._now()
        await self._save()
        return None

    # --- meanwhile ------------------------------------------------------------------------------------------------

    async def _check(self) -> _End | None:
        """The reason to end now, if there is one."""
        record, batches = self._record, self._batches
        if self._principal() is None:
            message = "The API key that made this batch has expired or has been revoked"
            return _End("failed", Problem("invalid_api_key", message))
        if self._now() >= record.expires_at:
            return _End("expired")
        if await batches.call((self._folder / "cancel").exists):
            return _End("cancelled")
        self._looks += 1
        if self._looks % _LOOKS_AT_USAGE:
            return None
        usage, most = await batches.call(batches.files.usage, record.tenant), batches.files.quotas.max_tenant_bytes
        if usage.num_bytes > most:
            message = f"{usage.num_bytes} bytes are stored with this batch's answers, and max_tenant_bytes is {most}"
            return _End("failed", Problem("storage_limit_exceeded", message))
        return None

    async def _until_end(self, work: asyncio.Future[Any]) -> _End | None:
        """Wait for `work`, or cancel it when the batch is to end before that."""
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=TICK_SECONDS)
                end = await self._check()
                if end is not None and not work.done():
                    return end
                await self._update_counts()
            return None
        finally:
            await cancel(work)

    async def _update_counts(self) -> None:
        answers, counts = getattr(self, "_answers", None), self._record.request_counts
        if answers is None or (answers.num_completed, answers.num_failed) == (counts.completed, counts.failed):
            return
        counts.completed, counts.failed = answers.num_completed, answers.num_failed
        await self._save(durable=False)

    def _principal(self) -> Principal | None:
        return self._batches.principal(self._record.tenant, self._record.key_id)

    def _now(self) -> int:
        return int(self._batches.files.clock())

    # --- lines ----------------------------------------------------------------------------------------------------

    async def _answer(self, end: _End | None) -> _End:
        """Answer all lines that have none yet, unless the batch is to end; returns how it ends."""
        self._answers = await self._batches.call_long(Answers, self._folder)
        try:
            if end is None:
                working = asyncio.ensure_future(self._answer_lines())
                end = await self._until_end(working)
                if end is None:
                    working.result()  # or what it has raised
                    end = _End("completed")
            if end.ending == "expired":
                await self._batches.call_long(self._expire_lines)
        finally:
            await self._batches.call(self._answers.close)
        await self._update_counts()
        return end

    async def _answer_lines(self) -> None:
        async with Sender(self._app, turn=self._turn) as sender:
            slots = asyncio.Semaphore(self._batches.max_lines)
            async with asyncio.TaskGroup() as tasks, aclosing(self._unanswered()) as requests:
                await slots.acquire()
                async for request in requests:
                    task = tasks.create_task(self._answer_line(sender, request))
                    self._batches.hold(task, len(request.body))
                    task.add_done_callback(lambda _: slots.release())
                    await slots.acquire()  # no more lines are read than are answered
                    if self._batches.held_bytes > MAX_HELD_BYTES:
                        await asyncio.wait((task,))

    async def _unanswered(self) -> AsyncGenerator[LineRequest]:
        requests = self._requests()
        while (request := await self._batches.call(next, requests, None)) is not None:
            yield request

    def _requests(self) -> Iterator[LineRequest]:
        """Requests without an answer; blocks."""
        parser = self._parser()
        with self._input.open("rb") as lines:
            for line in numbered(lines, parser.max_bytes):
                if self._stop.is_set():
                    return
                try:
                    request = parser.parse(line)
                except LineError as error:  # the server's bounds were larger when the file was checked
                    logger.warning("%s: line %d: %s", self._record.id, line.number, error.message)
                    continue
                if request.custom_id not in self._answers.finished:
                    yield request

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[Acting]:
        while (principal := self._principal()) is None:
            await asyncio.sleep(TICK_SECONDS)  # the next look at the batch ends it
        async with self._batches.turns.turn(principal):
            yield Acting(principal, PRIORITY)

    async def _answer_line(self, sender: Sender, request: LineRequest) -> None:
        line_id = new_line_id()
        try:
            response = await sender.send(request, line_id)
            written, is_error = answer_line(line_id, request.custom_id, response), not response.is_success
        except Exception as error:  # one request's: the others continue
            logger.exception("%s: a line has no answer", self._record.id)
            message = f"{type(error).__name__}: {shorten(str(error))}"
            written, is_error = error_line(line_id, request.custom_id, "server_error", message), True
        await self._batches.call(lambda: self._answers.append(request.custom_id, written, is_error=is_error))

    def _expire_lines(self) -> None:
        message = "This request could not be executed before the completion window expired."
        for request in self._requests():
            line = error_line(new_line_id(), request.custom_id, "batch_expired", message)
            self._answers.append(request.custom_id, line, is_error=True)

    # --- after ----------------------------------------------------------------------------------------------------

    async def _begin_end(self, end: _End) -> None:
        record, now = self._record, self._now()
        if end.problem is not None:
            record.errors = [*record.errors, end.problem]
        record.ending = end.ending
        if end.ending == "cancelled":
            record.status = "cancelling"
            cancelled = self._folder / "cancel"
            record.cancelling_at = int((await self._batches.call(cancelled.stat)).st_mtime)
        elif record.in_progress_at is not None:
            record.status, record.finalizing_at = "finalizing", now
        await self._save()

    async def _finish(self) -> None:
        """Make the answers files of the tenant, and end."""
        record = self._record
        assert record.ending is not None
        record.output_file_id = await self._adopt("output.jsonl", record.reserved_output_id)
        record.error_file_id = await self._adopt("errors.jsonl", record.reserved_error_id)
        record.status = record.ending
        setattr(record, f"{record.ending}_at", self._now())
        await self._save()
        logger.info("%s: %s, %s", record.id, record.status, msgspec.to_builtins(record.request_counts))

    async def _adopt(self, name: str, file_id: str) -> str | None:
        record, now = self._record, self._now()
        file = FileRecord(
            id=file_id,
            filename=f"{record.id}_{name}",
            purpose="batch_output",
            bytes=0,
            created_at=now,
            expires_at=expiry(now, record.output_expires_after),
        )
        files = self._batches.files
        return file_id if await self._batches.call(files.adopt, record.tenant, self._folder / name, file) else None
