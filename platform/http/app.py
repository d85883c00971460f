"""The ASGI application: routes, and around them the layers that every request passes."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from uuid import uuid4

from fastapi import APIRouter, Depends, FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ... import __version__
from ..core.errors import AuthenticationError, NotFoundError, OutriderError
from ..core.logs import current_request_id
from ..tenancy.accounts.authenticator import Authenticator, StaticKeys
from ..tenancy.accounts.principal import Principal
from . import engine_routes, weight_routes
from .adapters import adapter_routes
from .anthropic import messages_routes
from .anthropic.errors import is_anthropic
from .batches import batch_routes
from .console import console_routes
from .console.statistics import Statistics
from .files import file_routes
from .observe import health, server_info
from .observe.request_log import Observer
from .openai import chat, completions, embeddings, model_routes, tokenize
from .openai.responses import routes as responses
from .openai.tokens import derender, generate, render
from .protect.acting import acting_in
from .protect.error_responses import (
    ClientDisconnectedError,
    error_response,
    install_error_handlers,
    internal_error_response,
)
from .protect.open_routes import is_open
from .protect.paths import Paths
from .server_config import ServerConfig
from .serving_state import HELD_BODY, PRINCIPAL, Serving, require_admin, shutting_down, valid_request_id

if TYPE_CHECKING:
    from ..client.async_llm import AsyncLLM
    from ..tenancy.service import Tenancy

logger = logging.getLogger(__name__)

_POLICY_VIOLATION = 1008
"""Code with which a WebSocket is closed (RFC 6455, 7.4.1); before it is accepted the client sees a 403."""


def create_app(
    llm: AsyncLLM, config: ServerConfig, authenticator: Authenticator | None = None, tenancy: Tenancy | None = None
) -> FastAPI:
    """The application in front of `llm`, which need not have started yet; `app.state.serving` is its shared state.
    API keys are checked by the first of: the authenticator, `tenancy`, `config`."""
    # No pages for the OpenAPI document: FastAPI's run scripts of other sites, at the console's origin.
    app = FastAPI(title="Outrider", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    app.state.serving = Serving(llm, config, tenancy)
    app.state.statistics = Statistics(app.state.serving)
    apis = (chat, completions, responses, embeddings, messages_routes, tokenize, generate, render, derender)
    operators = (model_routes, adapter_routes, engine_routes, weight_routes, server_info, health)
    for module in (*apis, file_routes, batch_routes, *operators, console_routes):
        app.include_router(module.router)
    app.include_router(_admin_routes(tenancy))
    install_error_handlers(app)
    if authenticator is None:
        authenticator = tenancy.directory if tenancy else StaticKeys(config.api_keys, config.admin_api_keys)
    app.state.authenticator = authenticator
    app.add_middleware(Authentication, authenticator=authenticator)
    app.add_middleware(Observer, serving=app.state.serving)
    app.add_middleware(Paths)
    return app


def _admin_routes(tenancy: Tenancy | None) -> APIRouter:
    """Routes of `/admin/v1`. On a server with tenants they need the database's packages, which no other server should
    load; there each answers that there are no tenants."""
    if tenancy is not None:
        from .admin.admin_routes import router

        return router
    router = APIRouter(prefix="/admin/v1", dependencies=[Depends(require_admin)], include_in_schema=False)

    @router.api_route("/{path:path}", methods=["GET", "POST", "PATCH", "DELETE"])
    async def no_tenants() -> None:
        raise NotFoundError("This server runs without tenants: start it with --database")

    return router


class AnswerCutError(Exception):
    """An answer failed after its first bytes were sent; the log says why."""


class Authentication:
    """Layer that every request passes: it finds the principal, refuses those without one unless the route is open
    (`open_routes`), gives every answer its `X-Request-Id`, and turns uncaught exceptions into a plain 500.

    What only an admin may do is checked by its route (`require_admin`).
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route speaks another protocol
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not valid_request_id(request_id):
            request_id = uuid4().hex
        current_request_id.set(request_id)
        names = (b"x-request-id", b"request-id") if is_anthropic(scope) else (b"x-request-id",)
        id_headers = [(name, request_id.encode("latin-1")) for name in names]
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *id_headers]
            await send(message)

        acting = acting_in(scope)
        principal = principal_in(headers, self._authenticator) if acting is None else acting.principal
        if isinstance(principal, OutriderError) and not is_open(scope):
            await error_response(principal)(scope, receive, send_with_id)
            return
        state = scope.setdefault("state", {})
        state[PRINCIPAL] = None if isinstance(principal, OutriderError) else principal
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            logger.debug("request %s: the client has gone", request_id)
        except asyncio.CancelledError:
            if started or not scope["app"].state.serving.draining:
                raise
            # The shutdown does not wait longer, for a load or the check of a constraint: that is no failure.
            await error_response(shutting_down())(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if started:
                # An answer that has begun cannot become another one: the connection is closed. Without the cause, which
                # may quote the prompt: the HTTP server logs it when the request's context is gone.
                raise AnswerCutError from None
            await internal_error_response()(scope, receive, send_with_id)
        finally:
            if HELD_BODY in state:
                state[HELD_BODY].close()


def principal_in(headers: Headers, authenticator: Authenticator) -> Principal | OutriderError:
    """The principal that a request's headers name, or the error that refuses them."""
    try:
        principal = authenticator.authenticate(key_in(headers))
    except OutriderError as error:
        return error
    return AuthenticationError("The API key is missing or wrong") if principal is None else principal


def key_in(headers: Headers) -> str:
    """The bearer token, or the key as Anthropic's clients send it; "" without either."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
