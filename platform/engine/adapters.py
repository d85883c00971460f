"""`EngineCore.adapters`: the verbs of `platform.core.adapter_verbs` for an engine in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import NotFoundError

if TYPE_CHECKING:
    from ...lora.registry.catalog import Catalog
    from .features import NoAdapters
    from .queue.scheduler import Scheduler


class EngineAdapters:
    """Implements `core.adapter_verbs.LocalAdapters`; belongs to the engine's thread.

    `load` and `pin` wait for files and for the device rows of a pinned adapter; a call of `start` waits for neither.
    """

    def __init__(self, catalog: Catalog | NoAdapters, scheduler: Scheduler) -> None:
        self._catalog = catalog
        self._scheduler = scheduler
        self.load, self.register, self.start = catalog.load, catalog.register, catalog.start
        self.pin, self.unpin = catalog.pin, catalog.unpin
        self.find, self.list = catalog.find, catalog.list

    def unload(self, name: str, mode: str = "drain") -> None:
        """Remove an adapter, and with `mode` "abort" abort its requests."""
        ending = self._catalog.unload(name, mode)
        gone = NotFoundError(f"the adapter {name!r} was unloaded while the request ran (mode 'abort')", param="model")
        self._scheduler.end([request.request_id for request in ending], gone.info())
