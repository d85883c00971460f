"""Local folders: what may be read of one, and a folder whose subfolders are adapters.

A client that names a folder is not trusted with the server's file system: the folder, and every file of it that the
engine would read, must really lie inside the allowed roots, whatever links say, and be a file or a folder.

Checking and reading are two moments, and the engine reads in another process. So every read is confined to the roots
again (`AdapterFolder`). The caller also takes the state of what it checked (inodes, sizes, times of change, which
nobody can set back), lets the engine read the *real* path, and checks again: a load during which something was
exchanged is undone. It remains that a user who may write into a root decides what its adapters are.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ....core.adapter_files import (
    ADAPTER_FILES,
    ANYWHERE,
    CONFIG_FILE,
    DRAFT_FOLDER,
    INDEX_FILES,
    TEXT_FILES,
    AdapterFolder,
    is_inside,
    real_roots,
)
from ....core.errors import AdapterError
from ....core.speculative_config import MODEL_METHODS
from .resolver import no_adapter, shown_source, valid_folder_name

MAX_PATH = 4096


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

    def check(self, path: str, field: str = "lora_path", *, is_found: bool = False) -> CheckedFolder:
        """Look at a folder without reading a file.

        Args:
            path: The folder; what does not exist, or is none, passes, for the engine to say so.
            field: Named by errors.
            is_found: True if the client did not name the path: errors have the folder's name alone.

        Raises:
            AdapterError: it is, or a file in it is, outside the roots (reported without saying whether it exists), of a
                special kind, or too large.
        """
        if "\0" in path or len(path) > MAX_PATH:
            raise no_adapter(f"{field} must be a path of at most {MAX_PATH} characters without NUL", field)
        real = os.path.realpath(path)
        shown = os.path.basename(path) if is_found else path
        if not is_inside(real, self.roots):
            message = f"{field} {shown_source(shown)!r} is outside the folders that --lora-root allows"
            raise no_adapter(message, field)
        if not os.path.isdir(real):
            return CheckedFolder(real, ())  # the engine's error says it best
        try:
            return CheckedFolder(real, tuple(self._walk(AdapterFolder(real, self.roots or ANYWHERE))))
        except AdapterError as error:
            raise no_adapter(f"{field}: {error.message}", field) from error
        except OSError as error:
            raise no_adapter(f"{field} {shown_source(shown)!r} cannot be read: {error.strerror}", field) from error

    def check_again(self, folder: CheckedFolder, field: str = "lora_path") -> None:
        """Raise AdapterError when something in a checked folder has been exchanged since."""
        if self.check(folder.path, field) != folder:
            raise no_adapter(f"{field}: the folder changed while the adapter was loaded; try again", field)

    def _walk(self, folder: AdapterFolder) -> Iterator[FileState]:
        """States of all files that this server opens: the adapter's own, and those for drafters."""
        yield _state(folder.path, os.stat(folder.path))
        total = 0
        for one, names in _parts(folder):
            if one.prefix:
                yield _state(one.path, os.stat(one.path))
            for name in names:
                found = one.inspect(name)
                if found is None:
                    continue
                total += found[1].st_size
                if total > self.max_bytes:
                    raise one.error(
                        name,
                        f"is too large: all files have more than {self.max_bytes} bytes, the limit of --max-lora-bytes",
                    )
                yield _state(*found)


def _parts(folder: AdapterFolder) -> Iterator[tuple[AdapterFolder, Sequence[str]]]:
    """Folders of an adapter that are read, and the names of the files."""
    yield folder, (*ADAPTER_FILES, *INDEX_FILES, *TEXT_FILES)
    draft = folder.below(DRAFT_FOLDER)
    for part in () if draft is None else (draft, *map(draft.below, MODEL_METHODS)):
        if part is not None:
            yield part, (*ADAPTER_FILES, *INDEX_FILES)


def _state(path: str, status: os.stat_result) -> FileState:
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size  # a folder's says nothing more
    return FileState(path, status.st_dev, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns)


class AdapterDirectory:
    """A folder whose subfolders are adapters by their names: a resolver for names that are not loaded.

    New ones are found when they are requested. A folder without adapter_config.json is none yet: copy that file last.
    """

    def __init__(self, path: str, roots: Sequence[str], max_bytes: int) -> None:
        """Links may lead out of the folder only into one of `roots`."""
        self.path = os.path.abspath(path)
        self.roots = real_roots([path, *roots])
        """Real paths of the folders out of which no file of an adapter may lie."""
        self._rules = FolderRules(self.roots, max_bytes)

    def resolve(self, name: str, source: str | None) -> str | None:
        """See `AdapterResolver`."""
        if source is not None or not valid_folder_name(name):
            return None
        folder = os.path.join(self.path, name)
        if not os.path.isfile(os.path.join(folder, CONFIG_FILE)):
            return None
        try:
            return self._rules.check(folder, is_found=True).path
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
