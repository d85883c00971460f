"""`RemoteEngine`: an engine in a process of its own, which is started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from ..core.errors import EngineDeadError, InvalidUserInputError, OutriderError, ShuttingDownError
from ..core.messages import EngineInfo, EngineRequest, TokenDelta
from .engine_client import EngineState, asleep, level_on
from .engine_factory import import_text_side
from .process.event_loops import CompletedAwaitable, in_event_loop, run_in
from .process.ipc import Abort, Add
from .process.supervisor import EngineProcess, EngineSpec, Supervisor
from .stream_pacing import StreamPacer
from .weight_updates import AppliedUpdate, WeightUpdates

_SHUTTING_DOWN = "the server is shutting down"
_PAUSE_POLL_SECONDS = 0.005
"""Seconds between two looks at an engine that finishes its requests before a pause."""
_ADMITTED: ContextVar[bool] = ContextVar("_ADMITTED", default=False)
"""True in a running request that makes others, as a beam search does: these are not refused."""


class RemoteEngine:
    """See `EngineClient`. All calls belong to one event loop; `sleep` and `wake_up` run one at a time."""

    def __init__(
        self,
        spec: EngineSpec,
        pacer: StreamPacer,
        *,
        on_start: Callable[[EngineInfo], Awaitable[None]],
        on_deltas: Callable[[list[TokenDelta]], None],
        on_death: Callable[[OutriderError], None],
        on_restart: Callable[[EngineProcess], Awaitable[None]],
    ) -> None:
        """The functions are called in the event loop.

        Args:
            pacer: knows the running requests, for which `sleep` and `drain` wait.
            on_start: the process has started for the first time; the engine is ready when this returns.
            on_death: the process died, or was ended by `close` (ShuttingDownError); what it was doing is lost.
            on_restart: another process is there, after a death or a sleep of level 2; requests wait for the return.
        """
        self.sleep_level = 0
        """Level of the sleep; 0 when awake."""
        self._args, self._pacer = spec.args, pacer
        self._on_start, self._on_death, self._on_restart = on_start, on_death, on_restart
        self._make_supervisor = lambda: Supervisor(
            spec, on_deltas=on_deltas, on_death=on_death, on_restart=self._restarted
        )
        self._supervisor = self._make_supervisor()
        self._info: EngineInfo | None = None  # once `on_start` has returned
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._ending: asyncio.Future[None] | CompletedAwaitable | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that all calls belong to
        self._draining = self._closed = False
        self._lock = asyncio.Lock()  # of sleep and pause
        self.is_paused = False
        """True between `pause` and `resume`."""
        self.weights = WeightUpdates()

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """See EngineClient."""
        of_process = self._supervisor.state
        if self._draining and of_process is not EngineState.STOPPED:
            return EngineState.DRAINING
        if self.sleep_level and not self._closed:
            return EngineState.DRAINING if self._draining else _ASLEEP[self.sleep_level]
        if of_process is EngineState.READY and self._info is None:
            return EngineState.STARTING  # the tokenizer is being loaded
        if of_process is EngineState.READY and self.is_paused:
            return EngineState.PAUSED
        return of_process

    @property
    def failure(self) -> OutriderError | None:
        """Reason why the engine has been given up; None while it has not."""
        return self._supervisor.failure

    @property
    def num_restarts(self) -> int:
        """Number of times that the engine has been started again."""
        return self._supervisor.num_restarts

    @property
    def pid(self) -> int | None:
        """Id of the process that runs now."""
        return self._supervisor.pid

    @property
    def info(self) -> EngineInfo:
        """See EngineClient. EngineDeadError before the first start."""
        if self._info is None:
            raise EngineDeadError("the engine has not started")
        return self._info

    def check_admits(self) -> None:
        """Raise the error that a new request gets, if any. `start` and `process` say why an engine could not start, or
        is dead."""
        state = self.state
        has_failed = state is EngineState.STOPPED and not self._draining
        if not (_ADMITTED.get() or has_failed) and (error := state.refusal(_SHUTTING_DOWN)):
            raise error

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count as a running request that makes others: these are admitted until it ends."""
        self.check_admits()
        key = uuid.uuid4().hex
        running, before = self._pacer.open(key), _ADMITTED.set(True)
        try:
            yield
        finally:
            _ADMITTED.reset(before)
            self._pacer.close(key, running)

    def process(self) -> EngineProcess:
        """The running process.

        Raises:
            AsleepError: it sleeps without its weights. EngineDeadError, ShuttingDownError: see Supervisor.
            InvalidUserInputError: it belongs to another event loop.
        """
        self._check_loop()
        if self.sleep_level == 2:
            raise asleep()
        return self._supervisor.ready_engine()

    # --- verbs ----------------------------------------------------------------------------------------------------

    def add(self, requests: list[EngineRequest]) -> None:
        """See EngineClient."""
        self.process().send(Add(requests))

    def abort(self, request_ids: Iterable[str]) -> None:
        """See EngineClient. A process that is not there has no sequences."""
        if aborted := list(request_ids):
            with contextlib.suppress(EngineDeadError, ShuttingDownError):
                self._supervisor.ready_engine().send(Abort(aborted))

    async def call(self, verb: str, /, **arguments: Any) -> Any:
        """See EngineClient; it starts the engine."""
        await self.start()
        return await self.process().call(verb, **arguments)

    # --- start and end --------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Start the process and wait until it is ready; once, however often it is called.

        Raises:
            OutriderError: the typed error of the engine that could not start.
            ShuttingDownError: after `close`.
            InvalidUserInputError: in another event loop than the first time.
        """
        if self._closed:
            raise ShuttingDownError("this AsyncLLM has been shut down; make a new one")
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = asyncio.create_task(self._start())
        self._check_loop()
        return await asyncio.shield(self._starting)

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise InvalidUserInputError(
                "this AsyncLLM belongs to another event loop, such as that of an earlier asyncio.run; make a new one"
            )

    async def _start(self) -> EngineInfo:
        # The tokenizer's library takes a second to import: meanwhile the engine starts.
        importing = asyncio.create_task(asyncio.to_thread(import_text_side, self._args))
        try:
            info = await self._supervisor.start()
        finally:
            await asyncio.wait({importing})
        try:
            await self._on_start(info)
        except BaseException:
            await self._supervisor.stop()
            raise
        self._info = info
        return info

    async def _restarted(self, process: EngineProcess) -> None:
        """Bring a new process to where the one before it was."""
        for update in self.weights.applied:  # before adapters are loaded, which may depend on them
            await process.call("update_weights", **update.arguments())
        await self._on_restart(process)
        if self.is_paused:
            await process.call("pause", mode="keep", clear_cache=False)
            if not self.is_paused:  # resumed meanwhile
                await process.call("resume")

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait at most `timeout` seconds for the running ones; True when all have finished.
        Requests that wait for a resume are not waited for."""
        self._draining = True
        with contextlib.suppress(TimeoutError, OutriderError):
            async with asyncio.timeout(timeout):
                await self._frozen()
                if not self.is_paused:
                    await self._pacer.idle.wait()
        return self._pacer.idle.is_set()

    def close(self) -> Awaitable[None]:
        """See EngineClient. May be called twice.

        In an event loop the result may be awaited, until the process has ended, but need not be. Elsewhere the process
        has ended on return.
        """
        if in_event_loop() and not (self._loop is not None and self._loop.is_closed()):
            self._check_loop()
        self._draining = self._closed = True
        if self._ending is None or self._ending.done():
            self._ending = run_in(self._loop, self._close)
        return self._ending

    async def _close(self) -> None:
        self._on_death(ShuttingDownError(_SHUTTING_DOWN))
        await self._supervisor.stop()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)

    # --- pause ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """See EngineClient.

        Raises:
            InvalidRequestError: there is no such mode. AsleepError: it sleeps.
            InvalidUserInputError: it was resumed before the running requests had finished.
        """
        await self.start()
        async with self._lock:
            if self.sleep_level:
                raise asleep()
            before, self.is_paused = self.is_paused, True  # also for a caller who is cancelled, and resumes
            try:
                await self.process().call("pause", mode=mode, clear_cache=clear_cache)
            except OutriderError:
                self.is_paused = before
                raise
        await self._frozen()
        if not self.is_paused:
            raise InvalidUserInputError("generation was resumed before the running requests had finished")

    async def _frozen(self) -> None:
        """Wait until a paused engine computes nothing any more, and has sent all that it has computed."""
        while self.is_paused and await self.process().call("has_work"):
            await asyncio.sleep(_PAUSE_POLL_SECONDS)

    async def resume(self) -> None:
        """See EngineClient. AsleepError while it sleeps. EngineDeadError: it died, and the next one is not paused."""
        await self.start()
        async with self._lock:
            if self.sleep_level:
                raise asleep()
            self.is_paused = False  # a process that is being started again, too
            await self.process().call("resume")

    # --- weights --------------------------------------------------------------------------------------------------

    async def update_weights(self, update: AppliedUpdate, version: str | None) -> None:
        """See EngineClient. AsleepError while it sleeps. It goes on if its caller is cancelled."""
        await self.start()
        async with self._lock:
            if self.sleep_level:
                raise asleep()
            await asyncio.shield(self._update_weights(self.process(), update, version))

    async def _update_weights(self, process: EngineProcess, update: AppliedUpdate, version: str | None) -> None:
        is_whole = await process.call("update_weights", **update.arguments())
        self.weights.add(update, is_whole=is_whole, version=version)

    # --- sleep ----------------------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """See EngineClient. New requests are refused at once, and the running ones finish first."""
        level = level_on((await self.start()).device, level)
        async with self._lock:
            before = self.sleep_level
            if level <= before:
                return
            if self.is_paused and not self._pacer.idle.is_set():
                raise InvalidUserInputError("requests wait for the end of a pause; the engine can sleep without them")
            self.sleep_level = level
            try:
                await self._pacer.idle.wait()
                if level == 1:
                    await self._supervisor.ready_engine().call("release_memory")
                else:
                    await self._supervisor.stop()
            except BaseException:
                self.sleep_level = before
                raise

    async def wake_up(self) -> None:
        """See EngineClient; the errors are those of a start."""
        await self.start()
        async with self._lock:
            await self.start()  # it may have been shut down meanwhile
            if self.sleep_level == 2:
                restarts = self.num_restarts
                self._supervisor = self._make_supervisor()
                self._supervisor.num_restarts = restarts + 1
                try:
                    await self._supervisor.start()
                    await self._restarted(self._supervisor.ready_engine())
                except BaseException:  # a cancelled call too: the next one starts another engine
                    await self._supervisor.stop()
                    raise
            self.sleep_level = 0


_ASLEEP = {1: EngineState.ASLEEP_1, 2: EngineState.ASLEEP_2}
