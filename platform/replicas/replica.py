"""A server without a socket: one call is one HTTP request, and its answer a stream of ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
from collections.abc import AsyncIterator, Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp

from ..core.adapter_names import split_engine_name
from ..core.config import EngineArgs
from ..core.errors import EngineDeadError, OutriderError
from ..http.app import principal_in
from ..http.protect.hardening import SECURITY_HEADERS, with_cors
from ..http.server import Service
from ..http.server_config import ServerConfig
from ..tenancy.accounts.principal import Principal
from ..tenancy.service import default_journal, write_journal


class ForwardedRequest(NamedTuple):
    """An HTTP request whose body has been read."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None


class Replica:
    """One replica's server; belongs to its event loop."""

    def __init__(self, args: EngineArgs, config: ServerConfig, name: str = "") -> None:
        """`name` is in the header `x-replica` of every answer. With a database the journal is a folder in
        that of `config`, one that no living replica of this machine has: it writes what a dead one left.
        """
        self._headers = [*SECURITY_HEADERS, ("x-replica", name)]
        self._claim: int | None = None
        if config.database is not None:
            folder, self._claim = claim(_journals(config))
            config = replace(config, journal=str(folder))
        self._service = Service(args, config)
        self.app: ASGIApp

    async def start(self) -> None:
        """Start the engine and load its adapters; write into the ledger what dead replicas have left.

        Raises:
            OutriderError: the engine does not start, or an adapter of the options cannot be loaded.
        """
        await self._service.start()
        config, app = self._service.config, self._service.app
        self.app = with_cors(app, config.cors_origins) if config.cors_origins else app
        if self._service.tenancy is not None and config.journal is not None:
            for folder, file in unclaimed(Path(config.journal).parent):
                try:
                    await write_journal(self._service.tenancy.database, folder, config.journal_max_bytes)
                finally:
                    os.close(file)

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[dict[str, Any]]:
        """Messages of the answer. Who closes the iterator has gone away, as a client that hangs up."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=64)
        gone, body = asyncio.Event(), [request.body]

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in self._headers]
                message = {**message, "headers": [*message["headers"], *own]}
            if not gone.is_set():
                await messages.put(dict(message))

        async def run() -> None:
            try:
                await self.app(_scope(request), receive, send)
            finally:
                if not gone.is_set():
                    await messages.put(None)

        work = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            gone.set()
            while not messages.empty():  # a task that waits for room resumes, and finds that there is no reader
                messages.get_nowait()
            with contextlib.suppress(Exception):
                await work

    async def refusal(self, request: ForwardedRequest) -> list[dict[str, Any]] | None:
        """Messages of the answer to a request whose key is wrong, and whose body has not been read; None: the key is
        right."""
        principal = principal_in(Headers(raw=request.headers), self._service.app.state.authenticator)
        return None if isinstance(principal, Principal) else [message async for message in self.answer(request)]

    async def stats(self) -> dict[str, Any]:
        """Facts for routers: `ready`, the `adapters` that the device holds as clients name them, and `slots`, how many
        fit."""
        llm = self._service.llm
        found: dict[str, Any] = {"ready": self._service.app.state.serving.state == "ready", "adapters": [], "slots": 0}
        try:
            if llm.info.enable_lora:
                held = [info.name for info in await llm.adapters.list() if info.level == "device"]
                found |= {"adapters": [split_engine_name(name)[1] for name in held], "slots": llm.info.max_loras}
        except OutriderError:  # the engine has just died
            found["ready"] = False
        return found

    async def kv_usage(self) -> float:
        """Share of the KV blocks in use; 0 while there is no engine."""
        try:
            return (await self._service.llm.stats()).kv_cache_usage
        except OutriderError:
            return 0.0

    def check(self) -> None:
        """Raise EngineDeadError when the engine has died and cannot be started again."""
        if self._service.llm.state == "stopped":
            raise EngineDeadError(f"the engine could not be restarted: {self._service.llm.failure}")

    async def stop(self) -> None:
        """Refuse new requests, let the running ones finish, and end the engine."""
        try:
            await self._service.drain()
        finally:
            await self._service.close()
        if self._claim is not None:
            os.close(self._claim)


def _journals(config: ServerConfig) -> Path:
    from ..tenancy.database.connection import Database, parse_url

    if config.journal is not None:
        return Path(config.journal)
    assert config.database is not None
    return default_journal(Database(parse_url(config.database)))


def claim(root: Path) -> tuple[Path, int]:
    """(first of the folders 0, 1, 2, ... in `root` that no other process has, the open file that keeps it)."""
    for number in itertools.count():
        folder = root / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _claimed(folder)
        if file is not None:
            return folder, file
    raise AssertionError("numbers do not end")


def unclaimed(root: Path) -> Iterator[tuple[Path, int]]:
    """The other folders of `root` that no process has, each with the open file that keeps it now; to be closed."""
    for folder in sorted(root.iterdir()):
        if folder.name.isdigit():
            file = _claimed(folder)
            if file is not None:
                yield folder, file


def _claimed(folder: Path) -> int | None:
    file = os.open(folder / "claim", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _scope(request: ForwardedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
        "state": {},
    }
