"""`EngineCore.adapters`: the verbs of `platform.core.adapter_verbs` for an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...kernels.threads import compute_alone
from ..core.errors import NotFoundError

if TYPE_CHECKING:
    from ...lora.manager import AdapterManager
    from .features import NoAdapters
    from .queue.scheduler import Scheduler


class EngineAdapters:
    """Implements `core.adapter_verbs.LocalAdapters`; belongs to the engine's thread.

    `load` and `pin` take a further argument `read`, the result of `reader`. Without it they read files themselves, and
    a pinned adapter is on the device when they return.
    """

    def __init__(self, manager: AdapterManager | NoAdapters, scheduler: Scheduler) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self.load, self.register = manager.load, manager.register
        self.pin, self.unpin = manager.pin, manager.unpin
        self.find, self.list = manager.find, manager.list

    def unload(self, name: str, mode: str = "drain") -> None:
        """Forget an adapter, and with `mode` "abort" end its requests."""
        ending = self._manager.unload(name, mode)
        gone = NotFoundError(f"the adapter {name!r} was unloaded while the request ran (mode 'abort')", param="model")
        self._scheduler.end([request.request_id for request in ending], gone.info())

    def reader(self, verb: str, arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
        """The reading of files for a call of `load` or `pin`, for another thread; see `LocalAdapters`."""
        read: Callable[[], Any] | None = None
        if verb == "load":
            read = self._manager.reader(arguments["request"], load_inplace=arguments.get("load_inplace", False))
        elif verb == "pin":
            read = self._manager.pin_reader(arguments["name"])
        return None if read is None else _beside_steps(read)


def _beside_steps(read: Callable[[], Any]) -> Callable[[], Any]:
    """`read` for a thread that takes no cores from steps."""

    def work() -> Any:
        compute_alone()
        return read()

    return work
