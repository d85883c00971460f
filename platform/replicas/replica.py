"""A server without a socket: one call is one HTTP request, and its answer a stream of ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..core.config import EngineArgs
from ..core.errors import EngineDeadError
from ..http.server import Service
from ..http.server_config import ServerConfig


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

    def __init__(self, args: EngineArgs, config: ServerConfig) -> None:
        """With a database the replica's journal is a folder of its own in that of `config`, one that no living replica
        of this machine has: so it writes into the ledger what a dead one has left."""
        self._claim: int | None = None
        if config.database is not None:
            folder, self._claim = claim(_journals(config))
            config = replace(config, journal=str(folder))
        self._service = Service(args, config)

    async def start(self) -> None:
        """Start the engine and load its adapters.

        Raises:
            OutriderError: the engine does not start, or an adapter of the options cannot be loaded.
        """
        await self._service.start()

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
            if not gone.is_set():
                await messages.put(dict(message))

        async def run() -> None:
            try:
                await self._service.app(_scope(request), receive, send)
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
            while not messages.empty():  # whoever waits for room goes on, and finds that nobody listens
                messages.get_nowait()
            with contextlib.suppress(Exception):
                await work

    async def stats(self) -> dict[str, Any]:
        """Facts for routers: `adapters` that the device holds, and `slots`, how many fit."""
        llm = self._service.llm
        if not llm.info.enable_lora:
            return {"adapters": [], "slots": 0}
        held = [info.name for info in await llm.adapters.list() if info.level == "device"]
        return {"adapters": held, "slots": llm.info.max_loras}

    def check(self) -> None:
        """Raise EngineDeadError when the engine has died and cannot be started again."""
        if self._service.llm.state == "stopped":
            raise EngineDeadError(f"the engine could not be restarted: {self._service.llm.failure}")

    async def stop(self) -> None:
        """Refuse new requests, let the running ones finish, and end the engine."""
        await self._service.drain()
        await self._service.close()
        if self._claim is not None:
            os.close(self._claim)


def _journals(config: ServerConfig) -> Path:
    from ..tenancy.database.connection import Database, parse_url
    from ..tenancy.service import default_journal

    if config.journal is not None:
        return Path(config.journal)
    assert config.database is not None
    return default_journal(Database(parse_url(config.database)))


def claim(root: Path) -> tuple[Path, int]:
    """(first of the folders 0, 1, 2, ... in `root` that no other process has, the open file that keeps it)."""
    for number in itertools.count():
        folder = root / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / "claim", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
        else:
            return folder, file
    raise AssertionError("numbers do not end")


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
