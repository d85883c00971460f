"""Files of an adapter's folder. `AdapterFolder` is the only code that opens them.

The folder's content is untrusted: its files may be links to other tenants' secrets, endless pipes or devices, and may
be replaced at any moment. So a file is located first, without opening it (O_PATH), then the descriptor is checked
(kind, size, real path), and only that descriptor is read. No path is looked up twice.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from typing import NamedTuple

from .errors import AdapterError

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")
"""Weights files, the first that exists is read. The last one is mlx-lm's."""
ADAPTER_FILES = (CONFIG_FILE, *WEIGHT_FILES)
"""Files of a folder that are read: the configuration, and the first weights file that exists."""
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
TEXT_FILES = (TOKENIZER_FILE, TOKENIZER_SETTINGS, TEMPLATE_FILE, GENERATION_CONFIG)
"""Files of a folder that the API process reads."""
INDEX_FILES = tuple(f"{name}.index.json" for name in WEIGHT_FILES)
"""Indexes of weights in several files, which are refused by name and never read."""
DRAFT_FOLDER = "draft"
"""Folder of the same files for a drafter, or of such folders by method of speculation."""

IN_MEMORY = "in-memory:"
"""Prefix of the path of an adapter that has no folder: its files are in the memory of the client's process."""
ANYWHERE: tuple[str, ...] = ("/",)
"""Roots of a folder whose files may lie anywhere."""
_NAMES = frozenset((*ADAPTER_FILES, *TEXT_FILES, *INDEX_FILES))
_PIECE = 1 << 18
"""Bytes that are digested or read at once, some 200 microseconds of work."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_inside(path: str, roots: Sequence[str]) -> bool:
    """Return whether a real path is one of the roots, or below one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def real_roots(paths: Sequence[str]) -> tuple[str, ...]:
    """Real paths of roots, each once. The root of a snapshot in the hub's cache is the cache of its repository: files
    of a snapshot are links to the repository's blobs."""
    return tuple(dict.fromkeys(_repository(os.path.realpath(path)) for path in paths))


def _repository(path: str) -> str:
    """Return the folder `models--ORG--NAME` for a path below its `snapshots`, and any other path as it is."""
    parts = path.split("/")
    for index, part in enumerate(parts[:-1]):
        if part.startswith("models--") and parts[index + 1] == "snapshots":
            return "/".join(parts[: index + 1])
    return path


class AdapterFolder(NamedTuple):
    """A folder of an adapter's files. Each method raises AdapterError for a file that may not be read, naming it."""

    path: str
    roots: tuple[str, ...] = ()
    """Real paths of the folders out of which no link may lead. (): the caller may read everything; then errors have
    the whole path."""
    prefix: str = ""
    """Path below the adapter's folder, with a slash at its end, for a folder of draft weights."""
    files: tuple[tuple[str, str], ...] = ()
    """(name, path) of files in memory, which are read instead of all `ADAPTER_FILES`: copies (`copied`), or the only
    files that the adapter has, if `path` begins with `IN_MEMORY`."""

    @property
    def label(self) -> str:
        """Text for messages: the path for a caller who may read everything, else the folder's name alone."""
        return self.path if not self.roots else os.path.basename(self.path) or "/"

    def has(self, name: str) -> bool:
        """Return whether there is a regular file of this name."""
        return self.inspect(name) is not None

    def inspect(self, name: str) -> tuple[str, os.stat_result] | None:
        """Return the real path and the state of a regular file without opening it; None if there is none."""
        with self._located(name) as found:
            return None if found is None else (os.readlink(_proc(found)), _regular(self, name, found))

    def open(self, name: str, most: int | None = None) -> FileIO | None:
        """Open a regular file of at most `most` bytes, unbuffered; None if there is none."""
        with self._located(name) as found:
            if found is None:
                return None
            size = _regular(self, name, found).st_size
            if most is not None and size > most:
                raise self.error(name, f"has {size} bytes; at most {most} are read")
            return FileIO(os.open(_proc(found), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))

    def read(self, name: str, most: int) -> bytes | None:
        """Return the content of a regular file of at most `most` bytes; None if there is none."""
        file = self.open(name, most)
        if file is None:
            return None
        content = bytearray()
        with file, self._typed_errors(name):
            while piece := file.read(_PIECE):
                content += piece
                if len(content) > most:  # it has grown meanwhile
                    raise self.error(name, f"is larger than {most} bytes; at most these are read")
        return bytes(content)

    def _locate(self, name: str) -> str | None:
        """Path of a file or folder; None: there is none."""
        if self.files and (name in ADAPTER_FILES or self.path.startswith(IN_MEMORY)):
            return dict(self.files).get(name)
        return os.path.join(self.path, name)

    def below(self, name: str) -> AdapterFolder | None:
        """Return a folder in this one; None if there is none."""
        with self._located(name) as found:
            if found is None:
                return None
            kind = stat.S_IFMT(os.fstat(found).st_mode)
            if kind != stat.S_IFDIR:
                raise self.error(name, f"is {_KINDS.get(kind, 'a file')}, and no folder")
            return AdapterFolder(os.path.join(self.path, name), self.roots, f"{self.prefix}{name}/")

    def error(self, name: str, problem: str) -> AdapterError:
        """Return an error about a file, which it names by its path below the adapter's folder."""
        return AdapterError(f"{self.prefix}{name} of the adapter {problem}", param="lora_path")

    @contextmanager
    def _located(self, name: str) -> Iterator[int | None]:
        """Locate a file or folder: a descriptor that cannot be read from yet, or None.

        A link out of the roots and a dangling one have the same error, which reveals nothing about files outside.
        """
        assert name in _NAMES or "." not in name, "a new file must be listed above, to be counted and tested"
        path, gone = self._locate(name), "is a link that leads outside the allowed folders, or nowhere"
        if path is None:
            yield None
            return
        if in_memory := self.path.startswith(IN_MEMORY):
            gone = "is no longer in memory"
        leads_out = self.error(name, gone)
        try:
            found = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            if self.roots and (_is_link(path) or (in_memory and isinstance(error, FileNotFoundError))):
                raise leads_out from None
            if isinstance(error, (FileNotFoundError, NotADirectoryError, ValueError)) and not _is_link(path):
                yield None
                return
            raise self.error(name, f"cannot be read: {getattr(error, 'strerror', error)}") from None
        try:
            if self.roots not in ((), ANYWHERE) and not is_inside(os.readlink(_proc(found)), self.roots):
                raise leads_out
            with self._typed_errors(name):
                yield found
        finally:
            os.close(found)

    @contextmanager
    def _typed_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.error(name, f"cannot be read: {error.strerror}") from None


def _regular(folder: AdapterFolder, name: str, found: int) -> os.stat_result:
    """Return the state of a regular file; AdapterError for anything else."""
    status = os.fstat(found)
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise folder.error(name, f"is {_KINDS.get(kind, 'something else')}, and no regular file")
    return status


def _proc(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _is_link(path: str) -> bool:
    try:
        return os.path.islink(path)
    except ValueError:
        return False


def files_digest(
    folder: AdapterFolder | str, yield_lock: Callable[[], None] = lambda: None, most: int | None = None
) -> str | None:
    """SHA-256 of the configuration and the weights in an adapter's folder, in hexadecimal; None when they cannot be
    read, or have more than `most` bytes. Draft weights, which change no text, do not count. `yield_lock` is called
    between pieces.
    """
    folder = AdapterFolder(folder) if isinstance(folder, str) else folder
    return _digest(folder, yield_lock, most, lambda name, piece: None)


@contextmanager
def copied(
    folder: AdapterFolder, digest: str, yield_lock: Callable[[], None], most: int | None = None
) -> Iterator[AdapterFolder | None]:
    """The folder with copies in memory of the files of this `files_digest`, so that they are read once and cannot be
    replaced meanwhile; None if the files have another one. The copies last until the context ends."""
    with ExitStack() as stack:
        copies: dict[str, int] = {}

        def keep(name: str, piece: bytes) -> None:
            if name not in copies:
                copies[name] = os.memfd_create("adapter", os.MFD_CLOEXEC)
                stack.callback(os.close, copies[name])
            while piece:
                piece = piece[os.write(copies[name], piece) :]

        is_same = _digest(folder, yield_lock, most, keep) == digest
        files = tuple((name, _proc(descriptor)) for name, descriptor in copies.items())
        yield folder._replace(files=files, roots=folder.roots and ANYWHERE) if is_same else None


def _digest(
    folder: AdapterFolder, yield_lock: Callable[[], None], most: int | None, keep: Callable[[str, bytes], None]
) -> str | None:
    """`files_digest`; `keep` gets the pieces of each file, after an empty one."""
    digest = hashlib.sha256()
    try:
        config, *weights = (name for name in ADAPTER_FILES if folder.has(name))
        if config != CONFIG_FILE or not weights:
            return None
        for name in (config, weights[0]):
            file = folder.open(name, most)
            if file is None:
                return None
            with file:
                left = os.fstat(file.fileno()).st_size
                digest.update(f"{name}:{left}\n".encode())
                keep(name, b"")
                while piece := file.read(_PIECE):
                    left -= len(piece)
                    if left < 0:  # it grows while it is read
                        return None
                    digest.update(piece)
                    keep(name, piece)
                    yield_lock()
    except (OSError, ValueError):  # an AdapterError is a ValueError
        return None
    return digest.hexdigest()
