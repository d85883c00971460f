"""Writes that survive a crash at any moment: a file is written under a temporary name, synced, and then renamed."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
logger = logging.getLogger(__name__)

TEMPORARY = ".part"
"""Suffix of files that are being written; one that is old was left by a server that was killed."""
_PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700


def make_folder(path: Path) -> Path:
    """The folder, made for its owner alone unless it exists."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=_PRIVATE_FOLDER, exist_ok=True)
    return path


def create(path: Path) -> int:
    """Descriptor of a new file that only its owner may read."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _PRIVATE_FILE)


def open_append(path: Path) -> int:
    """Descriptor of a file to read from and to append to, made unless it exists."""
    return os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC, _PRIVATE_FILE)


def write_all(descriptor: int, content: bytes | bytearray | memoryview) -> None:
    """Write all of `content`. OSError: the disk is full, or failed."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, value: msgspec.Struct, *, durable: bool = True) -> None:
    """Write a value as JSON in place of the file's content: readers see the old content or the new one.

    Args:
        durable: survive a loss of power; else only the end of the process.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        descriptor = create(temporary)
        try:
            write_all(descriptor, msgspec.json.encode(value))
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def read(path: Path, kind: type[T]) -> T | None:
    """The value that `replace` wrote; None if there is no such file, or the disk has damaged it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        logger.error("%s is damaged and left out: %s", path, error)
        return None


def entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        yield from found


def entry_bytes(entry: os.DirEntry[str]) -> int:
    """Bytes of an entry; 0 if it has gone meanwhile."""
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
