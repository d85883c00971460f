"""Keeps an engine process running: starts it, notices its death at once, starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ...core.config import EngineArgs
from ...core.errors import EngineDeadError, ErrorInfo, OutriderError, ShuttingDownError, error_from_info
from ...core.logs import format_in_use
from ...core.messages import EngineInfo, TokenDelta
from ...core.tasks import cancel
from ..engine_client import EngineState
from ..engine_factory import DEFAULT_ENGINE
from .ipc import (
    Call,
    ClientLink,
    Deltas,
    Dying,
    Message,
    ProcessConfig,
    Ready,
    Reply,
    Stop,
    decode_value,
    encode_config,
)

logger = logging.getLogger(__name__)

_LAST_WORDS_MS = 50
"""Milliseconds after a process's death in which its last messages may still come in."""
_STOP_SECONDS = 5.0
_HANG_CHECKS = 10
"""Number of checks in `hang_timeout`. The time in which this process itself was stopped counts as one check."""
_SLOW_VERBS = frozenset(("update_weights",))
"""Calls during which the engine answers no other: they read files as long as a start does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Times of new starts after an engine's death, in seconds."""

    first_delay: float = 0.5
    max_delay: float = 30.0
    stable_after: float = 60.0
    """An engine that ran this long counts as healthy: the restart delay is reset."""
    max_failures: int = 5
    """Failed starts in a row before giving up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Options of an engine process, and of its supervision."""

    args: EngineArgs
    engine: str = DEFAULT_ENGINE
    restart: RestartPolicy = RestartPolicy()
    hang_timeout: float = 120.0
    """Seconds without an answer after which a ready engine counts as dead; 0: never."""


class EngineProcess:
    """One run of the engine process, from its start to its death."""

    def __init__(self, spec: EngineSpec, on_deltas: Callable[[list[TokenDelta]], None]) -> None:
        self._spec = spec
        self._on_deltas = on_deltas
        self._link = ClientLink()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._num_calls = 0
        self._num_answers = 0  # to pings
        self._num_slow_calls = 0  # for which the watch waits
        self._last_words: ErrorInfo | None = None
        self._dead: EngineDeadError | None = None

    @property
    def pid(self) -> int | None:
        """Process id."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineInfo:
        """Start the process and wait for its engine.

        Raises:
            OutriderError: the engine could not start; the typed error is the engine's own.
        """
        config = ProcessConfig(
            args=self._spec.args,
            engine=self._spec.engine,
            folder=self._link.folder,
            sys_path=sys.path,
            log_level=logging.getLogger().getEffectiveLevel(),
            log_format=format_in_use(),
            progress=sys.stderr.isatty(),
        )
        content = encode_config(config)
        # A session of its own: an interrupt typed in the terminal goes to the API process alone. `-P`: no folder of
        # the caller's comes before the standard library.
        module = f"{__package__}.engine_process"
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(content)  # and left open: its end means to the engine process that we are gone
        died = asyncio.create_task(self._wait_for_death())
        self._link.listen(self._handle)
        self._tasks = [died]
        first: set[asyncio.Future[Any]] = {self._ready, died}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise self._start_error()
        if self._spec.hang_timeout > 0:
            pause = self._spec.hang_timeout / _HANG_CHECKS
            self._tasks += [asyncio.create_task(work) for work in (self._ping(pause), self._watch(pause))]
        return self._ready.result()

    def _start_error(self) -> OutriderError:
        if self._last_words is not None:
            return error_from_info(self._last_words)
        return EngineDeadError(f"the engine process ended while it started: {self._exit_status()}")

    def _exit_status(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"

    def _handle(self, message: Message) -> None:
        if isinstance(message, Deltas):
            self._on_deltas(message.deltas)
        elif isinstance(message, Reply):
            future = self._calls.pop(message.call_id, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, Dying):
            self._last_words = message.error

    async def _wait_for_death(self) -> OutriderError:
        """Wait for the process to end, and fail all calls; returns why it ended."""
        assert self._process is not None
        await self._process.wait()
        if self._last_words is None:
            # What is still there is received while we wait.
            await asyncio.sleep(_LAST_WORDS_MS / 1000)
        reason = self._last_words.message if self._last_words is not None else self._exit_status()
        self._dead = EngineDeadError(f"the engine process died: {reason}")
        self._fail_calls(self._dead)
        return self._dead

    def _fail_calls(self, error: OutriderError) -> None:
        """Give each waiting caller a copy of `error`."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error_from_info(error.info()))

    async def _ping(self, pause: float) -> None:
        with contextlib.suppress(EngineDeadError, ShuttingDownError):  # which is not to hang
            while True:
                await self.call("has_work")
                self._num_answers += 1
                await asyncio.sleep(pause)

    async def _watch(self, pause: float) -> None:
        """End the process when its engine no longer answers between two steps: it would hold its requests forever."""
        last, num_missed = -1, 0
        while num_missed < _HANG_CHECKS:
            await asyncio.sleep(pause)
            answers = self._num_answers != last or self._num_slow_calls > 0
            num_missed = 0 if answers else num_missed + 1
            last = self._num_answers
        self._kill(f"it did not answer for {self._spec.hang_timeout:g} s")

    def _kill(self, reason: str) -> None:
        assert self._process is not None
        self._last_words = ErrorInfo(EngineDeadError.type, reason)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def died(self) -> OutriderError:
        """Wait for the process to end; returns why."""
        return await asyncio.shield(self._tasks[0])

    def send(self, message: Message) -> None:
        """Send a message; see `ClientLink.send`."""
        if self._dead is not None:  # the socket may not know yet
            raise EngineDeadError(self._dead.message)
        self._link.send(message)

    async def call(self, verb: str, **arguments: Any) -> Any:
        """Call a verb of the engine (a key of `ipc.VERBS`) and wait for its result.

        Raises:
            OutriderError: the engine's typed error. EngineDeadError: it died. ShuttingDownError: it was stopped.
        """
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._num_slow_calls += verb in _SLOW_VERBS
        try:
            self.send(Call(call_id, verb, arguments))
            reply = await future
        finally:
            self._num_slow_calls -= verb in _SLOW_VERBS
            self._calls.pop(call_id, None)
        if reply.error is not None:
            raise error_from_info(reply.error)
        return decode_value(verb, reply.value)

    async def stop(self) -> None:
        """End the process, by force when it does not go by itself, and release everything. May be called twice.

        Calls that wait for an answer fail with ShuttingDownError.
        """
        self._fail_calls(ShuttingDownError("the engine has been stopped"))
        try:
            await self._end()
        except asyncio.CancelledError:  # an event loop that ends does not wait, but for this
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._end()
            raise

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            if self._ready.done():
                with contextlib.suppress(EngineDeadError):
                    self._link.send(Stop())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(OSError):
                await process.stdin.wait_closed()
        tasks, self._tasks = self._tasks, []
        await cancel(*tasks)
        self._ready.cancel()
        self._link.close()


class Supervisor:
    """Runs an `EngineProcess`, and the next one when it dies."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        on_deltas: Callable[[list[TokenDelta]], None],
        on_death: Callable[[OutriderError], None],
        on_restart: Callable[[EngineProcess], Awaitable[None]],
    ) -> None:
        """The functions are called in the event loop.

        Args:
            on_death: the engine died; what it was doing is lost.
            on_restart: the engine has been started again; requests are let in when this returns.
        """
        self.state = EngineState.STARTING
        """STARTING, READY, RESTARTING or STOPPED."""
        self.failure: OutriderError | None = None
        """The reason why the engine has been given up."""
        self.num_restarts = 0
        self._spec = spec
        self._on_deltas, self._on_death, self._on_restart = on_deltas, on_death, on_restart
        self._engine: EngineProcess | None = None
        self._started: asyncio.Future[EngineInfo] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the engine process that runs now."""
        return None if self._engine is None else self._engine.pid

    async def start(self) -> EngineInfo:
        """Start the engine, once, and wait until it is ready.

        Raises:
            OutriderError: it could not start; the typed error is the engine's own.
        """
        if self._started is None:
            if self.state is EngineState.STOPPED:
                raise ShuttingDownError("the engine has been stopped")
            self._started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._supervise_safely(self._started))
        return await asyncio.shield(self._started)

    async def _supervise_safely(self, started: asyncio.Future[EngineInfo]) -> None:
        """Supervise; when the supervision itself fails, give up, so that no caller waits forever."""
        try:
            await self._supervise(started)
        except Exception as error:
            logger.exception("The supervision of the engine failed")
            failure = error if isinstance(error, OutriderError) else OutriderError(repr(error))
            self._give_up(started, failure)
            self._on_death(failure)

    async def _supervise(self, started: asyncio.Future[EngineInfo]) -> None:
        policy = self._spec.restart
        delay, num_failures = policy.first_delay, 0
        while True:
            engine: EngineProcess | None = None
            try:
                engine = self._engine = EngineProcess(self._spec, self._on_deltas)
                seconds, error = await self._run(engine, started)
                num_failures = 0
                if seconds >= policy.stable_after:
                    delay = policy.first_delay
            except Exception as failure:
                error = failure if isinstance(failure, OutriderError) else OutriderError(repr(failure))
                num_failures += 1
            finally:
                self._engine = None
                if engine is not None:
                    await engine.stop()
            if not started.done() or num_failures >= policy.max_failures:
                self._give_up(started, error)
                return
            logger.error("%s; starting it again in %.1f s", error.message, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, policy.max_delay)
            self.num_restarts += 1

    async def _run(self, engine: EngineProcess, started: asyncio.Future[EngineInfo]) -> tuple[float, OutriderError]:
        """Run an engine from start to death; returns the seconds it was ready, and why it died.

        Raises:
            OutriderError: it did not become ready.
        """
        loop = asyncio.get_running_loop()
        info = await engine.start()
        if started.done():
            await self._on_restart(engine)
        self.state = EngineState.READY
        ready_since = loop.time()
        if not started.done():
            started.set_result(info)
        error = await engine.died()
        self.state = EngineState.RESTARTING
        self._on_death(error)
        return loop.time() - ready_since, error

    def _give_up(self, started: asyncio.Future[EngineInfo], failure: OutriderError) -> None:
        self.state, self.failure = EngineState.STOPPED, failure
        if not started.done():
            started.set_exception(failure)
            started.exception()  # no caller may be waiting any more: not worth a warning
        else:
            logger.critical("The engine is given up: %s", failure.message)

    def ready_engine(self) -> EngineProcess:
        """The running engine.

        Raises:
            EngineDeadError: it is dead or has not started.
            ShuttingDownError: it has been stopped.
        """
        if self.state is EngineState.READY and self._engine is not None:
            return self._engine
        if self.failure is not None:
            raise EngineDeadError(f"the engine cannot be started: {self.failure.message}")
        if self.state is EngineState.STOPPED:
            raise ShuttingDownError("the engine has been stopped")
        raise EngineDeadError(f"the engine is {self.state.label}; try again")

    async def stop(self) -> None:
        """End the engine process and supervision; callers that wait for a start or an answer get ShuttingDownError."""
        self.state = EngineState.STOPPED
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})  # which, unlike `gather`, does not cancel it again when we are cancelled
        if self._started is not None and not self._started.done():
            self._started.set_exception(ShuttingDownError("the engine has been stopped"))
            self._started.exception()
