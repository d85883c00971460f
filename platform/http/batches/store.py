"""Batches on disk.

    ROOT/open/<batch id>                    digest of the owner: the batch has not ended
    ROOT/owners/<digest>/batches/<batch id>/batch.json     its `BatchRecord`
                                            output.jsonl   answers so far, and
                                            errors.jsonl   errors so far; both become files of the tenant at the end
                                            cancel         cancellation was requested
                                            lock           held (flock) by the server that runs it

Only the holder of the lock writes the record, after it was made. All calls block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ...core.errors import NotFoundError
from ...core.text import shorten
from ..files.disk import create, entries, make_folder, open_append, read, replace, sync, write_all
from ..files.store import DEFAULT_EXPIRY, FileStore

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled", "failed"]
"""Status in which a batch ends."""
ENDED: frozenset[Status] = frozenset(("completed", "expired", "cancelled", "failed"))
WINDOW_SECONDS = {"24h": 86400}
"""Completion windows that may be asked for."""
MAX_ENDED = 1000
"""Batches of a tenant that have ended and are still shown; the oldest goes first. Their files stay."""
_UNMADE_SECONDS = 3600.0
"""Age of an open batch without a record at which its server must be dead: it writes both within a moment."""
_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")


class Problem(msgspec.Struct, frozen=True):
    """An entry of a batch's `errors`."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(msgspec.Struct):
    """A batch's `request_counts`."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, as it is kept; times are in whole seconds."""

    id: str
    tenant: str
    key_id: str
    """Key that made it, on whose behalf its requests are."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    reserved_output_id: str
    """Id that the file of answers gets, and `reserved_error_id` that of errors: a crash does not make another."""
    reserved_error_id: str
    output_expires_after: int = DEFAULT_EXPIRY
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    ending: Ending | None = None
    """Status that follows "finalizing" and "cancelling"."""
    errors: list[Problem] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)

    def to_json(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        hidden = ("tenant", "key_id", "reserved_output_id", "reserved_error_id", "output_expires_after", "ending")
        fields = {name: value for name, value in msgspec.to_builtins(self).items() if name not in hidden}
        errors = {"object": "list", "data": fields["errors"]} if fields["errors"] else None
        return {"object": "batch", **fields, "errors": errors}


class OpenBatch(NamedTuple):
    """A batch that has not ended."""

    batch_id: str
    owner: str
    """Digest of the tenant's name."""
    folder: Path


class BatchStore:
    """The batches of all tenants. Thread-safe."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._open = files.root / "open"

    def folder(self, tenant: str, batch_id: str) -> Path:
        """Folder of a batch."""
        return self._files.owner(tenant) / "batches" / batch_id

    def create(self, record: BatchRecord) -> None:
        """Write down a new batch; from then on any server may run it."""
        folder = make_folder(self.folder(record.tenant, record.id))
        make_folder(self._open)
        descriptor = create(self._open / record.id)  # first: without its record it is skipped
        try:
            write_all(descriptor, self._files.owner(record.tenant).name.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync(self._open)
        replace(folder / "batch.json", record)
        sync(folder.parent)

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch.

        Raises:
            NotFoundError: the tenant has no such batch.
        """
        record = None
        if _BATCH_ID.fullmatch(batch_id):
            record = self.read(self.folder(tenant, batch_id))
        if record is None:
            raise NotFoundError(f"The batch {shorten(repr(batch_id))} does not exist", param="batch_id")
        return record

    def read(self, folder: Path) -> BatchRecord | None:
        """The batch in a folder, as clients see it; None if there is none."""
        record = self.read_own(folder)
        if record is not None and record.status in ("validating", "in_progress"):
            with contextlib.suppress(FileNotFoundError):
                record.cancelling_at = int((folder / "cancel").stat().st_mtime)
                record.status = "cancelling"
        return record

    def read_own(self, folder: Path) -> BatchRecord | None:
        """The batch in a folder, for the holder of its lock: as it was written."""
        return read(folder / "batch.json", BatchRecord)

    def list_batches(self, tenant: str) -> list[BatchRecord]:
        """A tenant's batches, the newest first."""
        found = (self.read(Path(entry.path)) for entry in entries(self._files.owner(tenant) / "batches"))
        records = [record for record in found if record is not None]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def request_cancel(self, record: BatchRecord) -> None:
        """Leave a request for the server that runs the batch."""
        os.close(open_append(self.folder(record.tenant, record.id) / "cancel"))

    def prune(self, tenant: str) -> None:
        """Forget the oldest batches that have ended."""
        ended = [record for record in self.list_batches(tenant) if record.status in ENDED]
        for record in ended[MAX_ENDED:]:
            self._remove(self.folder(tenant, record.id))

    # --- for the server that runs them ---

    def open_batches(self) -> list[OpenBatch]:
        """Batches that have not ended, of all tenants, the oldest first."""
        found = []
        for entry in entries(self._open):
            with contextlib.suppress(FileNotFoundError):
                owner = Path(entry.path).read_text()
                folder = self._files.root / "owners" / owner / "batches" / entry.name
                found.append((entry.stat().st_mtime, OpenBatch(entry.name, owner, folder)))
        return [batch for _, batch in sorted(found)]

    def forget_unmade(self) -> None:
        """Forget batches whose server was killed before it had written their record."""
        for batch in self.open_batches():
            entry = self._open / batch.batch_id
            with contextlib.suppress(FileNotFoundError):
                is_old = self._files.clock() - entry.stat().st_mtime > _UNMADE_SECONDS
                if is_old and not (batch.folder / "batch.json").exists():
                    entry.unlink()

    def lock(self, folder: Path) -> FileIO | None:
        """File that keeps other servers from running the batch until it is closed; None if another has it. An object,
        not a descriptor: it is closed too if a task that waits for it is cancelled, and never gets it."""
        if not (folder / "batch.json").exists():
            return None
        file = FileIO(open_append(folder / "lock"), "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    def save(self, record: BatchRecord, *, durable: bool = True) -> None:
        """Write a batch's record; one that has ended is open no more."""
        folder = self.folder(record.tenant, record.id)
        replace(folder / "batch.json", record, durable=durable)
        if record.status in ENDED:
            (self._open / record.id).unlink(missing_ok=True)
            for name in ("cancel", "output.jsonl", "errors.jsonl"):
                (folder / name).unlink(missing_ok=True)

    def forget(self, batch: OpenBatch) -> None:
        """Take a batch that has ended, or was never made, off the list of the open ones."""
        (self._open / batch.batch_id).unlink(missing_ok=True)

    def _remove(self, folder: Path) -> None:
        for entry in entries(folder):
            Path(entry.path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def new_batch_id() -> str:
    """An id that cannot be guessed."""
    return f"batch_{secrets.token_hex(16)}"
