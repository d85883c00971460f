"""Small HTTP/1.1 client for measurements. It shares the machine with the server, so a chunk must cost little.

httptools parses. A body's bytes go to a callback at once, with their time of arrival. Connections are kept alive.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from ....core.errors import InvalidRequestError

OnBody = Callable[[float, bytes], None]
"""Callback with the time of arrival of a body's bytes, and the bytes."""


class RequestFailed(Exception):
    """Error of a request without an answer, or with an answer that is an error."""


class Response(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; RequestFailed when it is not."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise RequestFailed(f"the answer is not JSON: {self.body[:80]!r}") from None


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[int] | None = None
        self._now = 0.0
        self._status = 0
        self._ends_with_connection = False
        self.reusable = False

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base

    def data_received(self, data: bytes) -> None:
        """Parse bytes that came."""
        self._now = time.perf_counter()
        if self._parser is None:
            self.close()  # no request is open
            return
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self._fail(f"not a readable answer: {error!r}")

    def connection_lost(self, error: Exception | None) -> None:
        """End the open request: the server has closed the connection."""
        self.reusable = False
        if self._ends_with_connection:
            self._finish()
        self._fail(f"the connection was lost: {error}" if error else "the server closed the connection")

    # --- httptools

    def on_message_begin(self) -> None:
        """Begin an answer."""
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header; only those that give the body's end matter."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """Keep the status."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        if self._on_body is not None:
            self._on_body(self._now, body)

    def on_message_complete(self) -> None:
        """End the answer."""
        if self._status >= 200:  # 100: the real answer follows
            self.reusable = bool(self._parser.should_keep_alive())
            self._finish()

    # --- requests

    async def request(self, message: bytes, on_body: OnBody) -> int:
        """Send a request and wait for the end of the answer; returns its status.

        Raises:
            RequestFailed: there is no whole answer.
        """
        assert self._transport is not None
        self._on_body, self.reusable, self._ends_with_connection = on_body, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise RequestFailed("the server closed the connection")
        self._transport.write(message)
        try:
            return await self._done
        finally:
            self._on_body = self._done = self._parser = None

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RequestFailed(reason))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Client of one server. It belongs to the event loop that it is used in."""

    def __init__(self, base_url: str, api_key: str | None = None, connect_timeout: float = 30.0) -> None:
        """Raise InvalidRequestError when `base_url` is no URL of HTTP."""
        try:
            parts = urlsplit(base_url)
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise InvalidRequestError(f"not a URL: {error}", param="base_url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"must be http://HOST:PORT or https://..., got {base_url!r}", param="base_url")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequestError("must not hold a user or password, which results would show", param="base_url")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        headers = [f"Host: {parts.netloc}", "User-Agent: outrider-bench", "Accept: */*"]
        if api_key:
            headers.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(headers)
        self._connect_timeout = connect_timeout
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """GET a path below the base URL; RequestFailed without an answer."""
        return await self._whole(self._message("GET", path, b""))

    async def stream(self, path: str, body: bytes, on_body: OnBody) -> int:
        """POST JSON and pass the answer's bytes to `on_body`. Returns the status; RequestFailed without an answer."""
        connection = await self._connect()
        try:
            return await connection.request(self._message("POST", path, body), on_body)
        finally:
            self._release(connection)

    async def _whole(self, message: bytes) -> Response:
        body = bytearray()
        connection = await self._connect()
        try:
            status = await connection.request(message, lambda _, data: body.extend(data))
        finally:
            self._release(connection)
        return Response(status, bytes(body))

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise RequestFailed(f"cannot connect to {self._host}:{self._port}: {error or 'timed out'}") from None
        return connection

    def _release(self, connection: _Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
