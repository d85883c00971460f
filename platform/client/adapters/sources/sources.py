"""Sources of adapters, as users write them, to local folders; neither the engine nor the event loop waits."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from .....models.checkpoint.generation_config import adapter_defaults
from ....core.adapter_files import ANYWHERE, AdapterFolder, files_digest, real_roots
from ....core.errors import OutriderError
from ....core.lora_request import LoRA, LoRAMix, LoRAPart, LoRARequest, TensorLoRARequest
from ...waiting import Steps, Task, dual, wait_for
from .cache import DEFAULT_MAX_CACHE_BYTES, DownloadCache
from .folders import AdapterDirectory, FolderRules
from .hub import HubResolver
from .memory import DEFAULT_MAX_UPLOAD_BYTES, AdapterMemory
from .plugins import installed_plugins, load_plugin
from .remote import StoreResolver
from .resolver import (
    DEFAULT_MAX_ADAPTER_BYTES,
    HUB_SCHEME,
    LOCAL_SCHEMES,
    AdapterResolver,
    local_path,
    no_adapter,
    shown_source,
    source_scheme,
    unavailable,
)
from .shared_calls import SharedCalls

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=LoRA | None)
T = TypeVar("T")

FAILURE_SECONDS = 5.0
"""Seconds for which a source that failed is not asked again; requests get the same error meanwhile."""
LOOK_SECONDS = 1.0
"""Seconds for which the listing of --lora-dir is kept."""
_MAX_DOWNLOADS = 4
_MAX_WAITING = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Sources of adapters in addition to the folders that users name."""

    directories: tuple[str, ...] = ()
    """Folders whose subfolders are adapters, found by name."""
    roots: tuple[str, ...] = ()
    """Folders into which links may lead out of `directories`."""
    resolvers: tuple[str, ...] = ()
    """Plug-ins, as "package.module:factory"; installed ones (`plugins.ENTRY_POINTS`) are found by themselves."""
    cache_dir: str | None = None
    """Folder for adapters that are downloaded from object stores; None: see `cache.default_cache_dir`."""
    max_cache_bytes: int = DEFAULT_MAX_CACHE_BYTES
    max_adapter_bytes: int = DEFAULT_MAX_ADAPTER_BYTES
    max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES
    """Bytes of all adapters in memory; see `AdapterMemory`."""


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
        self.memory = AdapterMemory(options.max_upload_bytes, options.max_adapter_bytes)
        """Adapters that have no folder."""
        self._rules = FolderRules(("/",), options.max_adapter_bytes)  # what a resolver brings may lie anywhere
        self._fetches = SharedCalls("adapter-fetch", _MAX_DOWNLOADS, _MAX_WAITING, clock)
        self._looks = SharedCalls("adapter-folders", 2, _MAX_WAITING, clock)
        self._studies = SharedCalls("adapter-tokenizers", 1, _MAX_WAITING, clock)
        self._digests = SharedCalls("adapter-digests", 2, _MAX_WAITING, clock)
        self._copies = SharedCalls("adapter-tensors", 1, _MAX_WAITING, clock)
        self._lock = threading.RLock()
        self._waiting: dict[str, set[str]] = {}  # source -> names that want it
        self._folders: dict[str, dict[str, str]] = {}  # name -> folder -> source; the last one of a source counts

    # --- from a source to a folder --------------------------------------------------------------------------------

    @dual
    def localize(self, lora: L, *, again: bool = False) -> Steps[L]:
        """Replace the sources of an adapter, or of a mix, by local folders; what has them already comes back as it is.

        Args:
            again: Ask the source again, also when it has been: it may have another content now.

        Raises:
            AdapterError: the source has no adapter, or one that may not be read.
            AdapterSourceError: it cannot be reached.
        """
        result: Any = lora
        if isinstance(lora, LoRARequest):
            result = yield from self._localized(lora, again)
        elif isinstance(lora, LoRAMix) and any(not _is_local(part.request) for part in lora.parts):
            parts = []
            for request, weight in lora.parts:
                parts.append(LoRAPart((yield from self._localized(request, again)), weight))
            result = LoRAMix(tuple(parts))
        return cast(L, result)

    def _localized(self, request: LoRARequest, again: bool) -> Steps[LoRARequest]:
        if isinstance(request, TensorLoRARequest):
            return (yield from self._copied(request, again))
        if request.files and again:
            self.memory.hold(request)
        if not _is_remote(request):
            return request
        path = yield from self._folder(request.name, request.path, "lora_path", again)
        draft = request.draft_path
        if draft:
            draft = yield from self._folder(request.name, draft, "draft_path", again)
        roots = [*self._roots_of(request.path, path)]
        if request.draft_path and draft:
            roots += self._roots_of(request.draft_path, draft)
        return replace(request, lora_path=path, draft_path=draft, roots=request.roots or tuple(dict.fromkeys(roots)))

    def _copied(self, request: TensorLoRARequest, again: bool) -> Steps[LoRARequest]:
        known = None if again else self.memory.known(request)
        return known or (yield from wait_for(self._copies.call(request, partial(self.memory.take_tensors, request))))

    def _roots_of(self, source: str, folder: str) -> tuple[str, ...]:
        """Roots of a folder from this source: a download is confined to its own."""
        is_download = source_scheme(source) == HUB_SCHEME or folder.startswith(f"{self._cache.folder}/")
        return real_roots([folder]) if is_download else ANYWHERE

    def _folder(self, name: str, source: str, field: str, again: bool) -> Steps[str]:
        if not _needs_fetch(source):
            return local_path(source)
        while (folder := self._known_folder(name, source, again)) is None:
            try:
                yield from wait_for(self._fetch(name, source))
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
            fetch = self._fetches.call(source, lambda: self._fetch_now(name, source), 0.0, FAILURE_SECONDS)
            if not fetch.done():  # else it has failed a moment ago
                self._waiting.setdefault(source, set()).add(name)
            return fetch

    def _fetch_now(self, name: str, source: str) -> str | None:
        """Ask the resolvers, in a worker thread."""
        folder = None
        try:
            folder = self._ask([*self._all_plugins(), *self._stores], name, source)
            if folder is None:
                raise no_adapter(f"no resolver finds {shown_source(source)!r}")
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
                found = resolver.resolve(name, source)
                if found is None:
                    continue
                folder = os.path.abspath(found)
                if not os.path.isdir(folder):
                    logger.error("%s names the folder %r, which is not there", type(resolver).__name__, folder)
                    raise unavailable(f"{type(resolver).__name__} names a folder for {what!r} that is not there")
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
                reason = (isinstance(error, OSError) and error.strerror) or error  # without paths
                raise unavailable(f"{what!r} cannot be had: {type(error).__name__}: {reason}") from error
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

    @dual
    def find(self, name: str) -> Steps[LoRARequest | None]:
        """The adapter that a name means without having been loaded: that of a directory, or a plug-in's.

        Raises:
            AdapterError: there is one that may not be read.
            AdapterSourceError: a plug-in failed.
        """
        folder, roots = None, ANYWHERE
        if self._directories:
            roots = tuple(dict.fromkeys(root for directory in self._directories for root in directory.roots))
            look = partial(self._ask, self._directories, name, None)
            folder = yield from wait_for(self._looks.call(("name", name), look, LOOK_SECONDS, LOOK_SECONDS))
        plugins = self._all_plugins()
        if folder is None and plugins:
            ask = partial(self._ask, plugins, name, None)
            roots = ANYWHERE
            # What is there holds until `restrict`.
            folder = yield from wait_for(self._fetches.call(("name", name), ask, float("inf"), FAILURE_SECONDS))
        return LoRARequest(name, path=folder, roots=roots) if folder is not None else None

    @dual
    def in_directories(self) -> Steps[dict[str, str]]:
        """The adapters in the directories: name -> folder."""
        if not self._directories:
            return {}
        return (yield from wait_for(self._looks.call("list", self._list_directories, LOOK_SECONDS)))

    def _list_directories(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for directory in self._directories:  # the first one that has a name wins, as in `find`
            found = directory.adapters() | found
        return found

    # --- sampling parameters --------------------------------------------------------------------------------------

    def sampling_defaults(self, folder: AdapterFolder) -> Task[dict[str, Any]]:
        """The fields of `SamplingParams` that the generation_config.json of an adapter's folder sets.

        Raises:
            AdapterError: it has a wrong value.
        """
        return self.look("defaults", folder.path, lambda: adapter_defaults(folder))

    @dual
    def look(self, what: str, folder: str, read: Callable[[], T]) -> Steps[T]:
        """The result of `read`, which is called in a thread at most once in `LOOK_SECONDS` for a folder. It takes
        milliseconds: others wait for the same threads."""
        return (yield from wait_for(self._looks.call((what, folder), read, LOOK_SECONDS, LOOK_SECONDS)))

    @dual
    def study(self, what: str, folder: str, read: Callable[[], T]) -> Steps[T]:
        """The result of `read` as of `look`, in a thread of its own because it may take a second."""
        return (yield from wait_for(self._studies.call((what, folder), read, LOOK_SECONDS, LOOK_SECONDS)))

    @dual
    def digest(self, folder: AdapterFolder) -> Steps[str | None]:
        """`files_digest` of what is in a folder now, with threads of its own: large files take seconds."""
        read = partial(files_digest, folder, most=self._options.max_adapter_bytes)
        return (yield from wait_for(self._digests.call(object(), read)))

    # --- what is still needed -------------------------------------------------------------------------------------

    def folders_of(self, name: str) -> tuple[str, ...]:
        """The folders that were fetched for a name, and paths in memory, that are kept."""
        with self._lock:
            return *self._folders.get(name, ()), *self.memory.paths_of(name)

    def fail_waiting(self, error: OutriderError) -> None:
        """Let all who wait for a source have `error`: the client is shutting down."""
        self._fetches.fail_waiting(error)
        for calls in (self._looks, self._studies, self._digests, self._copies):
            calls.fail_waiting(error)

    def restrict(self, name: str, needed: Collection[str | None] = ()) -> None:
        """Keep only the `needed` ones of the folders that were fetched for a name; the others may be evicted."""
        self._looks.drop(("name", name))
        self._fetches.drop(("name", name))
        self.memory.restrict(name, needed)
        for path in needed:
            self._looks.drop(("defaults", path))
            self._studies.drop(("tokenizer", path))
        with self._lock:
            folders = self._folders.get(name, {})
            for folder in [folder for folder in folders if folder not in needed]:
                del folders[folder]
                self._cache.release(folder)
            if not folders:
                self._folders.pop(name, None)


def _needs_fetch(source: str) -> bool:
    scheme = source_scheme(source)
    return scheme is not None and scheme not in LOCAL_SCHEMES


def _is_local(request: LoRARequest) -> bool:
    """True when an engine can read its files as they are."""
    return not isinstance(request, TensorLoRARequest) and not _is_remote(request)


def _is_remote(request: LoRARequest) -> bool:
    """True when a source in it is no plain path. Quick for absolute paths."""
    paths = (request.path, request.draft_path)
    return any(path is not None and not path.startswith("/") and source_scheme(path) is not None for path in paths)
