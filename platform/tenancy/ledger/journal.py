"""A local journal of requests: what the ledger does not have yet, safe from the death of this process.

Append-only files ("segments") of checksummed lines, each the whole state of one request: its row as it would be if the
server died now. The last line of a request counts. A line is written when a request begins, at most once a second while
it runs, and when it ends; it reaches the system at once (so `kill -9` loses nothing), and the disk with `sync`.

    00000007.journal   crc row\n crc row\n ...            deleted when no request's last line is in it any
    00000008.journal   crc row\n crc row\n 0 0 0 0 ...    more, or when few are, which are moved
                                           ^ space is reserved in advance: a request that began can
                                             always write its end, also on a disk that is full

Replaying a journal twice, or one whose rows the database has already, changes nothing: ids are unique there. A line
that is torn or damaged is left out; the one before it counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ...core.errors import InvalidRequestError
from .journal_files import Segment, parse_line, sync_folder, to_line
from .usage_row import UsageRow, row_to_json

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 20
MIN_SEGMENTS = 8
"""Number of segments that fit the bound: segments are smaller if it is small."""
GROWTH_BYTES = 640
"""Bytes by which the last line of a request is at most longer than its first: counts, times, digest, status."""


class JournalError(Exception):
    """The journal is full, or its disk is."""


@dataclass(slots=True, eq=False)
class _State:
    """A request that the ledger does not have."""

    segment: Segment
    line: bytes
    reserved: int
    """Bytes kept free for its end; 0 once that is written."""


@dataclass(slots=True)
class Recovered:
    """Contents of a journal when it was opened."""

    rows: list[UsageRow] = field(default_factory=list)
    """Rows of its requests; those that had not ended have status "lost"."""
    num_damaged: int = 0
    """Lines that could not be read."""


class Journal:
    """One folder, for one process. Not for several threads, but what `sync` returns may run in any."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open a folder, created if there is none, and read what is in it (`recovered`).

        Raises:
            InvalidRequestError: it cannot be written, or another server has it.
        """
        self.folder = folder
        self.max_bytes = max_bytes
        self._segment_bytes = min(SEGMENT_BYTES, max_bytes // MIN_SEGMENTS)
        self._segments: list[Segment] = []  # oldest first; the last one is written to
        self._states: dict[str, _State] = {}
        self._reserved = 0
        self._num_bytes = 0
        self._number = 0
        self._folder_is_dirty = False
        self.recovered = Recovered()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequestError(f"journal: cannot use {folder}: {error.strerror}", param="journal") from None
        try:
            self._open()
        except BaseException:
            self._let_go()
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidRequestError(
                f"journal: another server uses {self.folder}; give each a folder of its own", param="journal"
            ) from None
        try:
            self._read()
            self._rotate(self._segment_bytes)
        except OSError as error:
            raise InvalidRequestError(f"journal: cannot use {self.folder}: {error}", param="journal") from None

    # --- what there is ---

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk, with those that are reserved."""
        return self._num_bytes

    @property
    def num_requests(self) -> int:
        """Requests that the ledger does not have."""
        return len(self._states)

    def problem(self) -> str | None:
        """Reason why no new request can be recorded; None: one can."""
        try:
            self._make_room(self._segment_bytes // 8)
        except JournalError as error:
            return str(error)
        return None

    # --- writing ---

    def begin(self, row: UsageRow) -> None:
        """Record a request before it runs; `row` as it is to be found should this process die.

        Raises:
            JournalError: there is no room for it and its end.
        """
        line = to_line(row_to_json(row))
        reserved = len(line) + GROWTH_BYTES
        self._make_room(len(line) + reserved)
        self._append(row.request_id, line, reserved)

    def update(self, row: UsageRow) -> None:
        """Record how far a request is, if there is room for that."""
        state = self._states.get(row.request_id)
        if state is None:
            return
        line = to_line(row_to_json(row))
        with contextlib.suppress(JournalError):
            self._make_room(len(line))
            self._append(row.request_id, line, state.reserved)

    def end(self, row: UsageRow) -> None:
        """Record a request's last state. It stays until it is forgotten.

        Raises:
            JournalError: the disk failed; room is no reason.
        """
        self._append(row.request_id, to_line(row_to_json(row)), 0)

    def drop(self, request_id: str) -> None:
        """A request that had begun was refused after all: it leaves no row."""
        with contextlib.suppress(JournalError):
            segment, state = self._write(to_line(json.dumps(request_id).encode())), self._states.get(request_id)
            segment.denies_older |= state is not None and state.segment is not segment
        self.forget([request_id])

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that the ledger has."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                self._reserved -= state.reserved
                state.segment.num_live -= 1
                state.segment.live_bytes -= len(state.line)
        self.delete_dead()

    @property
    def needs_sync(self) -> bool:
        """True when segments wait for the disk before they can go: call `sync`, and `delete_dead` after that."""
        return any(
            not segment.num_live and segment.has_unsynced_copies(self._segments) for segment in self._segments[:-1]
        )

    def sync(self) -> Callable[[], None]:
        """Function that brings everything written so far to the disk, to be called in a thread; it raises OSError."""
        dirty = [segment for segment in self._segments if segment.is_dirty]
        written = [(segment, segment.offset) for segment in self._segments]
        # Copies, which stay open whatever becomes of the segments meanwhile.
        copies = [os.dup(segment.fd) for segment in dirty]
        for segment in dirty:
            segment.is_dirty = False
        folder = self.folder if self._folder_is_dirty else None
        self._folder_is_dirty = False

        def work() -> None:
            try:
                for copy in copies:
                    os.fdatasync(copy)
                if folder is not None:
                    sync_folder(folder)
            except OSError:
                for segment in dirty:
                    segment.is_dirty = True
                self._folder_is_dirty = self._folder_is_dirty or folder is not None
                raise
            else:
                for segment, offset in written:
                    segment.synced = max(segment.synced, offset)
            finally:
                for copy in copies:
                    os.close(copy)

        return work

    def close(self) -> None:
        """Let go of the folder; an empty journal leaves no segments."""
        if not self._states:
            for segment in self._segments:
                segment.path.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()
        os.close(self._lock)

    # --- segments ---

    def _append(self, request_id: str, line: bytes, reserved: int) -> None:
        segment = self._write(line)
        state = self._states.get(request_id)
        if state is None:
            self._states[request_id] = _State(segment, line, reserved)
            self._reserved += reserved
        else:
            state.segment.num_live -= 1
            state.segment.live_bytes -= len(state.line)
            self._reserved += reserved - state.reserved
            state.segment, state.line, state.reserved = segment, line, reserved
        segment.num_live += 1
        segment.live_bytes += len(line)

    def _write(self, line: bytes) -> Segment:
        """Write to the newest segment; one that fails is left, for another."""
        for _ in range(2):
            segment = self._segments[-1]
            try:
                if segment.free < len(line):
                    segment = self._rotate(self._segment_bytes)
                if os.pwrite(segment.fd, line, segment.offset) == len(line):
                    segment.offset += len(line)
                    segment.is_dirty = True
                    return segment
                problem: object = "the disk is full"
            except OSError as error:
                problem = error
            segment.size = segment.offset  # nothing more goes here
        raise JournalError(f"the journal cannot be written: {problem}")

    def _make_room(self, num_bytes: int) -> None:
        """Make sure that the newest segment has this much space in addition to the reserved bytes."""
        needed = self._reserved + num_bytes
        if self._segments[-1].free >= needed:
            return
        room = self.max_bytes - self._num_bytes
        if needed > room:
            raise JournalError(
                f"the journal is full: {len(self._states)} requests that are not in the database, and "
                f"{self._num_bytes} bytes of {self.max_bytes}"
            )
        try:
            self._rotate(min(max(self._segment_bytes, 2 * needed), room))
        except OSError as error:
            raise JournalError(f"the journal cannot be written: {error.strerror}") from None
        if self._num_bytes > self.max_bytes // 2:
            self._compact(needed)

    def _rotate(self, size: int) -> Segment:
        """A new segment, with all its bytes reserved on the disk."""
        path = self.folder / f"{self._number + 1:08d}.journal"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._number += 1
        segment = Segment(path, fd, size)
        self._segments.append(segment)
        self._num_bytes += size
        self._folder_is_dirty = True
        self.delete_dead()
        return segment

    def _compact(self, needed: int) -> None:
        """Copy the live lines of old segments to the newest, if that frees enough and leaves the room needed. The
        old ones, which may have been promised to be safe, go when the copies are on the disk (`needs_sync`)."""
        newest = self._segments[-1]
        for segment in self._segments[:-1]:
            if not segment.num_live or 4 * segment.live_bytes > 3 * segment.size:
                continue
            if newest.free - needed < segment.live_bytes:
                return
            states = [(request_id, state) for request_id, state in self._states.items() if state.segment is segment]
            try:
                for request_id, state in states:
                    self._append(request_id, state.line, state.reserved)
            except JournalError:
                return
            finally:  # several if the newest could not be written
                copies = {id(state.segment): state.segment for _, state in states if state.segment is not segment}
                segment.copies += [(copy, copy.offset) for copy in copies.values()]

    def delete_dead(self) -> None:
        """Segments without any request's last line go. Earlier lines of a request that was forgotten may stay in
        others: should they be replayed, the database has its row already; one that was dropped has none, so what says
        so stays as long as they may."""
        for segment in self._segments[:-1]:
            if segment.num_live or segment.has_unsynced_copies(self._segments):
                continue
            if segment is self._segments[0] or not segment.denies_older:
                self._segments.remove(segment)
                os.close(segment.fd)
                segment.path.unlink(missing_ok=True)
                self._num_bytes -= segment.size

    # --- reading ---

    def _read(self) -> None:
        """Take over the segments of an earlier process."""
        rows: dict[str, tuple[UsageRow, bytes, Segment]] = {}
        for path in sorted(self.folder.glob("*.journal")):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            content = path.read_bytes()
            segment = Segment(path, fd, len(content), len(content))
            self._segments.append(segment)
            self._num_bytes += len(content)
            self._number = max(self._number, int(path.stem) if path.stem.isdigit() else 0)
            for piece in content.split(b"\n"):
                line = piece.strip(b"\0")  # of space that was reserved, or of a page that never reached the disk
                if not line:
                    continue
                try:
                    found = parse_line(line)
                except ValueError:
                    self.recovered.num_damaged += 1
                    continue
                if isinstance(found, str):
                    rows.pop(found, None)
                    segment.denies_older = True
                else:
                    rows[found.request_id] = (found, line + b"\n", segment)
        for request_id, (row, line, segment) in rows.items():
            self._states[request_id] = _State(segment, line, 0)
            segment.num_live += 1
            segment.live_bytes += len(line)
            self.recovered.rows.append(row)
        if self.recovered.num_damaged:
            logger.warning("%d lines of the journal in %s are damaged", self.recovered.num_damaged, self.folder)
