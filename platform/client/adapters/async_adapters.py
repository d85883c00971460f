"""`AsyncLLM.adapters`: where the adapters of an engine process come from, and what is loaded again after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from ...core.errors import EngineDeadError, NotFoundError, OutriderError
from ...core.lora_request import LoRARequest
from ...core.messages import AdapterInfo
from ..process.supervisor import EngineProcess
from .llm_adapters import NO_FILES
from .lora_int_ids import LoRAIntIds
from .sources import AdapterSources

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    """Record of an adapter, by which it is loaded again in an engine that has just started."""

    is_read: bool
    """True when its files are read then; False when it is registered by its name."""
    pinned: bool = False
    digest: str | None = None
    """The digest of what was loaded."""


class AsyncLLMAdapters:
    """The verbs of `core.adapter_verbs`, to be awaited in one event loop."""

    def __init__(
        self, start: Callable[[], Awaitable[Any]], engine: Callable[[], EngineProcess], sources: AdapterSources
    ) -> None:
        """`start` waits until the engine has started once; `engine` returns the running one, or raises
        EngineDeadError."""
        self._start = start
        self._engine = engine
        self._sources = sources
        self.int_ids = LoRAIntIds()
        """Integers that stand for adapters."""
        self._kept: dict[str, _Kept] = {}
        self.requests: dict[str, LoRARequest] = {}
        """The adapters that have been loaded or registered, by name, with local folders. To look at only. One that
        could not be loaded again after a restart is no longer here."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Fetch and load an adapter. Loads under one name come one after another."""
        await self._start()
        async with self._locks.setdefault(request.name, asyncio.Lock()):
            try:
                local = await self._sources.localize(request, again=True)
                info: AdapterInfo = await self._call("load", request=local, load_inplace=load_inplace, pinned=pinned)
                self._kept[request.name] = _Kept(True, pinned, info.digest)
                self.requests[request.name] = local
            finally:
                self._release(request.name)
            return info

    async def register(self, requests: Sequence[LoRARequest]) -> None:
        """Fetch adapters and make them known by name."""
        await self._start()
        try:
            local = [await self._sources.localize(request) for request in requests]
            await self._call("register", requests=local)
            for request in local:
                self._kept[request.name] = _Kept(False)
                self.requests[request.name] = request
        finally:
            for request in requests:
                self._release(request.name)

    async def unload(self, name: str, mode: str = "drain") -> None:
        """Forget an adapter."""
        try:
            await self._call("unload", name=name, mode=mode)
        except NotFoundError:
            self._forget(name)
            raise
        self._forget(name)

    async def pin(self, name: str) -> AdapterInfo:
        """Keep an adapter on the device."""
        return await self._set_pinned(name, "pin")

    async def unpin(self, name: str) -> AdapterInfo:
        """Let an adapter make way again."""
        return await self._set_pinned(name, "unpin")

    async def _set_pinned(self, name: str, verb: str) -> AdapterInfo:
        info: AdapterInfo = await self._call(verb, name=name)
        if name in self._kept:  # after a restart too
            self._kept[name] = self._kept[name]._replace(is_read=True, pinned=verb == "pin")
        return info

    async def list(self) -> Any:
        """The registered adapters."""
        return await self._call("list")

    async def _call(self, verb: str, **arguments: Any) -> Any:
        await self._start()
        return await self._engine().call(f"adapters.{verb}", **arguments)

    # --- restarts -------------------------------------------------------------------------------------------------

    async def load_again(self, engine: EngineProcess) -> None:
        """Load in an engine that has just started what the last one had.

        An adapter that cannot be loaded any more is forgotten. One whose files have another content by now keeps its
        name, and its requests get the error for that.
        """
        again = dict(self._kept)
        named = [name for name, kept in again.items() if not kept.is_read]
        try:  # thousands by one call; when one of them is gone, each by itself
            if named:
                await engine.call("adapters.register", requests=[self.requests[name] for name in named])
            again = {name: kept for name, kept in again.items() if kept.is_read}
        except EngineDeadError:
            raise
        except OutriderError:
            pass
        for name, kept in again.items():
            try:
                await self._load_again(engine, self.requests[name], kept)
            except EngineDeadError:
                raise
            except OutriderError as error:
                logger.error("Adapter %r cannot be loaded again: %r", name, error.message)
                self._forget(name)

    @staticmethod
    async def _load_again(engine: EngineProcess, request: LoRARequest, kept: _Kept) -> None:
        if not kept.is_read:
            await engine.call("adapters.register", requests=[request])
            return
        info: AdapterInfo = await engine.call("adapters.load", request=request, pinned=kept.pinned)
        if kept.digest is not None and info.digest != kept.digest:
            logger.error("The files of adapter %r have changed; load it again with load_inplace", request.name)
            await engine.call("adapters.unload", name=request.name)
            await engine.call("adapters.register", requests=[replace(request, digest=NO_FILES)])

    def _forget(self, name: str) -> None:
        self._kept.pop(name, None)
        self.requests.pop(name, None)
        self._release(name)

    def _release(self, name: str) -> None:
        """Keep only those fetched folders that the registered adapter was read from."""
        lora = self.requests.get(name)
        self._sources.restrict(name, () if lora is None else (lora.path, lora.draft_path))
