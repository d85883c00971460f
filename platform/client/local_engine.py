"""`LocalEngine`: an engine in this process, stepped by its caller."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from ..core.adapter_verbs import LocalAdapters
from ..core.errors import ShuttingDownError
from ..core.messages import AdapterInfo, EngineInfo, EngineRequest, EngineStats, TokenDelta
from .engine_client import EngineState, asleep, level_on
from .engine_factory import Engine
from .weight_updates import AppliedUpdate, WeightUpdates

_SHUT_DOWN = "this LLM has been shut down; make a new one"
_ASLEEP_RESULTS: dict[str, Callable[[], Any]] = {
    "stats": EngineStats,
    "reset_prefix_cache": lambda: True,
    "kv_event_sources": list,
}
"""Results of the verbs that an engine answers while it sleeps."""


class LocalEngine:
    """See `EngineClient`."""

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        on_end: Callable[[Sequence[AdapterInfo]], None],
        on_restart: Callable[[], None],
    ) -> None:
        """`make` starts the engine, now and after a sleep of level 2, which calls `on_end` with the adapters of the
        engine that ends, and `on_restart` once the next one is there."""
        self._make, self._on_end, self._on_restart = make, on_end, on_restart
        self._core: Engine | None = make()
        self.info: EngineInfo = self._core.info
        self._state = EngineState.READY
        self.is_paused = False
        """True between `pause` and `resume`."""
        self.weights = WeightUpdates()

    @property
    def state(self) -> EngineState:
        """See EngineClient."""
        return EngineState.PAUSED if self.is_paused and self._state is EngineState.READY else self._state

    @property
    def core(self) -> Engine:
        """The engine itself; AsleepError while it sleeps without its weights."""
        if self._core is None:
            raise asleep()
        return self._core

    @property
    def adapters(self) -> LocalAdapters:
        """The engine's adapters; AsleepError while it sleeps."""
        self.check_admits()
        return self.core.adapters

    def check_open(self) -> None:
        """Raise ShuttingDownError after `close`."""
        if self.state is EngineState.STOPPED:
            raise ShuttingDownError(_SHUT_DOWN)

    def check_admits(self) -> None:
        """Raise the error that a new request gets, if any."""
        if error := self.state.refusal(_SHUT_DOWN):
            raise error

    def add(self, requests: list[EngineRequest]) -> None:
        """See EngineClient."""
        self.check_admits()
        for request in requests:
            self.core.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """See EngineClient. An engine that sleeps has no sequences."""
        if not self.state.sleep_level:
            self.core.abort(request_ids)

    def has_work(self) -> bool:
        """True when `step` has something to do."""
        return not self.state.sleep_level and self.core.has_work()

    def step(self) -> list[TokenDelta]:
        """Compute one step."""
        return self.core.step()

    def call(self, verb: str, /, **arguments: Any) -> Any:
        """See EngineClient."""
        self.check_open()
        if self.state.sleep_level and verb in _ASLEEP_RESULTS:
            return _ASLEEP_RESULTS[verb]()
        self.check_admits()
        return attrgetter(verb)(self.core)(**arguments)

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        """See EngineClient. In the mode "wait" the caller steps the running requests to their end.

        Raises:
            InvalidRequestError: there is no such mode. AsleepError: it sleeps.
        """
        self.call("pause", mode=mode, clear_cache=clear_cache)
        self.is_paused = True

    def resume(self) -> None:
        """See EngineClient. AsleepError while it sleeps."""
        self.call("resume")
        self.is_paused = False

    def update_weights(self, update: AppliedUpdate, version: str | None) -> None:
        """See EngineClient."""
        self.weights.add(update, is_whole=self.call("update_weights", **update.arguments()), version=version)

    def sleep(self, level: int) -> None:
        """See EngineClient.

        Raises:
            InvalidUserInputError: there are sequences.
        """
        self.check_open()
        level = level_on(self.info.device, level)
        if level <= self.state.sleep_level:
            return
        self.core.release_memory()
        if level == 2:
            self._on_end(self.core.adapters.list())
            self.core.shutdown()
            self._core = None
        self._state = EngineState.ASLEEP_1 if level == 1 else EngineState.ASLEEP_2
        gc.collect()

    def wake_up(self) -> None:
        """See EngineClient; the errors are those of a start."""
        self.check_open()
        before = self._core
        self._core = self._restarted() if before is None else before
        self.info, self._state = self._core.info, EngineState.READY
        if before is None:
            self._on_restart()

    def _restarted(self) -> Engine:
        """A new engine with the weights and the pause of the one before it."""
        core = self._make()
        try:
            for update in self.weights.applied:
                core.update_weights(**update.arguments())
            if self.is_paused:
                core.pause("keep", clear_cache=False)
        except BaseException:
            core.shutdown()
            raise
        return core

    def close(self) -> None:
        """See EngineClient. A further call does nothing."""
        if self.state is not EngineState.STOPPED and self._core is not None:
            self._core.shutdown()
        self._state = EngineState.STOPPED
