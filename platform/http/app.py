"""The ASGI application: routes, and around them the gate that every request passes."""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import TYPE_CHECKING
from uuid import uuid4

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ..core.errors import AuthenticationError
from . import chat, completions, health, models, tokens
from .config import ServerConfig
from .errors import ClientDisconnectedError, error_response, install_error_handlers, internal_error_response
from .serving import IS_ADMIN, Serving, valid_request_id

if TYPE_CHECKING:
    from ..client.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_GUARDED = ("/v1", "/tokenize", "/detokenize")


def create_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """The application in front of `llm`, which need not have started yet; `app.state.serving` is its shared state."""
    app = FastAPI(title="Outrider", version=__version__, redirect_slashes=False)
    app.state.serving = Serving(llm, config)
    for module in (chat, completions, models, tokens, health):
        app.include_router(module.router)
    install_error_handlers(app)
    app.add_middleware(Gate, api_keys=config.api_keys, admin_api_keys=config.admin_api_keys)
    return app


class Gate:
    """Checks the API key, gives every answer its `X-Request-Id`, and turns what nobody caught into a plain 500.

    What only an admin may do is checked by its route (`require_admin`); here it is found out who is one.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], admin_api_keys: tuple[str, ...] = ()) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._admin_digests = [_digest(key.encode()) for key in admin_api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not valid_request_id(request_id):
            request_id = uuid4().hex
        header = (b"x-request-id", request_id.encode("latin-1"))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], header]
            await send(message)

        is_admin = self._has_key(headers, self._admin_digests)
        scope.setdefault("state", {})[IS_ADMIN] = is_admin or not self._admin_digests
        if self._guards(scope["path"]) and not (is_admin or self._has_key(headers, self._digests)):
            response = error_response(AuthenticationError("The API key is missing or wrong"))
            await response(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            logger.debug("request %s: the client has gone", request_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if started:
                raise  # the connection is closed: an answer that has begun cannot become another one
            await internal_error_response()(scope, receive, send_with_id)

    def _guards(self, path: str) -> bool:
        return bool(self._digests) and path.startswith(_GUARDED)

    @staticmethod
    def _has_key(headers: Headers, digests: list[bytes]) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode())
        # All keys are compared, and digests have one length: the time says nothing about a key.
        matches = [hmac.compare_digest(digest, known) for known in digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
