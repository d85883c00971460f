"""The folder into which adapters of object stores are downloaded: bounded, shared by processes, used across restarts.

    <cache>/<key>/            one adapter, whole: moved here when it was complete
    <cache>/.tmp-*/           one being downloaded, or being deleted
    <cache>/.locks            never written; byte ranges of it are locked

An entry is *held* while an adapter that was loaded from it is registered: the engine reads the files again whenever the
adapter falls out of memory. A held entry is never evicted, by whatever process: each holds a shared lock on the byte
that stands for the entry (an open-file-description lock: one file descriptor serves any number of entries, and the
kernel drops the locks when the process ends).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from .resolver import no_adapter, unavailable

DEFAULT_MAX_CACHE_BYTES = 32 << 30
_TEMPORARY = ".tmp-"
_ABANDONED_SECONDS = 24 * 3600.0
_FLOCK = "hhqqi4x"
"""struct flock of Linux on 64 bits: type, whence, start, length, pid."""


def default_cache_dir() -> str:
    """Below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "outrider", "adapters")


class DownloadCache:
    """See the module's docstring. Any thread may call."""

    def __init__(self, folder: str | None = None, max_bytes: int = DEFAULT_MAX_CACHE_BYTES) -> None:
        """Create nothing before the first use. `folder`: see `default_cache_dir`."""
        self.folder = Path(folder or default_cache_dir()).absolute()
        self.max_bytes = max_bytes
        self._mutex = threading.RLock()
        self._held: Counter[str] = Counter()  # by key
        self._reserved = 0  # bytes of downloads in flight
        self._locks = -1

    def fetch(self, key: str, size: int, fill: Callable[[Path], None]) -> str:
        """The folder of an entry, held once more for the caller.

        Args:
            key: Of the content; a file name.
            size: Bytes that it will take, when it is not there yet.
            fill: Puts the files into an empty folder.

        Raises:
            AdapterError: it is larger than the whole cache.
            AdapterSourceError: there is no room, or the disk fails.
            OutriderError: what `fill` raises; nothing is left of it then.
        """
        entry = self.folder / key
        try:
            self._open()
            self._hold(key)
            try:
                if not entry.is_dir():
                    self._download(entry, size, fill)
                os.utime(entry)  # the least recently used one is evicted first
            except BaseException:
                self.release(str(entry))
                raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise unavailable(f"the cache of adapters in {self.folder} cannot be used: {reason}") from error
        return str(entry)

    def release(self, folder: str) -> None:
        """Give back what `fetch` held. A folder that is no entry is ignored."""
        key = os.path.basename(folder)
        with self._mutex:
            if os.path.dirname(folder) != str(self.folder) or not self._held[key]:
                return
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._lock(key, fcntl.F_UNLCK)

    def hold(self, folder: str) -> None:
        """Hold an entry that is held already once more. A folder that is no entry is ignored."""
        key = os.path.basename(folder)
        with self._mutex:
            if os.path.dirname(folder) == str(self.folder) and self._held[key]:
                self._held[key] += 1

    def num_held(self) -> int:
        """Entries that this process holds."""
        with self._mutex:
            return len(+self._held)

    def _open(self) -> None:
        with self._mutex:
            if self._locks < 0:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._locks = os.open(self.folder / ".locks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._remove_abandoned()

    def _hold(self, key: str) -> None:
        with self._mutex:
            self._held[key] += 1
            if self._held[key] == 1:
                self._lock(key, fcntl.F_RDLCK)  # may wait for another process that is evicting it: milliseconds

    def _lock(self, key: str, kind: int, *, wait: bool = True) -> None:
        byte = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        request = struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(self._locks, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)

    def _download(self, entry: Path, size: int, fill: Callable[[Path], None]) -> None:
        self._make_room(size)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder))
        try:
            fill(temporary)
            try:
                os.rename(temporary, entry)
            except OSError:
                if not entry.is_dir():  # else another process was faster; both have the same content
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            with self._mutex:
                self._reserved -= size

    def _make_room(self, size: int) -> None:
        """Reserve `size` bytes, evicting entries that are not in use, least recently used first."""
        if size > self.max_bytes:
            raise no_adapter(f"the adapter has {size} bytes; the cache of adapters holds {self.max_bytes}")
        with self._mutex:
            sizes = {path: _folder_bytes(path) for path in self._entries()}
            excess = sum(sizes.values()) + self._reserved + size - self.max_bytes
            for path in sorted(sizes, key=_last_used):
                if excess <= 0:
                    break
                if self._evict(path):
                    excess -= sizes[path]
            if excess > 0:
                raise unavailable(
                    f"the cache of adapters is full: all of its {self.max_bytes} bytes are held by adapters in use"
                )
            self._reserved += size

    def _entries(self) -> list[Path]:
        with os.scandir(self.folder) as entries:
            return [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]

    def _evict(self, entry: Path) -> bool:
        """Delete an entry unless it is in use."""
        if self._held[entry.name]:
            return False
        try:
            self._lock(entry.name, fcntl.F_WRLCK, wait=False)
        except OSError:  # another process holds it
            return False
        doomed = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder))
        try:
            os.rename(entry, doomed)
        except OSError:
            return False
        finally:
            self._lock(entry.name, fcntl.F_UNLCK)
            shutil.rmtree(doomed, ignore_errors=True)
        return True

    def _remove_abandoned(self) -> None:
        """Delete the downloads that a process left when it died."""
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            if time.time() - _last_used(path) > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _last_used(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, file)).st_size
    return total
