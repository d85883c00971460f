"""The batches of a server: finds those that have not ended, and runs each that no other server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.types import ASGIApp

from ...core.errors import EngineDeadError, InvalidRequestError, RateLimitError
from ...core.tasks import cancel
from ...tenancy.accounts.principal import OPEN, Principal
from ..files.disk import entries, make_folder
from ..files.store import FileStore, Quotas
from .lines import LINE_OVERHEAD
from .run import BatchRun
from .store import ENDED, BatchRecord, BatchStore, OpenBatch
from .turns import Load, Turns

if TYPE_CHECKING:
    from ..serving_state import Serving

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

SCAN_SECONDS = 2.0
"""Seconds between two looks for batches whose server has died."""
RETRY_SECONDS = 30.0
"""Seconds after which a batch that a disk error has stopped is resumed."""
SWEEP_SECONDS = 600.0
"""Seconds between two deletions of what has expired."""
MAX_RUNNING = 32
"""Batches that one server runs at once; others wait their turn as "validating"."""
MAX_RUNNING_OF_TENANT = 4
"""Running batches of one tenant: with all tenants at this bound, eight have batches that run."""
_THREADS = 4
"""Threads for the disk, apart from those that requests need."""


class Batches:
    """One object a server, which belongs to its event loop."""

    def __init__(self, serving: Serving, clock: Callable[[], float] = time.time) -> None:
        """
        Raises:
            InvalidRequestError: the folder cannot be used.
        """
        config = serving.config
        assert config.batch_dir is not None
        root = Path(config.batch_dir).expanduser()
        try:
            make_folder(root / "open")
            os.close(os.open(root, os.O_RDONLY))
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise InvalidRequestError(f"cannot use {root}: {error.strerror}", param="batch_dir") from error
        quotas = Quotas(config.max_file_bytes, config.max_tenant_bytes, config.max_tenant_files)
        self.files = FileStore(root, quotas, clock)
        self.store = BatchStore(self.files)
        self.threads = ThreadPoolExecutor(_THREADS, "outrider-batches")
        self._long_thread = ThreadPoolExecutor(1, "outrider-batch-files")
        self.held_bytes = 0
        """Bytes of lines that are being answered."""
        self.turns = Turns(self._load, self._has_slot)
        self.max_line_bytes = config.max_body_bytes + LINE_OVERHEAD
        self.max_open = config.max_tenant_batches
        """Batches of a tenant that have not ended."""
        self._serving = serving
        self._news = asyncio.Event()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._owners: Counter[str] = Counter()  # of batches that run
        self._is_failing = False
        self._not_before: dict[str, float] = {}
        self._scanner: asyncio.Task[None] | None = None

    async def call(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Result of blocking work, in one of the threads for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, lambda: work(*args, **options))

    async def call_long(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Result of work that reads a whole file: one at a time, so that it neither holds up short calls nor takes
        several processors."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._long_thread, lambda: work(*args, **options))

    # --- for routes -----------------------------------------------------------------------------------------------

    async def create(self, record: BatchRecord) -> None:
        """Take a batch, whose fields have been checked.

        Raises:
            RateLimitError: the tenant has as many open batches as it may.
            NotFoundError: there is no such input file.
            InvalidRequestError: the input file is no upload, or the tenant has no room for the files of answers.
        """
        await self.call(self._create, record)
        self._news.set()

    def _create(self, record: BatchRecord) -> None:
        file = self.files.get(record.tenant, record.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise InvalidRequestError("input_file_id: the purpose of the file is not 'batch'", param="input_file_id")
        num_open = len(self._open_batches(record.tenant))
        if num_open >= self.max_open:
            message = f"{num_open} batches have not ended, and max_tenant_batches is {self.max_open}"
            raise RateLimitError(message, param="max_tenant_batches", retry_after=60.0)
        # Each open batch may leave a file of answers and one of errors.
        self.files.check(self.files.usage(record.tenant), 2 * (num_open + 1), 0, "input_file_id")
        self.store.create(record)
        self.store.prune(record.tenant)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Cancel a batch; one that has ended, or is about to, stays as it is. NotFoundError: see `BatchStore.get`."""

        def leave_word() -> BatchRecord:
            record = self.store.get(tenant, batch_id)
            if record.status in ("validating", "in_progress"):
                self.store.request_cancel(record)
            return self.store.get(tenant, batch_id)

        return await self.call(leave_word)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file; blocks.

        Raises:
            NotFoundError: see `FileStore.get`.
            InvalidRequestError: an open batch reads it.
        """
        record = self.files.get(tenant, file_id)
        reader = next((batch for batch in self._open_batches(tenant) if batch.input_file_id == record.id), None)
        if reader is not None:
            message = f"file_id: the file is the input of {reader.id}, which is {reader.status}: cancel it first"
            raise InvalidRequestError(message, param="file_id")
        self.files.delete(tenant, record.id)

    def _open_batches(self, tenant: str) -> list[BatchRecord]:
        return [batch for batch in self.store.list_batches(tenant) if batch.status not in ENDED]

    # --- for runs -------------------------------------------------------------------------------------------------

    def principal(self, tenant: str, key_id: str) -> Principal | None:
        """Principal of a batch's requests, as its tenant and key are now; None if the key does not count any more."""
        tenancy = self._serving.tenancy
        if tenancy is None or not key_id:  # everybody's, or an operator's, who is in no database
            return OPEN
        principal = tenancy.directory.principal(key_id)
        return principal if principal is not None and principal.tenant == tenant else None

    def hold(self, task: asyncio.Task[None], num_bytes: int) -> None:
        """Count the bytes of a line until its task has ended."""

        def drop(_: object) -> None:
            self.held_bytes -= num_bytes

        self.held_bytes += num_bytes
        task.add_done_callback(drop)

    @property
    def num_running(self) -> int:
        """Batches that this server runs."""
        return len(self._runs)

    @property
    def max_lines(self) -> int:
        """Lines of all batches that run at once: the option, else half of the engine's seats."""
        given = self._serving.config.batch_concurrency
        return given if given is not None else max(1, self._num_seats() // 2)

    def max_values(self) -> int:
        """Values of a line, as of a body."""
        return self._serving.max_values

    def _num_seats(self) -> int:
        with contextlib.suppress(EngineDeadError):  # it has not started
            return self._serving.llm.info.max_num_seqs
        return 0

    def _load(self) -> Load:
        serving = self._serving
        has_seat = serving.state == "ready" and serving.queue.num_in_engine < self._num_seats()
        return Load(has_seat, self.max_lines)

    def _has_slot(self, principal: Principal) -> bool:
        tenancy = self._serving.tenancy
        return tenancy is None or tenancy.limiter.has_slot(principal)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self, app: ASGIApp) -> None:
        """Run batches from now on, with `app` for their requests."""
        self._scanner = asyncio.create_task(self._scan(app), name="outrider-batches")

    def begin_draining(self) -> None:
        """Begin no more batches. Lines that run may end; others wait for the next server."""
        if self._scanner is not None:
            self._scanner.cancel()

    async def close(self) -> None:
        """Leave all batches as they are."""
        await cancel(self._scanner, *self._runs.values())
        for thread in (self.threads, self._long_thread):
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    async def _scan(self, app: ASGIApp) -> None:
        sweep_at = 0.0
        while True:
            self._news.clear()
            try:
                for batch in await self.call(self.store.open_batches):
                    await self._take(batch, app)
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + SWEEP_SECONDS
                    await self.call(self._sweep)
                self._is_failing = False
            except Exception:
                if not self._is_failing:  # once, not every other second
                    logger.exception("batches cannot be looked for in %s", self.files.root)
                self._is_failing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SCAN_SECONDS):  # in Python 3.11 `wait_for` may lose a cancellation
                    await self._news.wait()

    async def _take(self, batch: OpenBatch, app: ASGIApp) -> None:
        """Run a batch unless it runs already."""
        batch_id = batch.batch_id
        if batch_id in self._runs or len(self._runs) >= MAX_RUNNING:
            return
        if self._owners[batch.owner] >= MAX_RUNNING_OF_TENANT:
            return
        if time.monotonic() < self._not_before.get(batch_id, 0.0):
            return
        lock = await self.call(self.store.lock, batch.folder)
        if lock is not None:
            self._owners[batch.owner] += 1
            self._runs[batch_id] = asyncio.create_task(self._run(batch, lock, app), name=batch_id)

    async def _run(self, batch: OpenBatch, lock: FileIO, app: ASGIApp) -> None:
        try:
            record = await self.call(self.store.read_own, batch.folder)
            if record is not None and record.status in ENDED:
                await self.call(self.store.forget, batch)
            elif record is None or not self._can_run(record):  # None: its record is damaged
                self._not_before[batch.batch_id] = time.monotonic() + RETRY_SECONDS
                return
            else:
                await BatchRun(self, record, batch.folder, app).run()
            self._not_before.pop(batch.batch_id, None)
        except Exception:
            logger.exception("%s has stopped, and resumes in %g s", batch.batch_id, RETRY_SECONDS)
            self._not_before[batch.batch_id] = time.monotonic() + RETRY_SECONDS
        finally:
            lock.close()
            del self._runs[batch.batch_id]
            self._owners[batch.owner] -= 1
            self._news.set()

    def _can_run(self, record: BatchRecord) -> bool:
        """False for a tenant's batch on a server without tenants, which another server can run."""
        return self._serving.tenancy is not None or not record.key_id

    def _sweep(self) -> None:
        in_use: dict[str, list[str]] = {}
        self.store.forget_unmade()
        for batch in self.store.open_batches():
            record = self.store.read(batch.folder)
            if record is not None:
                in_use.setdefault(batch.owner, []).append(record.input_file_id)
        for owner in entries(self.files.root / "owners"):
            self.files.sweep(Path(owner.path), in_use.get(owner.name, ()))
