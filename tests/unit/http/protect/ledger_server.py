"""A server with tenants and its bare clients, for the tests of the ledger."""

import asyncio
import json

import httpx
from sqlalchemy import select

from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.service import Tenancy

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
SAID = [{"role": "user", "content": "x"}]
BODIES = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": SAID}, MESSAGES: {"messages": SAID, "max_tokens": 9}}


class Server:
    def __init__(self, llm, tenancy: Tenancy, key: str) -> None:
        self.tenancy, self.llm = tenancy, llm
        self.app = create_app(llm, ServerConfig(served_model_names=("base",)), tenancy=tenancy)
        self.headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://test", headers=self.headers,
        )  # fmt: skip

    def rows(self) -> list:
        with self.tenancy.database.read() as connection:
            return connection.execute(select(usage)).all()

    async def row(self):
        """The only one; no test has waited for it."""
        async with asyncio.timeout(30):
            while not self.rows():
                await asyncio.sleep(0.005)
        (row,) = self.rows()
        return row


class Client:
    """A bare ASGI client: can hang up, and sees whether there is a row when it gets each part of the answer."""

    def __init__(self, server: Server, path: str, **body) -> None:
        headers = [(b"content-type", b"application/json")]
        headers += [(name.lower().encode(), value.encode()) for name, value in server.headers.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.server = server
        self.received: list[tuple[bytes, int]] = []  # body, rows in the database by then
        self.hung_up = asyncio.Event()
        content = json.dumps(BODIES[path] | body).encode()
        self._messages = [{"type": "http.request", "body": content, "more_body": False}]
        self.task = asyncio.create_task(server.app(scope, self._receive, self._send))

    async def _receive(self):
        if self._messages:
            return self._messages.pop()
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.body":
            self.received.append((message["body"], len(self.server.rows())))

    async def hang_up(self) -> None:
        self.hung_up.set()
        await self.task


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
