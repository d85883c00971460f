"""The files of the ledger's journal: segments, and the lines in them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .usage_row import UsageRow, row_from_json


@dataclass(slots=True, eq=False)
class Segment:
    """One file of the journal."""

    path: Path
    fd: int
    size: int
    """Bytes on the disk, with those reserved."""
    offset: int = 0
    """Offset of the next line."""
    num_live: int = 0
    """Requests whose last line is here."""
    live_bytes: int = 0
    denies_older: bool = False
    """True when a request whose line is in an older segment was dropped here."""
    is_dirty: bool = False
    """True when it was written to since the last `sync`."""
    synced: int = 0
    """Bytes of it that are known to be on the disk."""
    copies: list[tuple[Segment, int]] = field(default_factory=list)
    """Segments and offsets that its lines have been copied to: they must be on the disk before this one goes."""

    @property
    def free(self) -> int:
        """Bytes for further lines."""
        return self.size - self.offset

    def has_unsynced_copies(self, in_use: Sequence[Segment]) -> bool:
        """True when a copy of one of its lines may not be on the disk. A segment that is no longer in use had no line
        that counted any more, or safe copies of its own."""
        return any(copy.synced < offset and copy in in_use for copy, offset in self.copies)


def to_line(content: bytes) -> bytes:
    """Line of `content` with its checksum."""
    return b"%08x %s\n" % (zlib.crc32(content), content)


def parse_line(line: bytes) -> UsageRow | str:
    """A request's state, or the id of one that was dropped. ValueError: the line is damaged."""
    checksum, _, content = line.partition(b" ")
    if len(checksum) != 8 or int(checksum, 16) != zlib.crc32(content):
        raise ValueError("damaged")
    if content.startswith(b'"'):
        return str(json.loads(content))
    return row_from_json(content)


def sync_folder(folder: Path) -> None:
    """Bring the names of its files to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
