"""Sources of adapters, as users write them, to local folders; neither the engine nor the event loop waits."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .....models.checkpoint.generation_config import FILE, sampling_defaults
from ....core.errors import AdapterError, InvalidRequestError, OutriderError
from ....core.lora_request import LoRA, LoRAMix, LoRAPart, LoRARequest
from .cache import DEFAULT_MAX_CACHE_BYTES, DownloadCache
from .folders import AdapterDirectory, FolderRules
from .hub import HubResolver
from .plugins import installed_plugins, load_plugin
from .remote import StoreResolver
from .resolver import (
    DEFAULT_MAX_ADAPTER_BYTES,
    LOCAL_SCHEMES,
    AdapterResolver,
    local_path,
    no_adapter,
    scheme_of,
    shown_source,
    unavailable,
)
from .shared_calls import SharedCalls, TimedMemory
from .workers import Workers

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURE_SECONDS = 5.0
"""Seconds for which a source that failed is not asked again; requests get the same error meanwhile."""
LOOK_SECONDS = 1.0
"""Seconds for which the listing of --lora-dir is kept."""
_MAX_NAMES = 4096
"""Names that are remembered for a moment, with the folder or the fact that there is none."""
_MAX_DOWNLOADS = 4
_MAX_WAITING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Where adapters may come from beside the folders that users name."""

    directories: tuple[str, ...] = ()
    """Folders whose subfolders are adapters, found by name."""
    roots: tuple[str, ...] = ()
    """Folders into which links may lead out of `directories`."""
    resolvers: tuple[str, ...] = ()
    """Plug-ins, as "package.module:factory"; installed ones (`plugins.ENTRY_POINTS`) are found by themselves."""
    cache_dir: str | None = None
    """Where adapters of object stores are downloaded to; None: see `cache.default_cache_dir`."""
    max_cache_bytes: int = DEFAULT_MAX_CACHE_BYTES
    max_adapter_bytes: int = DEFAULT_MAX_ADAPTER_BYTES


class AdapterSources:
    """Knows all resolvers. One object a client of the engine; any thread may call.

    Downloads run in a few threads of their own; callers that ask for the same source at the same time share one. The
    folder that an adapter was read from stays on the disk until `restrict` says that its name needs it no longer.
    """

    def __init__(self, options: SourceOptions | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Plug-ins that `options` name are imported here.

        Raises:
            InvalidRequestError: one cannot be; `param` is "lora_resolver".
        """
        self._options = options = options if options is not None else SourceOptions()
        self._directories = [
            AdapterDirectory(path, options.roots, options.max_adapter_bytes) for path in options.directories
        ]
        self._named_plugins = [load_plugin(path) for path in options.resolvers]
        self._plugins: list[AdapterResolver] | None = None  # with the installed ones, once they are needed
        self._cache = DownloadCache(options.cache_dir, options.max_cache_bytes)
        self._stores = (HubResolver(options.max_adapter_bytes), StoreResolver(self._cache, options.max_adapter_bytes))
        self._rules = FolderRules(("/",), options.max_adapter_bytes)  # what a resolver brings may lie anywhere
        disk = Workers("adapter-folders", 2, _MAX_WAITING)
        self._fetches: SharedCalls[str | None] = SharedCalls(
            Workers("adapter-fetch", _MAX_DOWNLOADS, _MAX_WAITING), FAILURE_SECONDS, clock
        )
        self._looks: SharedCalls[str | None] = SharedCalls(disk, 0.0, clock)
        self._lists: SharedCalls[dict[str, str]] = SharedCalls(disk, 0.0, clock)
        self._reads: SharedCalls[dict[str, Any]] = SharedCalls(disk, 0.0, clock)
        self._lock = threading.RLock()
        self._waiting: dict[str, set[str]] = {}  # source -> names that want it
        self._folders: dict[str, dict[str, str]] = {}  # name -> folder -> source; the last one of a source counts
        self._found: TimedMemory[str, str | None] = TimedMemory(_MAX_NAMES, clock)
        self._plugged: TimedMemory[str, str | None] = TimedMemory(_MAX_NAMES, clock)
        self._listed: TimedMemory[str, dict[str, str]] = TimedMemory(1, clock)
        self._defaults: TimedMemory[str, dict[str, Any]] = TimedMemory(_MAX_NAMES, clock)  # by folder

    # --- from a source to a folder --------------------------------------------------------------------------------

    async def localize(self, lora: LoRA | None, *, again: bool = False) -> LoRA | None:
        """Replace the sources of an adapter by local folders; one that has them already comes back as it is.

        Args:
            again: Ask the source again, also when it has been: it may have another content now.

        Raises:
            AdapterError: the source has no adapter, or one that may not be read.
            AdapterSourceError: it cannot be reached.
        """
        if isinstance(lora, LoRAMix):
            if not any(_is_remote(part.request) for part in lora.parts):
                return lora
            parts = [LoRAPart(await self.localize_request(part.request), part.weight) for part in lora.parts]
            return LoRAMix(tuple(parts))
        return lora if lora is None else await self.localize_request(lora, again=again)

    async def localize_request(self, request: LoRARequest, *, again: bool = False) -> LoRARequest:
        """`localize` for one adapter."""
        if not _is_remote(request):
            return request
        path = await self._folder(request.name, request.path, "lora_path", again)
        draft = request.draft_path and await self._folder(request.name, request.draft_path, "draft_path", again)
        return _moved(request, path, draft)

    def localize_now(self, lora: LoRA | None, *, again: bool = False) -> LoRA | None:
        """`localize` for those who may wait."""
        if isinstance(lora, LoRAMix):
            if not any(_is_remote(part.request) for part in lora.parts):
                return lora
            return LoRAMix(tuple(LoRAPart(self.localize_request_now(p.request), p.weight) for p in lora.parts))
        return lora if lora is None else self.localize_request_now(lora, again=again)

    def localize_request_now(self, request: LoRARequest, *, again: bool = False) -> LoRARequest:
        """`localize_request` for those who may wait."""
        if not _is_remote(request):
            return request
        path = self._folder_now(request.name, request.path, "lora_path", again)
        draft = request.draft_path and self._folder_now(request.name, request.draft_path, "draft_path", again)
        return _moved(request, path, draft)

    async def _folder(self, name: str, source: str, field: str, again: bool) -> str:
        if not _needs_fetch(source):
            return local_path(source)
        while (folder := self._known_folder(name, source, again)) is None:
            try:
                await _result(self._fetch(name, source))
            except OutriderError as error:
                raise type(error)(error.message, param=field) from error
            again = False
        return folder

    def _folder_now(self, name: str, source: str, field: str, again: bool) -> str:
        if not _needs_fetch(source):
            return local_path(source)
        while (folder := self._known_folder(name, source, again)) is None:
            try:
                self._fetch(name, source).result()
            except OutriderError as error:
                raise type(error)(error.message, param=field) from error
            again = False
        return folder

    def _known_folder(self, name: str, source: str, again: bool) -> str | None:
        if again:
            return None
        with self._lock:
            folders = self._folders.get(name, {})
            return next((folder for folder in reversed(folders) if folders[folder] == source), None)

    def _fetch(self, name: str, source: str) -> Future[str | None]:
        """Start or join the download of a source; `name` has its folder when the result is there."""
        with self._lock:
            self._waiting.setdefault(source, set()).add(name)
            try:
                return self._fetches.call(source, lambda: self._fetch_now(name, source))
            except OutriderError:
                self._waiting.pop(source, None)
                raise

    def _fetch_now(self, name: str, source: str) -> str | None:
        """Ask the resolvers, in a worker thread."""
        folder = None
        try:
            folder = self._ask([*self._all_plugins(), *self._stores], name, source)
            if folder is None:
                raise no_adapter(f"nothing here knows where {shown_source(source)!r} is")
            return folder
        finally:
            with self._lock:
                names = self._waiting.pop(source, set())
                if folder is not None:
                    for waiting in names:
                        self._keep(waiting, source, folder)
                    self._cache.release(folder)  # what the resolver held: now the names do

    def _keep(self, name: str, source: str, folder: str) -> None:
        folders = self._folders.setdefault(name, {})
        if folder not in folders:
            self._cache.hold(folder)
        else:
            del folders[folder]  # it goes to the end: the newest of its source
        folders[folder] = source

    def _ask(self, resolvers: Collection[AdapterResolver], name: str, source: str | None) -> str | None:
        """The first answer, checked."""
        what = shown_source(source if source is not None else name)
        for resolver in resolvers:
            try:
                answer = resolver.resolve(name, source)
                if answer is None:
                    continue
                folder = os.path.abspath(answer)
                if not os.path.isdir(folder):
                    raise unavailable(f"{type(resolver).__name__} names the folder {folder!r}, which is not there")
                try:
                    self._rules.check(folder)
                except OutriderError:
                    self._cache.release(folder)
                    raise
                return folder
            except OutriderError:
                raise
            except Exception as error:
                logger.exception("%s failed for %r", type(resolver).__name__, what)
                raise unavailable(f"{what!r} cannot be had: {type(error).__name__}: {error}") from error
        return None

    def _all_plugins(self) -> list[AdapterResolver]:
        with self._lock:
            if self._plugins is None:
                self._plugins = [*self._named_plugins, *installed_plugins()]
            return self._plugins

    # --- from a name to a folder ----------------------------------------------------------------------------------

    @property
    def finds_names(self) -> bool:
        """True when a name may mean an adapter that has not been loaded: there are directories or plug-ins."""
        return bool(self._directories) or bool(self._all_plugins())

    async def find(self, name: str) -> LoRARequest | None:
        """The adapter that a name means without having been loaded: that of a directory, or a plug-in's.

        Raises:
            AdapterError: there is one that may not be read.
            AdapterSourceError: a plug-in failed.
        """
        folder = await self._find_in_directories(name)
        if folder is None:
            folder = await self._ask_plugins(name)
        return LoRARequest(name, path=folder) if folder is not None else None

    async def _find_in_directories(self, name: str) -> str | None:
        known = self._found.get(name)
        if known is not None or not self._directories:
            return known[0] if known is not None else None
        folder = await _result(self._looks.call(name, lambda: self._ask(self._directories, name, None)))
        self._found.put(name, folder, LOOK_SECONDS)
        return folder

    async def _ask_plugins(self, name: str) -> str | None:
        known = self._plugged.get(name)
        if known is not None or not self._all_plugins():
            return known[0] if known is not None else None
        key = ("name", name)
        folder = await _result(self._fetches.call(key, lambda: self._ask(self._all_plugins(), name, None)))
        # What is there holds until `restrict`.
        self._plugged.put(name, folder, FAILURE_SECONDS if folder is None else float("inf"))
        return folder

    async def in_directories(self) -> dict[str, str]:
        """The adapters in the directories: name -> folder."""
        if not self._directories:
            return {}
        known = self._listed.get("")
        if known is not None:
            return known[0]
        found = await _result(self._lists.call("", self._list_directories))
        self._listed.put("", found, LOOK_SECONDS)
        return found

    def _list_directories(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for directory in self._directories:  # the first one that has a name wins, as in `find`
            found = directory.adapters() | found
        return found

    # --- sampling parameters --------------------------------------------------------------------------------------

    async def sampling_defaults(self, folder: str) -> dict[str, Any]:
        """The fields of `SamplingParams` that the generation_config.json of an adapter's folder sets; looked at most
        once in `LOOK_SECONDS`.

        Raises:
            AdapterError: it has a wrong value.
        """
        known = self._defaults.get(folder)
        if known is None:
            known = (await _result(self._read_defaults(folder)),)
            self._defaults.put(folder, known[0], LOOK_SECONDS)
        return known[0]

    def sampling_defaults_now(self, folder: str) -> dict[str, Any]:
        """`sampling_defaults` without asyncio: the call waits for the file."""
        known = self._defaults.get(folder)
        if known is None:
            known = (self._read_defaults(folder).result(),)
            self._defaults.put(folder, known[0], LOOK_SECONDS)
        return known[0]

    def _read_defaults(self, folder: str) -> Future[dict[str, Any]]:
        def read() -> dict[str, Any]:
            try:
                return sampling_defaults(Path(folder) / FILE)
            except (InvalidRequestError, OSError) as error:
                message = error.message if isinstance(error, OutriderError) else str(error)
                raise AdapterError(message, param="lora_path") from error

        return self._reads.call(folder, read)

    # --- what is still needed -------------------------------------------------------------------------------------

    def folders_of(self, name: str) -> tuple[str, ...]:
        """The folders that were fetched for a name and are kept."""
        with self._lock:
            return tuple(self._folders.get(name, ()))

    def restrict(self, name: str, needed: Collection[str | None] = ()) -> None:
        """Keep only the `needed` ones of the folders that were fetched for a name; the others may be evicted."""
        self._found.drop(name)
        self._plugged.drop(name)
        for path in needed:
            if path is not None:
                self._defaults.drop(path)
        with self._lock:
            folders = self._folders.get(name, {})
            for folder in [folder for folder in folders if folder not in needed]:
                del folders[folder]
                self._cache.release(folder)
            if not folders:
                self._folders.pop(name, None)


def _needs_fetch(source: str) -> bool:
    scheme = scheme_of(source)
    return scheme is not None and scheme not in LOCAL_SCHEMES


def _is_remote(request: LoRARequest) -> bool:
    """True when a source in it is no plain path. Quick for absolute paths."""
    paths = (request.path, request.draft_path)
    return any(path is not None and not path.startswith("/") and scheme_of(path) is not None for path in paths)


def _moved(request: LoRARequest, path: str, draft_path: str | None) -> LoRARequest:
    return LoRARequest(request.lora_name, request.lora_int_id, path, draft_path=draft_path, digest=request.digest)


async def _result(future: Future[T]) -> T:
    """Await a result; a caller that stops waiting ends nothing for the others."""
    return await asyncio.shield(asyncio.wrap_future(future))
