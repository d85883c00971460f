"""Error answers of the server: `{"error": {"message", "type", "param", "code"}}`, or Anthropic's form on its routes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from ...core.adapter_names import public_text
from ...core.errors import AuthenticationError, InvalidRequestError, OutriderError, OverloadedError, RateLimitError
from ...core.text import shorten
from ..anthropic import errors as anthropic
from ..observe.request_log import current_log, log_error
from .paths import is_to_come

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000
"""Characters of a message. What it quotes of a request is shorter, wherever our own code writes it; this is for texts
of libraries, such as a template's error."""
_LONGEST_HINT = 200
"""Characters of a path above which an error does not say which one was meant."""
INTERNAL_MESSAGE = "The server failed to answer this request; its log says more."
_CODES = {
    ("NotFoundError", "model"): "model_not_found",
    ("AuthenticationError", None): "invalid_api_key",
}
_ADAPTER_FIELDS = ("lora_name", "lora_path", "lora_request", "draft_path")
"""Fields of a call that loads an adapter, which errors of the engine name. A request that uses the adapter has named it
elsewhere."""
_CODES_BY_TYPE = {"ContextLengthExceeded": "context_length_exceeded"}
_TYPES_BY_STATUS = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    413: "RequestTooLarge",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def error_json(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of every error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


INTERNAL_ERROR = error_json(INTERNAL_MESSAGE, OutriderError.type)


class BodyTooLargeError(OutriderError):
    """The request's body is longer than the server takes."""

    type = "RequestTooLarge"
    status = 413


class EngineUnavailableError(OutriderError):
    """The engine is starting or restarting."""

    type = "ServiceUnavailableError"
    status = 503


class ClientDisconnectedError(Exception):
    """The client has closed its connection; this error never leaves the server."""


def error_body(error: OutriderError) -> dict[str, Any]:
    """The JSON of `error`."""
    kind = type(error).type
    param, log = error.param, current_log()
    if param in _ADAPTER_FIELDS and log is not None and log.model_field:
        param = log.model_field
    code = _CODES.get((kind, param), _CODES_BY_TYPE.get(kind))
    if isinstance(error, RateLimitError):
        code = error.code
    param = None if param is None else shorten(param)
    message = shorten(public_text(error.message), MAX_MESSAGE)
    return error_json(message, kind, param, code)


def retry_after(error: OutriderError) -> str:
    """Whole seconds after which trying again makes sense: as long as a limit needs, soon if a queue is full, later
    while a process starts."""
    if isinstance(error, RateLimitError):
        return str(max(1, math.ceil(error.retry_after)))
    return "1" if isinstance(error, OverloadedError) else "5"


def error_headers(error: OutriderError) -> dict[str, str]:
    """Headers that go with the error's status."""
    if error.status in (429, 503):
        extra = error.headers if isinstance(error, RateLimitError) else {}
        return {"Retry-After": retry_after(error), **extra}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def error_response(error: OutriderError) -> Response:
    """The HTTP answer for `error`. The message of an untyped one is kept inside."""
    log_error(type(error).type, error.param if isinstance(error, RateLimitError) else None)
    if error.status >= 500 and type(error) is OutriderError:
        logger.error("internal error: %s", error.message)
        return internal_error_response()
    return _response(error_body(error), error.status, error_headers(error))


def _response(body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with an error in the form of its route."""
    log = current_log()
    if log is not None and log.is_anthropic:
        body, status = anthropic.in_form(body, status)
    return JSONResponse(body, status, dict(headers) if headers else None)


def internal_error_response() -> Response:
    """Answer with status 500 that reveals nothing about the server's internals."""
    log_error(OutriderError.type)
    return _response(INTERNAL_ERROR, 500)


def error_content(error: Exception) -> dict[str, Any]:
    """The JSON for an error in the middle of a stream."""
    log_error(type(error).type if isinstance(error, OutriderError) else OutriderError.type)
    if isinstance(error, OutriderError) and type(error) is not OutriderError:
        return error_body(error)
    return INTERNAL_ERROR


def plain_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer for an error that the web framework found: an unknown route, a wrong method."""
    kind = _TYPES_BY_STATUS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    log_error(kind)
    return _response(error_json(message, kind), status, headers)


def _meant_path(request: Request) -> str | None:
    """Path of the route that a client with a wrong base URL wanted: "/v1" is missing, or something precedes it."""
    path = request.url.path
    for meant in (f"/v1{path}", path[path.rfind("/v1/") :]):
        if meant.startswith("/v1/") and meant != path and len(meant) <= _LONGEST_HINT:
            scope = {**request.scope, "path": meant, "root_path": ""}
            if any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes):
                return meant
    return None


def install_error_handlers(app: FastAPI) -> None:
    """Give every error that a route raises its shape."""

    async def on_typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, OutriderError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405) and is_to_come(request.url.path):
            message = f"{shorten(request.url.path)} is not implemented by this server"
            return plain_response(501, message, {"x-should-retry": "false"})  # OpenAI's clients try a 5xx again
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {shorten(request.url.path)}"
        if error.status_code == 404 and (meant := _meant_path(request)) is not None:
            message += f"; the API's paths are under /v1, this one is {meant}: check the client's base URL"
        return plain_response(error.status_code, message, error.headers)

    async def on_parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = shorten(".".join(str(part) for part in first["loc"][1:]))
        return error_response(InvalidRequestError(f"{field}: {first['msg']}", param=field))

    app.add_exception_handler(OutriderError, on_typed)
    app.add_exception_handler(RequestValidationError, on_parameters)
    app.add_exception_handler(HTTPException, on_http)
