"""Small HTTP/1.1 client for measurements. It shares the machine with the server, so a chunk must cost little.

httptools parses. A body's bytes go to a callback at once, with their time of arrival. Connections are kept alive.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from ....core.errors import InvalidRequestError

OnBody = Callable[[float, bytes], None]
"""Callback with the time of arrival of a body's bytes, and the bytes."""
_CONNECT_TIMEOUT = 30.0
_READ_BYTES = 1 << 16


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


class _Answer:
    """One answer, as httptools parses it."""

    def __init__(self, on_body: OnBody) -> None:
        self.parser: Any = httptools.HttpResponseParser(self)
        self.now = 0.0
        """Arrival of the bytes that are parsed."""
        self.ends_with_connection = False
        self.is_complete = False
        self.keeps_alive = False
        self._on_body = on_body

    def on_message_begin(self) -> None:
        """Begin an answer: its body ends with the connection unless a header says otherwise."""
        self.ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header; only those that give the body's end matter."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.ends_with_connection = False

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._on_body(self.now, body)

    def on_message_complete(self) -> None:
        """End the answer, unless it says that the real one follows (status 100)."""
        self.is_complete = self.parser.get_status_code() >= 200
        self.keeps_alive = self.is_complete and self.parser.should_keep_alive()


class HttpClient:
    """Client of one server. It belongs to the event loop that it is used in."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
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
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, path: str) -> Response:
        """GET a path below the base URL; RequestFailed without an answer."""
        body = bytearray()
        status = await self._exchange("GET", path, b"", lambda _, data: body.extend(data))
        return Response(status, bytes(body))

    async def stream(self, path: str, body: bytes, on_body: OnBody) -> int:
        """POST JSON and pass the answer's bytes to `on_body`. Returns the status; RequestFailed without an answer."""
        return await self._exchange("POST", path, body, on_body)

    async def _exchange(self, method: str, path: str, body: bytes, on_body: OnBody) -> int:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        reader, writer = await self._connect()
        answer = _Answer(on_body)
        try:
            writer.write(head.encode() + b"\r\n" + body)
            await _read(reader, answer)
        finally:
            if answer.keeps_alive:
                self._idle.append((reader, writer))
            else:
                writer.transport.abort()
        return int(answer.parser.get_status_code())

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                return await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise RequestFailed(f"cannot connect to {self._host}:{self._port}: {error or 'timed out'}") from None

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()


async def _read(reader: asyncio.StreamReader, answer: _Answer) -> None:
    """Read an answer to its end; RequestFailed when there is no whole one."""
    while not answer.is_complete:
        try:
            data = await reader.read(_READ_BYTES)
        except OSError as error:
            raise RequestFailed(f"the connection was lost: {error}") from None
        if not data:
            if answer.ends_with_connection:
                return
            raise RequestFailed("the server closed the connection")
        answer.now = time.perf_counter()
        try:
            answer.parser.feed_data(data)
        except Exception as error:
            answer.keeps_alive = False
            if not answer.is_complete:  # else only what follows the answer is wrong
                raise RequestFailed(f"not a readable answer: {error!r}") from None
