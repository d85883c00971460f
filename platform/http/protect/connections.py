"""One client's connection, with bounds on what it may cost.

uvicorn's protocol takes any number of connections, headers of any size, and waits forever for a request to arrive or
an answer to be fetched. This one refuses, in the shape of every other error, and closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ...core.errors import OverloadedError
from .error_responses import error_json, error_response

logger = logging.getLogger(__name__)

MAX_URL_BYTES = 16 << 10
MAX_HEADER_BYTES = 64 << 10
"""Largest size of all header names and values of one request."""
MAX_HEADERS = 128
MAX_PIPELINED = 8
"""Requests that may wait on one connection behind the one that is answered."""
MAX_REFUSED = 1024
"""Connections above the bound that are held until they have their refusal; more are dropped without one."""
MAX_DISCARDED_BYTES = 64 << 20
"""Bytes that a client may still send of a body after it was answered."""
MIN_BODY_RATE = 16 << 10
"""Bytes a second that earn a body more time."""
MIN_TAKEN_BYTES = 1024
"""Bytes of an answer that a client must fetch within the timeout; a system's window updates are larger."""
_READ_BYTES = 256 << 10
"""Largest number of bytes that arrive in one piece."""
_REFUSED_SECONDS = 5.0
"""Seconds for a connection above the bound to send its request."""
_STANDSTILL_SECONDS = 5.0
"""Seconds between two checks of a connection after which this process itself was stopped, and no client is to blame."""
LINGER_SECONDS = 2.0
"""Seconds for a client to read its answer and close, after we have closed our side."""
_PROBES = ("/health", "/ping", "/version")
"""Paths that are answered above the bound too: a full server is a healthy one."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """Count of connections; one object a server."""

    max_connections: int
    client_timeout: float
    """Seconds without enough progress, in either direction."""
    num_open: int = 0
    num_refused: int = 0
    """Connections above the bound that have not closed yet."""
    total_refused: int = 0
    total_dropped: int = 0
    """Connections closed because the client was too slow, in either direction."""


class _Refusal(Exception):
    """Refusal of a request: carries the answer out of a parser's callback."""

    def __init__(self, status: HTTPStatus, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = json.dumps(error_json(message, kind)).encode()


class ClientTransport:
    """Stand-in for asyncio's transport.

    To close a connection while the client still sends makes the system reset it, and the answer is lost with what was
    not read. So our side is closed first, and the rest when the client has closed its own (RFC 9112, 9.6).
    """

    def __init__(self, transport: Any, is_arriving: Callable[[], bool]) -> None:
        """`is_arriving` returns True while the client is in the middle of a request."""
        self._transport = transport
        self._is_arriving = is_arriving
        self._lingering_since: float | None = None
        self.written = 0
        """Bytes handed over, whether they have left or not."""

    def write(self, data: bytes) -> None:
        """See asyncio."""
        if self._lingering_since is None:
            self.written += len(data)
            self._transport.write(data)

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._lingering_since is not None or self._transport.is_closing()

    def close(self) -> None:
        """Close when all that was written has left and the client has read it."""
        if self.is_closing():
            return
        if not self._is_arriving():
            self._transport.close()
            return
        self._lingering_since = asyncio.get_running_loop().time()
        self._transport.write_eof()
        self._transport.resume_reading()

    def lingers_too_long(self, now: float) -> bool:
        """True when the client should have closed its side by now."""
        return self._lingering_since is not None and now - self._lingering_since > LINGER_SECONDS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """HTTP/1.1 of uvicorn with limits. `check` must be called about once a second."""

    transport: Any  # a ClientTransport

    def __init__(self, *args: Any, admission: Admission, **options: Any) -> None:
        super().__init__(*args, **options)
        self._admission = admission
        self._admitted = True
        self._routes = self.app
        self._answering: RequestResponseCycle | None = None  # uvicorn's `cycle` is that of the newest request
        self._begun = False  # in the middle of a request
        self._in_headers = True  # or before them
        self._has_host = False  # among the headers so far
        self._waiting_since: float | None = None  # for a request to arrive; None between two requests
        self._arrived = 0  # bytes, since the last request was complete
        self._header_bytes = 0
        self._taken = 0  # bytes of answers that the system has taken over, when that last was enough
        self._taken_at = self._checked_at = 0.0
        self._discarded = 0

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        super().connection_made(ClientTransport(transport, lambda: self._begun))  # type: ignore[arg-type]
        _notice_dead_peers(transport.get_extra_info("socket"), self._admission.client_timeout)
        self._waiting_since = self._taken_at = self._checked_at = self.loop.time()
        admission = self._admission
        self._admitted = admission.num_open < admission.max_connections
        if self._admitted:
            admission.num_open += 1
            return
        admission.num_refused += 1
        admission.total_refused += 1
        self.app = self._answer_full
        if admission.num_refused > MAX_REFUSED:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._admitted:
            self._admission.num_open -= 1
        else:
            self._admission.num_refused -= 1
        if isinstance(exc, TimeoutError):  # the system's, see `_notice_dead_peers`
            self._admission.total_dropped += 1
        self._hang_up()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        """Notify all requests of this connection that the client is gone."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._answering, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    async def _answer_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a connection above the bound."""
        if scope["path"] in _PROBES:
            await self._routes(scope, receive, send)
            return
        limit = self._admission.max_connections
        error = OverloadedError(f"The server has {limit} connections open already (max_connections)")
        await error_response(error)(scope, receive, send)

    # --- what arrives ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._unset_keepalive_if_required()
        self._arrived += len(data)
        closing = self.transport.is_closing()
        if closing or self._is_answered():
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
        if closing or self._discarded > MAX_DISCARDED_BYTES:
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # To a protocol that is not spoken here: the request is answered as it is (RFC 9110, 7.8), and what follows
            # it cannot be distinguished from the other protocol.
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError as error:
            reason = error.__context__
            if not isinstance(reason, _Refusal):
                reason = _Refusal(HTTPStatus.BAD_REQUEST, "BadRequestError", "This is not a valid HTTP request")
            self._refuse(reason)
        else:
            # The rest of a header that does not end is the parser's, which reports nothing of it.
            if self._in_headers and self._arrived > MAX_URL_BYTES + MAX_HEADER_BYTES + _READ_BYTES:
                self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._waiting_since = self.loop.time()
        self._begun = self._in_headers = True
        self._has_host = False
        self._header_bytes = self._discarded = 0

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            limit = f"The URL is longer than {MAX_URL_BYTES} bytes"
            raise _Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, "BadRequestError", limit)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if not self._in_headers:
            return  # a trailer: taken for a header it would have bypassed a proxy that checks headers
        super().on_header(name, value)
        if name.lower() == b"host":
            if self._has_host:  # a proxy in front may have judged by the other one (RFC 9112, 3.2)
                raise _Refusal(HTTPStatus.BAD_REQUEST, "BadRequestError", "A request has one Host header")
            self._has_host = True
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            raise _headers_too_large()

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._in_headers = False
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "BadRequestError", "Too many requests without waiting for answers")
        super().on_headers_complete()
        if not self._admitted:
            self.cycle.keep_alive = False
        if not self.pipeline:
            self._answering = self.cycle

    def on_message_complete(self) -> None:
        """See httptools."""
        self._waiting_since = None
        self._begun, self._in_headers = False, True
        self._arrived = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn: begins with the next request."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def _is_answered(self) -> bool:
        """True when the request whose body arrives has been answered already."""
        return self._begun and not self._in_headers and self.cycle.response_complete

    def _refuse(self, refusal: _Refusal) -> None:
        """Answer and close; only close if another answer is being sent."""
        logger.info("refused a request of %s: %s", self.client, refusal)
        answering = self._answering
        if self.pipeline or (answering and answering.response_started and not answering.response_complete):
            self.transport.abort()
            return
        self._hang_up()
        lines = [STATUS_LINE[refusal.status]]
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(refusal.body)).encode()),
            (b"connection", b"close"),
        ]
        lines += [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join([*lines, b"\r\n", refusal.body]))
        self.transport.close()

    # --- time -----------------------------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """Close the connection if the client has used up its time; `now` is the loop's."""
        stood_still = now - self._checked_at > _STANDSTILL_SECONDS
        self._checked_at = now
        if stood_still:
            self._taken_at = now
            self._waiting_since = None if self._waiting_since is None else now
        elif self.transport.lingers_too_long(now):
            self.transport.abort()
        elif self._takes_nothing(now):
            logger.info("%s does not fetch its answer: closed", self.client)
            self._admission.total_dropped += 1
            self.transport.abort()
        elif self._is_late(now):
            self._end_late_request()

    def _takes_nothing(self, now: float) -> bool:
        unsent = self.transport.get_write_buffer_size()
        taken = self.transport.written - unsent
        if unsent == 0 or taken >= self._taken + MIN_TAKEN_BYTES:
            self._taken, self._taken_at = taken, now
        return now - self._taken_at > self._admission.client_timeout

    def _is_late(self, now: float) -> bool:
        if self._waiting_since is None or self.transport.is_closing():
            return False
        if self.flow.read_paused:  # it is us who do not read
            self._waiting_since = now
        allowed = self._admission.client_timeout + (0 if self._in_headers else self._arrived / MIN_BODY_RATE)
        if not self._admitted:
            allowed = min(allowed, _REFUSED_SECONDS)
        return now - self._waiting_since > allowed

    def _end_late_request(self) -> None:
        if not self._begun or self._is_answered():
            self.transport.abort()  # it has asked for nothing, or has its answer
            return
        self._admission.total_dropped += 1
        message = f"The request did not arrive within {self._admission.client_timeout:g} s"
        self._refuse(_Refusal(HTTPStatus.REQUEST_TIMEOUT, "RequestTimeout", message))


def _headers_too_large() -> _Refusal:
    message = f"At most {MAX_HEADERS} header fields of {MAX_HEADER_BYTES} bytes in all are taken"
    return _Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "BadRequestError", message)


def _notice_dead_peers(client: Any, seconds: float) -> None:
    """Have the system end connections whose peer answers nothing any more, or has long had no room for data: data that
    has left our buffers is out of our sight."""
    if client is None:
        return
    whole = max(1, round(seconds))
    options = {"TCP_KEEPIDLE": whole, "TCP_KEEPINTVL": max(1, whole // 4), "TCP_USER_TIMEOUT": 2000 * whole}
    try:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):  # not on every system
                client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError:
        logger.debug("the options of a connection cannot be set", exc_info=True)


def check_all(connections: set[Any]) -> None:
    """`Connection.check` for all of a server's connections."""
    now = asyncio.get_running_loop().time()
    for connection in list(connections):
        connection.check(now)
