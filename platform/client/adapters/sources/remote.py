"""Adapters in object stores, by the URLs of fsspec: s3://, gs:// and whatever else it has a driver for."""

from __future__ import annotations

import hashlib
import posixpath
from pathlib import Path
from typing import Any, NamedTuple

from ....core.adapter_files import ADAPTER_FILES, CONFIG_FILE, DRAFT_FOLDER, WEIGHT_FILES
from ....core.errors import AdapterError
from .cache import DownloadCache
from .resolver import HUB_SCHEME, no_adapter, shown_source, source_scheme, unavailable

_STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "mtime", "created")
"""Fields by which stores distinguish versions of a file's content."""
_CHUNK = 4 << 20
_MAX_FILES = 64
_DRAFT_DEPTH = 2
_ATTEMPTS = 2


class _RemoteFile(NamedTuple):
    """One file of an adapter."""

    name: str
    """Below the adapter's folder, with slashes."""
    path: str
    size: int
    stamp: str


class StoreResolver:
    """Downloads into a `DownloadCache`, whose entries are keyed by URL and content: sizes and ETags, or times."""

    def __init__(self, cache: DownloadCache, max_bytes: int) -> None:
        """`max_bytes` of one adapter."""
        self._cache = cache
        self._max_bytes = max_bytes

    def resolve(self, name: str, source: str | None) -> str | None:
        """See `AdapterResolver`. The folder is held in the cache."""
        scheme = None if source is None else source_scheme(source)
        if source is None or scheme is None or scheme == HUB_SCHEME:
            return None
        if "::" in source:
            raise no_adapter(f"{shown_source(source)!r}: chained URLs are not served")
        try:
            import fsspec
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise no_adapter(f"{scheme}:// needs fsspec: pip install 'outrider[remote]'") from error
        try:
            store, root = url_to_fs(source)
        except ImportError as error:
            raise no_adapter(f"{scheme}:// needs a driver that is not installed: {error}") from error
        except ValueError as error:
            known = scheme in fsspec.available_protocols()
            reason = str(error) if known else "no driver knows this protocol"
            raise no_adapter(f"{shown_source(source)!r}: {reason}") from error
        try:
            return self._fetch(source, store, str(root).rstrip("/"))
        except FileNotFoundError as error:
            raise unavailable(f"{shown_source(source)!r} changed while it was read; try again") from error
        except PermissionError as error:
            raise no_adapter(f"{shown_source(source)!r}: the store refuses access: {error}") from error

    def _fetch(self, source: str, store: Any, root: str) -> str:
        for _ in range(_ATTEMPTS):
            files = self._files(source, store, root)

            def fill(folder: Path, files: list[_RemoteFile] = files) -> None:
                for file in files:
                    self._download(store, file, folder / file.name)
                if self._files(source, store, root) != files:
                    raise _ChangedError

            try:
                return self._cache.fetch(_key(source, files), sum(file.size for file in files), fill)
            except _ChangedError:
                continue
        raise unavailable(f"{shown_source(source)!r} changes while it is read; try again")

    def _files(self, source: str, store: Any, root: str) -> list[_RemoteFile]:
        """The files of an adapter.

        Raises:
            AdapterError: it is none, or too large.
        """
        store.invalidate_cache()
        found: dict[str, dict[str, Any]] = {}
        for name in ADAPTER_FILES:
            try:
                found[name] = store.info(posixpath.join(root, name))
            except FileNotFoundError:
                continue
        if CONFIG_FILE not in found:
            raise no_adapter(f"there is no {CONFIG_FILE} in {shown_source(source)!r}")
        if not any(name in found for name in WEIGHT_FILES):
            raise no_adapter(f"there is no {' or '.join(WEIGHT_FILES)} in {shown_source(source)!r}")
        draft = posixpath.join(root, DRAFT_FOLDER)
        for path, info in store.find(draft, maxdepth=_DRAFT_DEPTH, detail=True).items():
            name = posixpath.relpath(path, root)
            if name.startswith(f"{DRAFT_FOLDER}/") and posixpath.basename(name) in ADAPTER_FILES:
                found[name] = info
        files = [_remote_file(store, name, info) for name, info in sorted(found.items()) if info["type"] == "file"]
        size = sum(file.size for file in files)
        if len(files) > _MAX_FILES:
            raise no_adapter(f"{shown_source(source)!r} has {len(files)} files; at most {_MAX_FILES} are taken")
        if size > self._max_bytes:
            raise no_adapter(f"{shown_source(source)!r} has {size} bytes; at most {self._max_bytes} are taken")
        return files

    def _download(self, store: Any, file: _RemoteFile, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        written = 0
        with store.open(file.path, "rb") as remote, open(target, "xb") as local:
            while chunk := remote.read(_CHUNK):
                written += len(chunk)
                if written > file.size:  # nothing that the store said holds: stop before the disk is full
                    raise _ChangedError
                local.write(chunk)
        if written != file.size:
            raise _ChangedError


class _ChangedError(AdapterError):
    """Files changed between listing and reading."""

    def __init__(self) -> None:
        super().__init__("the files changed while they were read", param="lora_path")


def _remote_file(store: Any, name: str, info: dict[str, Any]) -> _RemoteFile:
    stamp = next((str(info[key]) for key in _STAMPS if info.get(key) is not None), None)
    path = str(info["name"])
    return _RemoteFile(name, path, int(info.get("size") or 0), stamp if stamp is not None else str(store.ukey(path)))


def _key(source: str, files: list[_RemoteFile]) -> str:
    """A file name for one content at one URL."""
    content = hashlib.sha256(repr([(file.name, file.size, file.stamp) for file in files]).encode())
    return f"{hashlib.sha256(source.encode()).hexdigest()[:16]}-{content.hexdigest()[:32]}"
