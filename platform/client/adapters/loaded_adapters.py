"""`AsyncLLM.adapters`: which adapters are loaded, and how they are loaded again in another engine."""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ...core.errors import EngineDeadError, InvalidRequestError, NotFoundError, OutriderError
from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo
from ...core.sampling_params import quote_for_error
from ...core.tasks import run_all
from .lora_int_ids import LoRAIntIds
from .sources import AdapterSources

logger = logging.getLogger(__name__)

NO_FILES = "changed"
"""The digest of no files: what is registered with it is refused when it is read."""

Call = Callable[..., Awaitable[Any]]
"""Calls a verb of an engine, such as "adapters.load", with its arguments."""
RunAll = Callable[[Iterable[Coroutine[Any, Any, None]]], Awaitable[Any]]
"""Runs coroutines, which begin in their order."""


class _LoadedAdapter(NamedTuple):
    """Record of an adapter, by which it is loaded again."""

    request: LoRARequest
    """It has local folders."""
    is_read: bool
    """True when its files are read then; False when only its name is registered."""
    pinned: bool = False
    digest: str | None = None
    """The digest of what was loaded."""


class _Requests(Mapping[str, LoRARequest]):
    """View of the requests of records, by name."""

    def __init__(self, records: Mapping[str, _LoadedAdapter]) -> None:
        self._records = records

    def __getitem__(self, name: str) -> LoRARequest:
        return self._records[name].request

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


class LoadedAdapters:
    """The verbs of `core.adapter_verbs`, to be awaited in one event loop."""

    def __init__(
        self,
        start: Callable[[], Awaitable[Any]],
        call: Call,
        localize: Callable[..., Awaitable[LoRARequest]],
        sources: AdapterSources,
    ) -> None:
        """`start` waits until the engine has started once, or raises ShuttingDownError. `localize` is that of
        `sources`."""
        self._start, self._call, self._localize = start, call, localize
        self._sources = sources
        self.int_ids = LoRAIntIds()
        """Integers that stand for adapters."""
        self._loaded: dict[str, _LoadedAdapter] = {}
        self.requests: Mapping[str, LoRARequest] = _Requests(self._loaded)
        """The adapters that have been loaded or registered, by name, with local folders. One that could not be loaded
        again is no longer here."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- the verbs ------------------------------------------------------------------------------------------------

    async def load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, running: str = "finish"
    ) -> AdapterInfo:
        """Fetch and load an adapter. Loads under one name come one after another."""
        _check(request)
        await self._start()
        async with self._locks.setdefault(request.name, asyncio.Lock()):
            before = self._sources.folders_of(request.name)
            try:
                local = await self._localize(request, again=True)
                arguments = {"request": local, "load_inplace": load_inplace, "pinned": pinned, "running": running}
                info: AdapterInfo = await self._call("adapters.load", **arguments)
            except BaseException:
                self._release(request.name, before)
                raise
            self._record(_LoadedAdapter(local, True, pinned, info.digest))
            return info

    async def register(self, requests: Sequence[LoRARequest]) -> None:
        """Fetch adapters and make them known by name."""
        for request in requests:
            _check(request)
        await self._start()
        before = {request.name: self._sources.folders_of(request.name) for request in requests}
        try:
            local = [await self._localize(request) for request in requests]
            await self._call("adapters.register", requests=local)
        except BaseException:
            for name, folders in before.items():
                self._release(name, folders)
            raise
        for request in local:
            self._record(_LoadedAdapter(request, False))

    async def unload(self, name: str, mode: str = "drain") -> None:
        """Forget an adapter."""
        # Before the call: a request that the engine gets after it would bring the adapter back.
        loaded = self._loaded.pop(name, None)
        try:
            await self._call("adapters.unload", name=name, mode=mode)
        except NotFoundError:
            raise
        except BaseException:
            if loaded is not None:
                self._loaded.setdefault(name, loaded)
            raise
        finally:
            self._release(name)

    async def pin(self, name: str) -> AdapterInfo:
        """Keep an adapter on the device."""
        return await self._set_pinned(name, "pin")

    async def unpin(self, name: str) -> AdapterInfo:
        """Let an adapter be evicted again."""
        return await self._set_pinned(name, "unpin")

    async def _set_pinned(self, name: str, verb: str) -> AdapterInfo:
        info: AdapterInfo = await self._call(f"adapters.{verb}", name=name)
        if name in self._loaded:
            self._loaded[name] = self._loaded[name]._replace(is_read=True, pinned=verb == "pin")
        return info

    async def list(self) -> builtins.list[AdapterInfo]:
        """The registered adapters."""
        infos: builtins.list[AdapterInfo] = await self._call("adapters.list")
        return infos

    # --- vLLM's verbs, with integers ------------------------------------------------------------------------------

    async def add(self, request: LoRARequest) -> bool:
        """Load an adapter unless it is registered under its name from the same folder or hub repository."""
        _check(request)
        same = self.int_ids.is_known(request)
        registered = (info for info in await self.list() if info.name == request.name)
        if not any(same or info.path == request.path for info in registered):
            await self.load(request)
        self.int_ids.record(request)
        return True

    async def remove(self, lora_id: int | str) -> bool:
        """Unload the adapter of an integer or a name; False when there is none."""
        try:
            await self.unload(self.int_ids.name_of(lora_id))
        except NotFoundError:
            return False
        return True

    async def ids(self) -> set[int]:
        """Integers of the registered adapters that were given with one."""
        return self.int_ids.of(info.name for info in await self.list())

    # --- in another engine ----------------------------------------------------------------------------------------

    def adopt(self, infos: Iterable[AdapterInfo]) -> None:
        """Record what an engine has that is about to end, in its order: adapters of requests, and those that have been
        read since they were registered."""
        for info in infos:
            known = self._loaded.pop(info.name, None)
            if known is None or known.request.path != info.path:
                request = self._sources.memory.find(info.name, info.path)
                known = _LoadedAdapter(request or LoRARequest(info.name, path=info.path), False)
            digest = info.digest or known.digest
            self._loaded[info.name] = known._replace(
                is_read=known.is_read or bool(digest), pinned=info.pinned, digest=digest
            )

    async def reload_after_restart(self, call: Call, run: RunAll = run_all) -> None:
        """Load in an engine that has just started what the last one had. The engine gets the loads in the same order
        without waiting between them, and reads several files at once.

        An adapter that cannot be loaded any more is forgotten. One whose files have another content by now keeps its
        name, and its requests get the error for that.
        """
        for is_read, entries in groupby([*self._loaded.values()], key=lambda loaded: loaded.is_read):
            group = [*entries]
            if not is_read and await _register_all(call, [loaded.request for loaded in group]):
                continue
            await run(self._reload_or_forget(call, loaded) for loaded in group)

    async def _reload_or_forget(self, call: Call, loaded: _LoadedAdapter) -> None:
        try:
            await _reload(call, loaded)
        except EngineDeadError:
            raise
        except OutriderError as error:
            name = loaded.request.name
            logger.error("Adapter %r cannot be loaded again: %r", name, error.message)
            self._loaded.pop(name, None)
            self._release(name)

    # --- the record -----------------------------------------------------------------------------------------------

    def _record(self, loaded: _LoadedAdapter) -> None:
        """Record an adapter as it was loaded. Its request, as it is returned here, means it by name: requests that
        were accepted before a load in place run on the new version."""
        self._loaded[loaded.request.name] = loaded._replace(request=replace(loaded.request, loaded=True))
        self._release(loaded.request.name)

    def _release(self, name: str, needed: tuple[str, ...] = ()) -> None:
        """Keep only those fetched folders that are `needed`, or that the adapter was read from."""
        lora = self.requests.get(name)
        self._sources.restrict(name, needed if lora is None else (*needed, lora.path, lora.draft_path))


def _check(lora: object) -> None:
    if not isinstance(lora, LoRARequest):
        raise InvalidRequestError(
            f"lora_request must be a LoRARequest, got {quote_for_error(lora)}", param="lora_request"
        )


async def _register_all(call: Call, requests: list[LoRARequest]) -> bool:
    """Register thousands by one call; False when one of them is gone, and each has to be tried by itself."""
    try:
        await call("adapters.register", requests=requests)
    except EngineDeadError:
        raise
    except OutriderError:
        return False
    return True


async def _reload(call: Call, loaded: _LoadedAdapter) -> None:
    request = loaded.request
    if not loaded.is_read:
        await call("adapters.register", requests=[request])
        return
    info: AdapterInfo = await call("adapters.load", request=request, pinned=loaded.pinned)
    if loaded.digest is not None and info.digest != loaded.digest:
        logger.error("The files of adapter %r have changed; load it again with load_inplace", request.name)
        await call("adapters.unload", name=request.name)
        await call("adapters.register", requests=[replace(request, digest=NO_FILES)])
