"""`sleep`, `wake_up` and `reset_prefix_cache` of `LLM`, `LLMEngine` and `AsyncLLM`.

    level 1   the KV cache's memory goes back to the system, and what it had cached is gone; the weights stay
    level 2   the engine ends, with weights, KV cache and adapters; `wake_up` starts it again, and loads them

On a GPU level 1 is level 2: captured graphs hold the addresses of the KV cache.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from ..core.adapter_verbs import LocalAdapters
from ..core.errors import AsleepError, ShuttingDownError, invalid
from ..core.messages import EngineInfo, EngineRequest, EngineStats, TokenDelta
from .engine_factory import Engine

if TYPE_CHECKING:
    from .adapters.async_adapters import AsyncLLMAdapters
    from .llm_engine import LLMEngine
    from .process.supervisor import EngineProcess, Supervisor
    from .stream_pacing import StreamPacer

LEVELS = (1, 2)
ADMITTED: ContextVar[bool] = ContextVar("ADMITTED", default=False)
"""True in the work of a running request that makes others, as a beam search does: these are not refused."""


def refuse() -> NoReturn:
    """Refuse what needs an engine that is awake."""
    raise AsleepError("the engine sleeps and takes no requests: call wake_up")


def _level(level: int, device: str) -> int:
    """The level that is right for a device."""
    if level not in LEVELS:
        raise invalid("level", f"must be 1 or 2, got {level!r}")
    return level if device == "cpu" else 2


class SleepingEngine:
    """Place of an engine that sleeps; see `Engine`."""

    def __init__(self, engine: Engine, level: int) -> None:
        self.info: EngineInfo = engine.info
        self.level = level
        self.engine = engine if level == 1 else None
        """The engine that `wake_up` goes on with."""

    def add_request(self, request: EngineRequest) -> None:
        """Refuse a sequence."""
        refuse()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Do nothing: there are no sequences."""

    def has_work(self) -> bool:
        """See Engine."""
        return False

    def step(self) -> list[TokenDelta]:
        """See Engine."""
        return []

    @property
    def adapters(self) -> LocalAdapters:
        """Refuse what is done with adapters."""
        refuse()

    def check_integrity(self) -> None:
        """See Engine."""

    def stats(self) -> EngineStats:
        """A snapshot without anything."""
        return EngineStats()

    def reset_prefix_cache(self) -> bool:
        """See Engine: nothing is cached."""
        return True

    def release_memory(self) -> None:
        """See Engine: it is released."""

    def start_profile(self, folder: str, prefix: str) -> None:
        """Refuse a profile."""
        refuse()

    def stop_profile(self) -> str:
        """Refuse a profile."""
        refuse()

    def shutdown(self) -> None:
        """End the engine that is there."""
        if self.engine is not None:
            self.engine.shutdown()


class SyncSleepMethods:
    """The methods of `LLM` and `LLMEngine`."""

    llm_engine: LLMEngine

    def reset_prefix_cache(self) -> bool:
        """Forget the cached beginnings of prompts; True when nothing is cached any more."""
        self.llm_engine.check_open()
        return self.llm_engine.engine_core.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`; requests and adapter calls are refused with AsleepError meanwhile.

        Args:
            level: 1 frees the KV cache; 2 the weights too, which are loaded again from their files.
        """
        self.llm_engine.check_open()
        level, awake = _level(level, self.llm_engine.engine_core.info.device), self.llm_engine.engine_core
        if isinstance(awake, SleepingEngine):
            if awake.level >= level or awake.engine is None:
                return
            awake = awake.engine
        awake.release_memory()
        if level == 2:
            self.llm_engine.adapters.remember(awake.adapters)
            awake.shutdown()
        self.llm_engine.engine_core = SleepingEngine(awake, level)
        del awake
        gc.collect()

    def wake_up(self) -> None:
        """Take requests again, after `sleep`; the errors are those of a start."""
        self.llm_engine.check_open()
        if isinstance(self.llm_engine.engine_core, SleepingEngine):
            reloads = self.llm_engine.engine_core.engine is None
            self.llm_engine.engine_core = self.llm_engine.engine_core.engine or self.llm_engine.make_engine()
            if reloads:
                self.llm_engine.adapters.load_again()

    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return isinstance(self.llm_engine.engine_core, SleepingEngine)


class AsyncSleepMethods:
    """The methods of `AsyncLLM`. Calls come one after another."""

    _asleep = 0  # the level; 0: awake
    _draining: bool
    _supervisor: Supervisor
    _make_supervisor: Callable[..., Supervisor]
    _pacer: StreamPacer
    adapters: AsyncLLMAdapters

    async def start(self) -> EngineInfo:
        """See AsyncLLM."""
        raise NotImplementedError

    @cached_property
    def _sleep_lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    def _check_takes_requests(self) -> None:
        if ADMITTED.get():
            return
        if self._draining:
            raise ShuttingDownError("the server is shutting down")
        if self._asleep:
            refuse()

    def _ready_engine(self) -> EngineProcess:
        """The running engine, where it does not sleep without its weights."""
        if self._asleep == 2:
            refuse()
        return self._supervisor.ready_engine()

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`. False while requests use what is cached."""
        await self.start()
        return self._asleep > 0 or bool(await self._ready_engine().call("reset_prefix_cache"))

    async def sleep(self, level: int = 1) -> None:
        """Refuse new requests with AsleepError, let the running ones finish, and free memory until `wake_up`; see
        `LLM.sleep`. Level 2 ends the engine process."""
        level = _level(level, (await self.start()).device)
        async with self._sleep_lock:
            before = self._asleep
            if level <= before:
                return
            self._asleep = level
            try:
                await self._pacer.idle.wait()
                if level == 1:
                    await self._supervisor.ready_engine().call("release_memory")
                else:
                    await self._supervisor.stop()
            except BaseException:
                self._asleep = before
                raise

    async def wake_up(self) -> None:
        """See `LLM.wake_up`."""
        await self.start()
        async with self._sleep_lock:
            await self.start()  # it may have been shut down meanwhile
            if self._asleep == 2:
                restarts = self._supervisor.num_restarts
                self._supervisor = self._make_supervisor()
                self._supervisor.num_restarts = restarts + 1
                try:
                    await self._supervisor.start()
                    await self.adapters.load_again(self._supervisor.ready_engine())
                except BaseException:  # a cancelled call too: the next one starts another engine
                    await self._supervisor.stop()
                    raise
            self._asleep = 0

    async def is_sleeping(self) -> bool:
        """See `LLM.is_sleeping`."""
        return self._asleep > 0
