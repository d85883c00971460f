"""`EngineCore.adapters`: the verbs of `platform.core.adapter_verbs` for an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.adapter_verbs import RUNNING, PendingCall
from ..core.errors import AdapterReplacedError, NotFoundError, OutriderError, invalid
from ..core.lora_request import LoRARequest
from ..core.messages import AdapterInfo
from ..core.request import Request
from ..core.sampling_params import quote_for_error

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
        self.register = catalog.register
        self.pin, self.unpin = catalog.pin, catalog.unpin
        self.find, self.list = catalog.find, catalog.list

    def load(self, request: LoRARequest, *, running: str = "finish", **options: Any) -> AdapterInfo:
        """Load an adapter, and abort the requests on earlier versions if `running` is "abort"."""
        replaced = _replaced(running)
        try:
            info: AdapterInfo = self._catalog.load(request, **options, replaced=replaced)
        finally:
            self.end_replaced(replaced)
        return info

    def start(self, verb: str, arguments: Mapping[str, Any]) -> PendingCall | None:
        """See `LocalAdapters`."""
        if verb != "load":
            return self._catalog.start(verb, arguments)
        options = {**arguments}
        replaced = _replaced(options.pop("running", "finish"))
        load = self._catalog.start(verb, {**options, "replaced": replaced})
        return None if load is None else _PendingLoad(load, lambda: self.end_replaced(replaced))

    def unload(self, name: str, mode: str = "drain") -> None:
        """Remove an adapter, and with `mode` "abort" abort its requests."""
        ending = self._catalog.unload(name, mode)
        self._end(
            ending,
            NotFoundError(f"the adapter {name!r} was unloaded while the request ran (mode 'abort')", param="model"),
        )

    def end_replaced(self, requests: list[Request] | None) -> None:
        """Abort requests whose adapter has another version now."""
        message = "another version of the adapter was loaded while the request ran (running 'abort'); send it again"
        self._end(requests or [], AdapterReplacedError(message, param="model"))

    def _end(self, requests: list[Request], error: OutriderError) -> None:
        self._scheduler.end([request.request_id for request in requests], error.info())


class _PendingLoad(NamedTuple):
    """A load whose result aborts the requests that it replaces: they are not aborted amid a step."""

    load: PendingCall
    end_replaced: Callable[[], None]

    def done(self) -> bool:
        """See `PendingCall`."""
        return self.load.done()

    def result(self) -> AdapterInfo:
        """See `PendingCall`."""
        try:
            return self.load.result()
        finally:
            self.end_replaced()


def _replaced(running: str) -> list[Request] | None:
    """A list for the requests to abort; None: they finish.

    Raises:
        InvalidRequestError: `running` is neither.
    """
    if running not in RUNNING:
        raise invalid("running", f"must be one of {', '.join(RUNNING)}; got {quote_for_error(running)}")
    return [] if running == "abort" else None
