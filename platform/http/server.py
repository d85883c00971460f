"""The server process: starts the engine, serves HTTP, drains on SIGTERM.

Imports at the top are light on purpose: the web stack is loaded while the engine process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import importlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..core.config import EngineArgs
from ..core.errors import EngineDeadError, InvalidRequestError, OutriderError
from ..core.logs import REQUEST_LOGGER, set_up_logging
from ..core.progress import START_EVERY, Progress, Stopwatch
from ..core.tasks import cancel
from .adapters.start_adapters import check_adapters, load_adapters
from .server_config import ServerConfig

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from ..client.async_llm import AsyncLLM
    from ..core.messages import AdapterInfo
    from ..tenancy.service import Tenancy

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5
"""Seconds for complete answers to reach their clients."""
KEEP_ALIVE_SECONDS = 75


class InterruptedStartError(OutriderError):
    """A signal asked the server to stop before it was ready."""


def serve(args: EngineArgs, config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the process's exit status.

    Raises:
        OutriderError: the address is taken, or the engine does not start.
    """
    set_up_logging(config.log_level.upper(), config.log_format, "api", prompts=config.log_prompts)
    logging.getLogger(REQUEST_LOGGER).setLevel(logging.INFO if config.log_requests else logging.WARNING)
    for name, why in config.without_effect.items():
        logger.warning("%s has no effect: %s", name, why)
    with bind(config.host, config.port) as listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_Server(Service(args, config), listener).run())


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens: an address in use is found before the model is loaded. Two sockets may be bound to one
    port as long as neither listens. Who connects before the server is ready waits for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # uvicorn does it again, with a backlog of its own
    except (OSError, OverflowError, UnicodeError) as error:  # a host name that no encoding of names takes
        listener.close()
        no_such_host = isinstance(error, socket.gaierror | UnicodeError) or error.args[:1] == (errno.EADDRNOTAVAIL,)
        param = "host" if no_such_host else "port"
        raise InvalidRequestError(f"cannot listen on {host}:{port}: {error}", param=param) from error
    return listener


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Maker of uvloop's event loops; None, which is asyncio's, if it is not installed."""
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


def _process_age() -> float:
    """Seconds since this process was started."""
    import psutil  # type: ignore[import-untyped]

    return max(0.0, time.time() - psutil.Process().create_time())


class Service:
    """Engine, tenants and application of a server, without its socket."""

    def __init__(self, args: EngineArgs, config: ServerConfig) -> None:
        self._args, self.config = args, config
        self.llm: AsyncLLM
        self.app: FastAPI
        self.tenancy: Tenancy | None = None

    async def start(self, stop: asyncio.Event | None = None) -> None:
        """Start the engine; open the database and load the web stack meanwhile. `stop` ends the start.

        Raises:
            InterruptedStartError: `stop` was set.
            OutriderError: the engine does not start, the database cannot be opened, or an adapter not be loaded.
        """
        stop = stop or asyncio.Event()
        name, watch = self.config.served_model_names[0], Stopwatch()
        # On a terminal the bar of the weights shows how far it is.
        with Progress(self.report, None if sys.stderr.isatty() else START_EVERY) as progress:
            progress.say(f"Outrider is loading {name}")
            progress.doing(lambda: f"Outrider is still loading {name} after {watch}")
            await self._start_engine(stop)

    def report(self, line: str) -> None:
        """Show a life sign: on standard error, or in a log whose lines are all JSON."""
        if self.config.log_format == "json":
            logger.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)

    async def _start_engine(self, stop: asyncio.Event) -> None:
        from ..client.adapters.sources import AdapterSources
        from ..client.async_llm import AsyncLLM
        from ..client.process.supervisor import EngineSpec

        spec = EngineSpec(args=self._args, hang_timeout=self.config.engine_hang_timeout)
        self.llm = AsyncLLM.from_spec(spec, AdapterSources(self.config.lora_sources))
        try:
            await self._start(stop)
        except BaseException:
            await self._end_engine()
            raise

    async def _start(self, stop: asyncio.Event) -> None:
        starting = asyncio.create_task(self.llm.start())
        await asyncio.sleep(0)  # the engine process is on its way before imports take this one's time
        try:
            await asyncio.to_thread(check_adapters, self._args, self.config)
            if self.config.database is not None:
                self.tenancy = await self._open_tenancy(self.config.database, stop)
            self.app = await asyncio.to_thread(self._make_app)
            await _unless(stop, starting)
        finally:
            await cancel(starting)
        try:
            await load_adapters(self.app.state.serving.models, self.config)
            await self.app.state.serving.follow_database()
            if self.app.state.serving.batches is not None:
                self.app.state.serving.batches.start(self.app)
        except BaseException:
            await self.app.state.serving.close()
            raise

    def _make_app(self) -> FastAPI:
        import uvicorn  # noqa: F401  (loaded here, off the event loop)

        from .app import create_app

        return create_app(self.llm, self.config, tenancy=self.tenancy)

    async def _open_tenancy(self, database: str, stop: asyncio.Event) -> Tenancy:
        await asyncio.to_thread(importlib.import_module, "..tenancy.service", __package__)  # off the event loop
        from ..tenancy.service import Tenancy

        opened = Tenancy.open(
            database,
            admin_api_keys=self.config.admin_api_keys,
            journal=Path(self.config.journal) if self.config.journal else None,
            journal_max_bytes=self.config.journal_max_bytes,
            shared_limits=self.config.shared_limits,
        )
        opening = asyncio.create_task(opened)
        try:
            return cast("Tenancy", await _unless(stop, opening))
        finally:
            await cancel(opening)

    async def drain(self, stop_now: asyncio.Event | None = None) -> None:
        """Refuse new requests and let running ones finish; those that do not in time get an error."""
        self.app.state.serving.begin_draining()
        try:
            drained = await _unless(stop_now or asyncio.Event(), self.llm.drain(self.config.shutdown_timeout))
        except InterruptedStartError:
            drained = False
        if not drained:
            await self.llm.shutdown()

    async def close(self) -> None:
        """End the engine and close the database."""
        try:
            await self.app.state.serving.close()
        finally:
            await self._end_engine()

    async def _end_engine(self) -> None:
        from ..core.constraint_check import CHECKER

        CHECKER.interrupt()  # else its thread would hold up the end of this process
        await self.llm.shutdown()
        if self.tenancy is not None:
            await self.tenancy.close()


async def _unless(event: asyncio.Event, work: Awaitable[Any]) -> Any:
    """The result of `work`; InterruptedStartError once `event` is set."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise InterruptedStartError("stopped before the server was ready")
    finally:
        stopped.cancel()


class _Server:
    """One run of the server."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._config = service.config
        self._listener = listener
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        with self._signals():
            try:
                await self._service.start(self._stop)
            except InterruptedStartError:
                self._service.report("Outrider was stopped before it was ready")
                return 0
            try:
                return await self._serve()
            finally:
                await self._service.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals: the first one drains, the second one stops at once."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            (self._stop_now if self._stop.is_set() else self._stop).set()

        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    async def _serve(self) -> int:
        llm, app = self._service.llm, self._service.app
        server = self._uvicorn(app)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            serving.result()
            raise InvalidRequestError("the HTTP server did not start", param="port")
        await self._announce(llm)
        gc.collect()
        gc.freeze()  # else a collection looks at all that was imported, and stops every stream meanwhile
        failed = await self._wait_for_the_end(llm)
        if failed:
            app.state.serving.begin_draining()
        else:
            await self._drain(llm)
        server.should_exit = True
        server.force_exit = self._stop_now.is_set()
        await serving
        if failed:
            raise EngineDeadError(f"the engine could not be restarted: {llm.failure}")
        return 0

    def _uvicorn(self, app: FastAPI) -> uvicorn.Server:
        import uvicorn

        from .observe.metric_families import connection_families
        from .protect.connections import Admission, Connection, check_all
        from .protect.hardening import SECURITY_HEADERS, allow_connections, with_cors

        class Server(uvicorn.Server):
            """uvicorn's server with our signals, and without clients that are too slow."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

            async def on_tick(self, counter: int) -> bool:
                if counter % 10 == 0:  # once a second
                    check_all(self.server_state.connections)
                return await super().on_tick(counter)

        config = self._config
        admission = Admission(
            max_connections=allow_connections(config.max_connections), client_timeout=config.client_timeout
        )
        app.state.serving.metrics.register(lambda: connection_families(admission))
        options = uvicorn.Config(
            with_cors(app, config.cors_origins) if config.cors_origins else app,
            http=cast(Any, functools.partial(Connection, admission=admission)),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=config.uvicorn_log_level or config.log_level,
            access_log=self._config.access_log,
            server_header=False,
            headers=SECURITY_HEADERS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        if self._config.access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        return Server(options)

    async def _announce(self, llm: AsyncLLM) -> None:
        from .observe.startup_summary import DatabaseFacts, Startup, print_summary

        adapters: list[AdapterInfo] = []
        if llm.info.enable_lora:
            with contextlib.suppress(EngineDeadError):  # it died just now, and is started again
                adapters = await llm.adapters.list()
        port = self._listener.getsockname()[1]
        tenancy = self._service.tenancy
        database = DatabaseFacts(tenancy.database.shown, tenancy.directory.has_admin_key) if tenancy else None
        defaults = llm.sampling_defaults.of_model
        print_summary(Startup(llm.info, adapters, self._config, port, _process_age(), database, defaults))

    async def _wait_for_the_end(self, llm: AsyncLLM) -> bool:
        """Wait for a signal; True when the engine's client has given up instead."""
        while llm.state != "stopped":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)
                return False
        return True

    async def _drain(self, llm: AsyncLLM) -> None:
        if llm.num_running:
            running = f"Outrider lets {llm.num_running} running requests finish"
            print(f"{running}; interrupt it again to stop at once", file=sys.stderr, flush=True)
        await self._service.drain(self._stop_now)
