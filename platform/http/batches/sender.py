"""Sender of lines to the server's application in this process, which retries what is refused for a time or aborted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.text import shorten
from ..protect.acting import ACTING, Acting
from .lines import LineRequest

if TYPE_CHECKING:
    import httpx

MAX_TRIES = 8
"""Tries of a line whose request may itself be what fails, such as one whose adapter's store is away; of one whose
adapter was replaced (409), and of one that is aborted each time."""
MAX_DEATHS = 3
"""Tries of a line during which the engine died: it may be what kills it, for everybody."""
MAX_WAIT = 60.0
"""Longest time in seconds between two tries: a tenant's limits may be raised meanwhile."""
_PASSING = frozenset(
    ("OverloadedError", "ServiceUnavailableError", "EngineAsleep", "RequestAborted", "ShuttingDownError")
)
"""Types of errors with status 503 that say nothing about the request. In Anthropic's form all have one type."""

_acting: ContextVar[Acting | None] = ContextVar("acting", default=None)


class Sender:
    """Client of the application. Use it as a context."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        turn: Callable[[], AbstractAsyncContextManager[Acting | None]] = contextlib.nullcontext,
        max_waits: int | None = None,
    ) -> None:
        """
        Args:
            turn: a context that each try is made in, and no pause; it says on whose behalf. None: that of a client
                without a key.
            max_waits: tries that the server's state may cost a line; None: any number.
        """
        self._app = app
        self._turn = turn
        self._max_waits = max_waits
        self._resume_at = 0.0
        self._client: httpx.AsyncClient

    async def __aenter__(self) -> Sender:
        import httpx

        transport = httpx.ASGITransport(self._as_principal, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def _as_principal(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, ACTING: _acting.get()}, receive, send)

    async def send(self, request: LineRequest, request_id: str) -> httpx.Response:
        """The answer to a request, once there is one that does not depend on the moment. When one line has to wait,
        all do."""
        loop = asyncio.get_running_loop()
        tries = waits = deaths = 0
        headers = {"content-type": "application/json", "x-request-id": request_id}
        while True:
            while (pause := self._resume_at - loop.time()) > 0:
                await asyncio.sleep(pause)
            async with self._turn() as acting:
                _acting.set(acting)
                response = await self._client.post(request.url, content=request.body, headers=headers)
            is_aborted = _is_aborted(response)
            if response.status_code not in (409, 429, 503, 529) and not is_aborted:
                return response
            kind = _error_type(response)
            passing = not is_aborted and (response.status_code not in (409, 503) or kind in _PASSING)
            waits += passing
            tries += not passing
            deaths += kind == "EngineDeadError"
            if tries == MAX_TRIES or deaths == MAX_DEATHS or waits == self._max_waits:
                return response
            wait = min(float(response.headers.get("retry-after", 1)), MAX_WAIT)
            if passing:
                self._resume_at = max(self._resume_at, loop.time() + wait)
            else:
                await asyncio.sleep(wait)


def _error_type(response: httpx.Response) -> str:
    """Type of the error that an answer is; "" if it is none of ours."""
    try:
        return str(response.json()["error"]["type"])
    except (ValueError, LookupError, TypeError):
        return ""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Ended(msgspec.Struct):
    """Fields of an answer that show whether it was aborted."""

    choices: list[_Choice] = []
    status: str | None = None


_ENDED = msgspec.json.Decoder(_Ended)


def _is_aborted(response: httpx.Response) -> bool:
    """True for an answer that the server cut off, such as when an operator paused it."""
    try:
        ended = _ENDED.decode(response.content)
    except msgspec.MsgspecError:
        return False
    return ended.status == "cancelled" or any(choice.finish_reason == "abort" for choice in ended.choices)


class _Answer(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _AnswerLine(msgspec.Struct):
    id: str
    custom_id: msgspec.Raw
    response: _Answer | None
    error: dict[str, str] | None


def new_line_id() -> str:
    """An id for an answer's line."""
    return f"batch_req_{secrets.token_hex(16)}"


def answer_line(line_id: str, custom_id: Any, response: httpx.Response) -> bytes:
    """Line of the output for an answer.

    Raises:
        ValueError: the answer is no JSON.
    """
    body = response.content
    if b"\n" in body or not body:
        body = json.dumps(json.loads(body)).encode()
    answer = _Answer(response.status_code, response.headers.get("x-request-id", ""), msgspec.Raw(body))
    return _written(_AnswerLine(line_id, _raw(custom_id), answer, None))


def error_line(line_id: str, custom_id: Any, code: str, message: str) -> bytes:
    """Line of the output for a request without an answer."""
    return _written(_AnswerLine(line_id, _raw(custom_id), None, {"code": code, "message": shorten(message, 1000)}))


def _raw(custom_id: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(custom_id).encode())  # halves of characters stay escaped


def _written(line: _AnswerLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
