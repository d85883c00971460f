"""Local folders: what may be read of one, and a folder whose subfolders are adapters.

Whoever names a folder over HTTP is not trusted with the server's file system: the folder, and every file of it that the
engine would read, must really lie inside the allowed roots, whatever links say, and be a file or a folder.

Checking and reading are two moments, and the engine reads in another process. So the caller takes the state of what it
checked (inodes, sizes, times of change, which nobody can set back), lets the engine read the *real* path, and checks
again: a load during which something was exchanged is undone. It remains that whoever may write into a root decides what
its adapters are: roots belong to trusted users.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....core.adapter_files import CONFIG_FILE
from ....core.errors import AdapterError
from .resolver import DRAFT_FOLDER, no_adapter, shown_source, valid_folder_name

MAX_PATH = 4096
_MAX_ENTRIES = 1000
"""Entries of one folder that are looked at."""
_PREFIX = "adapter_"
"""Beginning of the names of an adapter's files; a training run leaves others beside them, which are not read."""


class FileState(NamedTuple):
    """One file or folder at one moment."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class CheckedFolder(NamedTuple):
    """A folder that may be read."""

    path: str
    """Its real path, in which nothing is a link."""
    state: tuple[FileState, ...]
    """State of the folder and of each file that would be read; empty when there is no such folder."""


class FolderRules(NamedTuple):
    """Rules for the folders that may be read."""

    roots: tuple[str, ...]
    """Real paths."""
    max_bytes: int
    """Largest size of all files of one adapter together."""

    def check(self, path: str, field: str = "lora_path") -> CheckedFolder:
        """Look at a folder without reading a file.

        Args:
            path: The folder; what does not exist, or is none, passes, for the engine to say so.
            field: Named by errors.

        Raises:
            AdapterError: it is, or a file in it is, outside the roots (told without saying whether it exists), of a
                special kind, or too large.
        """
        if "\0" in path or len(path) > MAX_PATH:
            raise no_adapter(f"{field} must be a path of at most {MAX_PATH} characters without NUL", field)
        real = os.path.realpath(path)
        if not self._inside(real):
            raise no_adapter(f"{field} {shown_source(path)!r} is outside the folders that --lora-root allows", field)
        if not os.path.isdir(real):
            return CheckedFolder(real, ())  # the engine's error says it best
        try:
            return CheckedFolder(real, tuple(self._walk(real, field)))
        except AdapterError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise no_adapter(f"{field} {shown_source(path)!r} cannot be read: {reason}", field) from error

    def check_again(self, folder: CheckedFolder, field: str = "lora_path") -> None:
        """Raise AdapterError when something in a checked folder has been exchanged since."""
        if self.check(folder.path, field) != folder:
            raise no_adapter(f"{field}: the folder changed while the adapter was loaded; try again", field)

    def _inside(self, real: str) -> bool:
        return any(real == root or real.startswith(root.rstrip("/") + "/") for root in self.roots)

    def _walk(self, folder: str, field: str) -> Iterator[FileState]:
        yield _state(folder)
        total = 0
        for entry in self._adapter_entries(folder, field):
            real = os.path.realpath(entry)
            shown = shown_source(os.path.relpath(entry, folder))
            if not self._inside(real):
                raise no_adapter(f"{field}: {shown!r} is a link that leads outside the allowed folders", field)
            status = os.stat(real)
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise no_adapter(f"{field}: {shown!r} is neither a file nor a folder", field)
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
            if total > self.max_bytes:
                raise no_adapter(
                    f"{field}: the adapter's files are larger than the {self.max_bytes} bytes of --max-lora-bytes",
                    field,
                )
            yield _state(real)

    def _adapter_entries(self, folder: str, field: str) -> Iterator[str]:
        """The files that the engine may open: the adapter's own, and all in its folder of draft weights."""
        for entry in _entries(folder, field):
            if entry.name == DRAFT_FOLDER:
                yield entry.path
                for inner in self._below(entry, field):
                    yield inner.path
                    for file in self._below(inner, field):
                        yield file.path
            elif entry.name.startswith(_PREFIX):
                yield entry.path

    def _below(self, entry: os.DirEntry[str], field: str) -> Iterator[os.DirEntry[str]]:
        """The entries of a folder; never those of one that a link leads to outside."""
        if self._inside(os.path.realpath(entry.path)) and entry.is_dir():
            yield from _entries(entry.path, field)


def _entries(folder: str, field: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == _MAX_ENTRIES:
                raise no_adapter(f"{field}: a folder of the adapter has more than {_MAX_ENTRIES} entries", field)
            yield entry


def _state(path: str) -> FileState:
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):  # its size says nothing more
        return FileState(path, status.st_dev, status.st_ino, 0, status.st_mtime_ns, status.st_ctime_ns)
    return FileState(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def real_roots(paths: Sequence[str]) -> tuple[str, ...]:
    """Real paths of roots, each once."""
    return tuple(dict.fromkeys(os.path.realpath(path) for path in paths))


class AdapterDirectory:
    """A folder whose subfolders are adapters by their names: a resolver for names that nobody has loaded.

    New ones are found when they are asked for. A folder without adapter_config.json is none yet: copy that file last.
    """

    def __init__(self, path: str, roots: Sequence[str], max_bytes: int) -> None:
        """Links may lead out of the folder only into one of `roots`."""
        self.path = os.path.abspath(path)
        self._rules = FolderRules(real_roots([path, *roots]), max_bytes)

    def resolve(self, name: str, source: str | None) -> str | None:
        """See `AdapterResolver`."""
        if source is not None or not valid_folder_name(name):
            return None
        folder = os.path.join(self.path, name)
        if not os.path.isfile(os.path.join(folder, CONFIG_FILE)):
            return None
        try:
            return self._rules.check(folder).path
        except AdapterError as error:
            raise AdapterError(f"the adapter {name!r} in --lora-dir: {error.message}", param="model") from error

    def adapters(self) -> dict[str, str]:
        """The subfolders that are adapters, by name, sorted; empty when the folder cannot be read now."""
        found = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if valid_folder_name(entry.name) and os.path.isfile(os.path.join(entry.path, CONFIG_FILE)):
                        found[entry.name] = entry.path
        except OSError:
            return {}
        return dict(sorted(found.items()))
