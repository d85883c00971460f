"""The adapters of one client of an engine process: where they come from, and what to load again after a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from ...core.errors import EngineDeadError, NotFoundError, OutriderError
from ...core.lora_request import LoRA, LoRARequest
from ...core.messages import AdapterInfo
from ..process.ipc import Call
from ..process.supervisor import EngineProcess
from .sources import AdapterSources

_NO_FILES = "changed"
"""The digest of no files: what is registered with it is refused when it is read."""

logger = logging.getLogger(__name__)


class AdapterClient:
    """Loads, unloads and pins adapters in the engine that runs now. All calls belong to one event loop."""

    def __init__(self, engine: Callable[[], EngineProcess], sources: AdapterSources) -> None:
        """`engine` returns the running one, or raises EngineDeadError."""
        self._engine = engine
        self._sources = sources
        self._loaded: dict[str, Call] = {}  # as loaded, to load them again
        self._digests: dict[str, str] = {}  # of what was loaded
        self.requests: dict[str, LoRARequest] = {}
        """What `load` has registered, by name, with local folders. To look at only."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def localize(self, lora: LoRA | None) -> LoRA | None:
        """See `AdapterSources.localize`."""
        return await self._sources.localize(lora)

    async def load(self, request: LoRARequest, *, load_inplace: bool, pinned: bool) -> AdapterInfo:
        """See `LLM.load_lora_adapter`. Loads under one name come one after another."""
        async with self._locks.setdefault(request.name, asyncio.Lock()):
            try:
                local = await self._sources.localize_request(request, again=True)
                call = Call(0, "load_adapter", lora=local, load_inplace=load_inplace, pinned=pinned)
                info: AdapterInfo = await self._engine().call(call)
                self._loaded[request.name], self.requests[request.name] = call, local
                self._digests[request.name] = info.digest
            finally:
                self._release(request.name)
            return info

    async def register(self, requests: Sequence[LoRARequest]) -> None:
        """See `LLM.register_lora_adapters`."""
        try:
            local = [await self._sources.localize_request(request) for request in requests]
            await self._engine().call(Call(0, "register_adapters", loras=local))
            for request in local:
                self._loaded[request.name] = Call(0, "register_adapters", loras=[request])
                self.requests[request.name] = request
        finally:
            for request in requests:
                self._release(request.name)

    async def unload(self, name: str, mode: str) -> None:
        """Forget an adapter; NotFoundError when the engine does not know it."""
        try:
            await self._engine().call(Call(0, "unload_adapter", name=name, mode=mode))
        except NotFoundError:
            self._forget(name)
            raise
        self._forget(name)

    async def set_pinned(self, name: str, pinned: bool) -> None:
        """Keep a registered adapter on the device, or let it go when others need the place."""
        await self._engine().call(Call(0, "pin_adapter" if pinned else "unpin_adapter", name=name))
        if name in self._loaded:  # after a restart too
            self._loaded[name] = Call(0, "load_adapter", lora=self.requests[name], pinned=pinned)

    async def call(self, method: str) -> Any:
        """The result of a method of the engine without parameters."""
        return await self._engine().call(Call(0, method))

    async def load_again(self, engine: EngineProcess) -> None:
        """Register in an engine that has just started what the last one had; what cannot be read any more is
        forgotten; of what is another content by now the name remains, and its requests get the error for that."""
        again = dict(self._loaded)
        unread = [name for name, call in again.items() if call.method == "register_adapters"]
        try:  # thousands by one call; when one of them is gone, each by itself
            if unread:
                await engine.call(Call(0, "register_adapters", loras=[self.requests[name] for name in unread]))
            again = {name: call for name, call in again.items() if call.method != "register_adapters"}
        except EngineDeadError:
            raise
        except OutriderError:
            pass
        for name, call in again.items():
            try:
                info: AdapterInfo | None = await engine.call(call)
                if info is not None and info.digest != self._digests.get(name, info.digest):
                    logger.error("The files of adapter %r have changed; load it again with load_inplace", name)
                    await engine.call(Call(0, "unload_adapter", name=name))
                    refused = dataclasses.replace(self.requests[name], digest=_NO_FILES)
                    await engine.call(Call(0, "register_adapters", loras=[refused]))
            except EngineDeadError:
                raise
            except OutriderError as error:
                logger.error("Adapter %r cannot be loaded again: %r", name, error.message)
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._loaded.pop(name, None)
        self._digests.pop(name, None)
        self.requests.pop(name, None)
        self._release(name)

    def _release(self, name: str) -> None:
        """Keep only those fetched folders that the registered adapter was read from."""
        lora = self.requests.get(name)
        self._sources.restrict(name, () if lora is None else (lora.path, lora.draft_path))
