"""Clients of one engine: `LocalEngine` steps it in this process, `RemoteEngine` supervises a process of its own.

    state            a request gets        other calls get
    starting         an answer, later      an answer, later
    ready            an answer             an answer
    paused           an answer, once it    an answer
                     has been resumed
    restarting       EngineDeadError       EngineDeadError
    asleep, level 1  AsleepError           an answer (LocalEngine: AsleepError for adapters and the profiler)
    asleep, level 2  AsleepError           AsleepError
    draining         ShuttingDownError     an answer
    stopped          ShuttingDownError, or EngineDeadError when the engine has been given up

Level 1 of sleep returns the memory of the KV cache to the system and drops its content; the weights stay. Level 2 ends
the engine, with its weights, KV cache and adapters; `wake_up` starts it again and loads them. On a GPU level 1 is
level 2: captured graphs hold the addresses of the KV cache.

A pause (`platform.engine.pause`) outlasts a sleep and a restart of the engine process, and so do new weights. An
engine with requests that wait for the resume cannot sleep.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from enum import Enum
from typing import Any, Protocol, TypeVar

from ..core.errors import AsleepError, OutriderError, ShuttingDownError, invalid
from ..core.messages import EngineInfo, EngineRequest
from .weight_updates import AppliedUpdate

Nothing = TypeVar("Nothing", None, Awaitable[None], covariant=True)
"""None, or an awaitable of None."""


class EngineState(Enum):
    """State of an engine. The value is its name in `AsyncLLM.state` and the level of its sleep, 0 when awake."""

    STARTING = "starting", 0
    READY = "ready", 0
    PAUSED = "paused", 0
    RESTARTING = "restarting", 0
    ASLEEP_1 = "sleeping", 1
    ASLEEP_2 = "sleeping", 2
    DRAINING = "draining", 0
    STOPPED = "stopped", 0

    @property
    def label(self) -> str:
        """The name that users see."""
        return self.value[0]

    @property
    def sleep_level(self) -> int:
        """Level of the sleep; 0 when awake."""
        return self.value[1]

    def refusal(self, shut_down: str) -> OutriderError | None:
        """The error for a new request; None when it is admitted. `shut_down` is the message after a shutdown."""
        if self in (EngineState.DRAINING, EngineState.STOPPED):
            return ShuttingDownError(shut_down)
        return asleep() if self.sleep_level else None


def asleep() -> AsleepError:
    """The error of what needs an engine that is awake."""
    return AsleepError("the engine sleeps and takes no requests: call wake_up")


def level_on(device: str, level: int) -> int:
    """The level of sleep that a device has for the one that is requested."""
    if level not in (1, 2):
        raise invalid("level", f"must be 1 or 2, got {level!r}")
    return level if device == "cpu" else 2


class EngineClient(Protocol[Nothing]):
    """The engine of an `LLMEngine`, or of an `AsyncLLM`, whose results are awaited."""

    @property
    def state(self) -> EngineState:
        """The state, which decides what is admitted."""

    @property
    def info(self) -> EngineInfo:
        """Model, dtype and limits."""

    def add(self, requests: list[EngineRequest]) -> None:
        """Queue the sequences of one request."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop sequences; no delta follows."""

    def call(self, verb: str, /, **arguments: Any) -> Any:
        """Result of a verb of `Engine`, or of one of its adapters, such as "adapters.load"."""

    def pause(self, mode: str, *, clear_cache: bool) -> Nothing:
        """Compute no steps until `resume`, once the running requests have ended or are kept as they are; see
        `LLM.pause_generation`."""

    def resume(self) -> Nothing:
        """End the pause; does nothing without one."""

    def update_weights(self, update: AppliedUpdate, version: str | None) -> Nothing:
        """Replace weights, also of an engine that is started again; see `LLM.update_weights`."""

    def sleep(self, level: int) -> Nothing:
        """Free memory until `wake_up`."""

    def wake_up(self) -> Nothing:
        """End the sleep; does nothing when awake."""

    def close(self) -> Nothing:
        """End the engine for good."""
