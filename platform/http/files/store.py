"""Files of clients on disk, each tenant's in a folder of its own, within quotas.

    ROOT/owners/<digest of the tenant's name>/files/<id>.data   the content
                                                   <id>.json   its `FileRecord`; the file exists once this does
                                            /files/<random>.part  an upload

The disk is the truth: nothing is kept in memory, so that several servers may share the folder. All calls block.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from ...core.errors import InvalidRequestError, NotFoundError, RateLimitError
from ...core.text import shorten
from ..protect.error_responses import BodyTooLargeError
from .disk import TEMPORARY, create, entries, entry_bytes, make_folder, read, replace, sync, write_all

DEFAULT_EXPIRY = 30 * 86400
"""Seconds that a file is kept unless its `expires_after` says otherwise; OpenAI's figure for batches."""
MAX_UPLOADS = 8
"""Uploads of one tenant that one server takes at once: each holds a thread of the store for moments."""
_STALE_SECONDS = 3600.0
"""Age of a temporary file, or of content without a record, at which its writer must be dead: an upload writes at least
every minute (--client-timeout), and a record follows its content at once."""
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file's facts, as they are kept."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def to_json(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {"object": "file", "status": "processed", "status_details": None, **msgspec.to_builtins(self)}


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bounds on what is stored, with the names of their options."""

    max_file_bytes: int
    max_tenant_bytes: int
    max_tenant_files: int


class Usage(NamedTuple):
    """Storage that a tenant uses."""

    num_bytes: int
    """All of its bytes: files, answers of batches that run, uploads that arrive."""
    num_files: int


def new_file_id() -> str:
    """An id that cannot be guessed."""
    return f"file-{secrets.token_hex(16)}"


def expiry(created_at: float, seconds: int | None) -> int:
    """Time at which a file expires."""
    return int(created_at) + (DEFAULT_EXPIRY if seconds is None else seconds)


class FileStore:
    """The files of all tenants. Thread-safe."""

    def __init__(self, root: Path, quotas: Quotas, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.quotas = quotas
        self.clock = clock
        self.committing = threading.Lock()
        """Held while an upload is checked against the quotas for the last time and becomes a file."""
        self._lock = threading.Lock()
        self._uploads: Counter[str] = Counter()
        self._arrived: Counter[str] = Counter()  # bytes of uploads that arrive, by tenant

    def owner(self, tenant: str) -> Path:
        """Folder of a tenant. Its name is a digest: a tenant's name may hold anything."""
        return self.root / "owners" / hashlib.sha256(tenant.encode()).hexdigest()[:32]

    def files(self, tenant: str) -> Path:
        """Folder of a tenant's files."""
        return self.owner(tenant) / "files"

    def data(self, tenant: str, file_id: str) -> Path:
        """Path of a file's content; `file_id` has been checked."""
        return self.files(tenant) / f"{file_id}.data"

    def usage(self, tenant: str) -> Usage:
        """Files and bytes that a tenant has stored, uploads and answers of batches included."""
        num_bytes = num_files = 0
        for entry in entries(self.files(tenant)):
            num_bytes += entry_bytes(entry)
            num_files += entry.name.endswith(".json")
        for batch in entries(self.owner(tenant) / "batches"):
            num_bytes += sum(map(entry_bytes, entries(Path(batch.path))))
        return Usage(num_bytes, num_files)

    # --- what is there ---

    def get(self, tenant: str, file_id: str, param: str = "file_id") -> FileRecord:
        """A file's record.

        Raises:
            NotFoundError: the tenant has no such file.
        """
        record = None
        if _FILE_ID.fullmatch(file_id):
            record = read(self.files(tenant) / f"{file_id}.json", FileRecord)
        if record is None or self._is_expired(record):
            raise NotFoundError(f"The file {shorten(repr(file_id))} does not exist", param=param)
        return record

    def open(self, tenant: str, file_id: str) -> tuple[FileRecord, BinaryIO]:
        """A file's record and content. NotFoundError: see `get`."""
        record = self.get(tenant, file_id)
        try:
            return record, self.data(tenant, file_id).open("rb")
        except FileNotFoundError:  # deleted just now
            raise NotFoundError(f"The file {shorten(repr(file_id))} does not exist", param="file_id") from None

    def list_files(self, tenant: str) -> list[FileRecord]:
        """A tenant's files, the newest first."""
        found = (read(Path(e.path), FileRecord) for e in entries(self.files(tenant)) if e.name.endswith(".json"))
        records = [record for record in found if record is not None and not self._is_expired(record)]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file, whose id has been checked. A download that has begun ends with the whole content."""
        (self.files(tenant) / f"{file_id}.json").unlink(missing_ok=True)
        self.data(tenant, file_id).unlink(missing_ok=True)

    def _is_expired(self, record: FileRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self.clock()

    # --- what comes ---

    def upload(self, tenant: str) -> Upload:
        """Begin an upload.

        Raises:
            InvalidRequestError: the tenant has as many files, or as many bytes, as it may have.
            RateLimitError: too many uploads arrive at once.
        """
        usage = self.usage(tenant)
        with self._lock:
            if self._uploads[tenant] >= MAX_UPLOADS:
                raise RateLimitError(f"file: {MAX_UPLOADS} uploads of this tenant arrive already", param="file")
            self.check(usage._replace(num_files=usage.num_files + self._uploads[tenant]), 1, 0)
            self._uploads[tenant] += 1
        return Upload(self, tenant, usage.num_bytes - self._arrived[tenant])

    def check(self, usage: Usage, more_files: int, more_bytes: int, param: str = "file") -> None:
        """Refuse what is above the tenant's quotas.

        Raises:
            InvalidRequestError: the message names the quota.
        """
        quotas = self.quotas
        if usage.num_files + more_files > quotas.max_tenant_files:
            raise InvalidRequestError(
                f"{param}: {usage.num_files} files are stored, {more_files} more may be needed, and max_tenant_files "
                f"is {quotas.max_tenant_files}; delete some first",
                param=param,
            )
        if usage.num_bytes + more_bytes > quotas.max_tenant_bytes:
            raise InvalidRequestError(
                f"{param}: {usage.num_bytes + more_bytes} bytes would be stored, and max_tenant_bytes is "
                f"{quotas.max_tenant_bytes}; delete some files first",
                param=param,
            )

    def arrived(self, tenant: str, num_bytes: int) -> int:
        """Count bytes of an upload, or take them off again; returns those of all the tenant's uploads."""
        with self._lock:
            self._arrived[tenant] += num_bytes
            return self._arrived[tenant]

    def ended(self, tenant: str) -> None:
        """Count an upload no longer."""
        with self._lock:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant], self._arrived[tenant]

    def adopt(self, tenant: str, source: Path, record: FileRecord) -> bool:
        """Make a finished file of `source`, which is on the same disk. A second call, after a crash in the first, ends
        what that began. Returns False if there is nothing: no source, or an empty one.
        """
        data = self.data(tenant, record.id)
        make_folder(data.parent)
        if source.exists():
            if not source.stat().st_size:
                source.unlink()
                return False
            sync(source)
            os.utime(source)  # old data without a record is swept
            source.rename(data)
        if not data.exists():
            return False
        replace(
            data.with_suffix(".json"),
            msgspec.structs.replace(record, bytes=data.stat().st_size),
        )
        return True

    # --- what goes ---

    def sweep(self, tenant_folder: Path, in_use: Iterable[str]) -> None:
        """Delete a tenant's expired files, and what servers that were killed have left; `in_use`: ids of files to
        keep."""
        kept, now = set(in_use), self.clock()
        for entry in entries(tenant_folder / "files"):
            path = Path(entry.path)
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == ".json":
                    record = read(path, FileRecord)
                    if record is not None and self._is_expired(record) and record.id not in kept:
                        path.unlink()
                        path.with_suffix(".data").unlink()
                elif now - entry.stat().st_mtime > _STALE_SECONDS:
                    is_orphan = path.suffix == ".data" and not path.with_suffix(".json").exists()
                    if path.suffix == TEMPORARY or is_orphan:
                        path.unlink()


class Upload:
    """A file that arrives. Its calls block. One may still run when its caller has gone and `close` comes."""

    def __init__(self, store: FileStore, tenant: str, stored_bytes: int) -> None:
        self._store, self._tenant = store, tenant
        self._stored_bytes = stored_bytes  # of the tenant, without uploads
        self.num_bytes = 0
        self._is_open = True
        self._lock = threading.Lock()
        try:
            self._path = make_folder(store.files(tenant)) / f"{secrets.token_hex(16)}{TEMPORARY}"
            self._descriptor = create(self._path)
        except BaseException:
            store.ended(tenant)
            raise

    def write(self, content: bytes | bytearray) -> None:
        """Append to the file.

        Raises:
            BodyTooLargeError: it is longer than a file may be.
            InvalidRequestError: the tenant's files are.
        """
        with self._lock:
            if self._is_open:
                self._write(content)

    def _write(self, content: bytes | bytearray) -> None:
        most = self._store.quotas.max_file_bytes
        if self.num_bytes + len(content) > most:
            raise BodyTooLargeError(f"file: it is longer than {most} bytes (max_file_bytes)", param="file")
        self.num_bytes += len(content)
        arrived = self._store.arrived(self._tenant, len(content))
        self._store.check(Usage(self._stored_bytes, 0), 0, arrived)
        write_all(self._descriptor, content)

    def finish(self, filename: str, purpose: str, expires_after: int | None) -> FileRecord:
        """Make it a file; returns its record.

        Raises:
            InvalidRequestError: the tenant's files have become too many, or too long, meanwhile.
        """
        with self._lock:
            assert self._is_open
            record = self._finish(filename, purpose, expires_after)
            self._end()  # before the client, which may upload the next one, gets the reply
            return record

    def _finish(self, filename: str, purpose: str, expires_after: int | None) -> FileRecord:
        store, now = self._store, self._store.clock()
        os.fsync(self._descriptor)
        record = FileRecord(
            id=new_file_id(),
            filename=filename,
            purpose=purpose,
            bytes=self.num_bytes,
            created_at=int(now),
            expires_at=expiry(now, expires_after),
        )
        data = store.data(self._tenant, record.id)
        with store.committing:
            store.check(store.usage(self._tenant), 1, 0)  # its own bytes are among those
            self._path.rename(data)
            sync(data.parent)
            replace(data.with_suffix(".json"), record)
        return record

    def close(self) -> None:
        """Delete what was not finished; a second call does nothing."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)
            self._path.unlink(missing_ok=True)
            self._store.arrived(self._tenant, -self.num_bytes)
            self._store.ended(self._tenant)
