"""`EngineCore.adapters`: the verbs of `platform.core.adapter_verbs` for an engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import AdapterReplacedError, NotFoundError, OutriderError
from ..core.lora_request import LoRARequest
from ..core.messages import AdapterInfo
from ..core.request import Request

if TYPE_CHECKING:
    from ...lora.registry.catalog import Catalog
    from ...lora.registry.pending_load import PendingLoad
    from .features import NoAdapters
    from .queue.scheduler import Scheduler


class EngineAdapters:
    """Implements `core.adapter_verbs.LocalAdapters`; belongs to the engine's thread.

    `load` and `pin` wait for files and for the device rows of a pinned adapter; a call of `start` waits for neither.
    """

    def __init__(self, catalog: Catalog | NoAdapters, scheduler: Scheduler) -> None:
        self._catalog = catalog
        self._scheduler = scheduler
        self.register = catalog.register
        self.pin, self.unpin = catalog.pin, catalog.unpin
        self.find, self.list = catalog.find, catalog.list

    def load(self, request: LoRARequest, **options: Any) -> AdapterInfo:
        """Load an adapter, and abort the requests on earlier versions if `running` is "abort"."""
        replaced: list[Request] = []
        try:
            info: AdapterInfo = self._catalog.load(request, **options, replaced=replaced)
        finally:
            self.end_replaced(replaced)
        return info

    def start(self, verb: str, arguments: Mapping[str, Any]) -> _Started | None:
        """See `LocalAdapters`."""
        load = self._catalog.start(verb, arguments)
        return None if load is None else _Started(load, self)

    def unload(self, name: str, mode: str = "drain") -> None:
        """Remove an adapter, and with `mode` "abort" abort its requests."""
        ending = self._catalog.unload(name, mode)
        self._end(
            ending,
            NotFoundError(f"the adapter {name!r} was unloaded while the request ran (mode 'abort')", param="model"),
        )

    def end_replaced(self, requests: list[Request]) -> None:
        """Abort requests whose adapter has another version now."""
        message = "another version of the adapter was loaded while the request ran (running 'abort'); send it again"
        self._end(requests, AdapterReplacedError(message, param="model"))

    def _end(self, requests: list[Request], error: OutriderError) -> None:
        self._scheduler.end([request.request_id for request in requests], error.info())


class _Started:
    """A call of a verb that waits for files. Its result aborts the requests that it replaces."""

    def __init__(self, load: PendingLoad, adapters: EngineAdapters) -> None:
        self._load, self._adapters = load, adapters
        self.done = load.done

    def result(self) -> AdapterInfo:
        """See `PendingCall`."""
        try:
            return self._load.result()
        finally:
            self._adapters.end_replaced(self._load.replaced)
