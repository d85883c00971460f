"""Reader of request bodies: size limit, strict JSON, validation, with errors that name the field."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from ...core.errors import InvalidRequestError
from ...core.text import shorten
from ..protect.error_responses import BodyTooLargeError, ClientDisconnectedError
from ..serving_state import HELD_BODY, serving_of
from .body_memory import HeldBody, give_back_memory
from .bounds import check_fields, check_shape
from .lenient import adapt

ModelT = TypeVar("ModelT", bound=BaseModel)

_LONG_BODY = 16 << 10
"""Bytes of a body that is read in about a millisecond; a longer one is read in a thread."""
_HUGE_BODY = 1 << 20
"""Bytes of a body after which freed memory is given back to the system."""
_SOON = 0.5
"""Seconds from a huge body to giving back its memory."""
_PARSER = ThreadPoolExecutor(1, "read-body")
"""Thread that reads long bodies. One alone: reading holds Python's lock, and each thread would keep memory of its
own."""


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a route whose body is `model`: routes read their bodies themselves."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inline(definitions[value["$ref"].rpartition("/")[2]])
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"required": True, "content": content}}


def has_body(request: Request) -> bool:
    """True when the request brings a body, for routes that can do without."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


async def read_body(request: Request, model: type[ModelT]) -> ModelT:
    """The request's body as `model`; `read_waiting_body` for one that may have to wait."""
    with contextlib.closing(serving_of(request).bodies.body()) as held:
        return await _read_body(request, model, held)


async def read_waiting_body(request: Request, model: type[ModelT]) -> tuple[ModelT, HeldBody]:
    """Read and validate a body whose memory counts until admission closes it, or the request ends."""
    held = serving_of(request).bodies.body()
    request.scope["state"][HELD_BODY] = held
    return await _read_body(request, model, held), held


async def _read_body(request: Request, model: type[ModelT], held: HeldBody) -> ModelT:
    """
    Raises:
        BodyTooLargeError: longer than the server takes.
        OverloadedError: too many long bodies arrive, or wait, at once.
        InvalidRequestError: not JSON, not an object, out of bounds, a field that is not implemented, or a wrong type;
            `param` names the field.
    """
    _check_content_type(request)
    serving = serving_of(request)
    raw = await _read(request, serving.config.max_body_bytes, held)
    await check_shape(raw, model, serving.max_values)
    strict = serving.config.strict_fields
    if len(raw) <= _LONG_BODY:
        return _parse(raw, model, strict)
    loop = asyncio.get_running_loop()
    if len(raw) > _HUGE_BODY:  # an error holds what was parsed until it has been answered
        loop.call_later(_SOON, loop.run_in_executor, _PARSER, give_back_memory)
    return await loop.run_in_executor(_PARSER, copy_context().run, _parse, raw, model, strict)


def _parse(raw: bytearray, model: type[ModelT], strict: bool) -> ModelT:
    try:
        content = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError("The body must be a JSON object")
    return validated(content, model, strict=strict)


def validated(content: dict[str, Any], model: type[ModelT], *, strict: bool) -> ModelT:
    """An object of a body as `model`; it may be changed. Errors as of `read_body`."""
    check_fields(content, model)
    adapt(content, model, strict=strict)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise describe(error) from None


def _check_content_type(request: Request) -> None:
    """Refuse bodies that are not JSON: a page of another site can make a browser post forms and plain text here without
    asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequestError(f"Content-Type must be application/json, got {shorten(kind) or 'none'}")


async def _read(request: Request, max_bytes: int, held: HeldBody) -> bytearray:
    too_large = BodyTooLargeError(f"The body is longer than {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > max_bytes:
                raise too_large
            held.take(len(chunk))
            body += chunk
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    return body


def describe(error: ValidationError) -> InvalidRequestError:
    """The error for the first field that pydantic refused. Alternatives of one field (a union) become one message."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = problems[0]
    field = first["loc"][0] if first["loc"] else None
    if first["type"] == "extra_forbidden":
        name = _path(first["loc"])
        return InvalidRequestError(f"Unsupported field: {name!r}", param=name)
    if first["type"] == "missing":
        name = _path(first["loc"])
        return InvalidRequestError(f"Missing field: {name!r}", param=name)
    same = [p for p in problems if p["loc"][:1] == first["loc"][:1]]
    messages = list(dict.fromkeys(p["msg"] for p in same))
    param = _path(first["loc"]) if len(same) == 1 else str(field)
    return InvalidRequestError(f"{param}: {', or '.join(messages)}", param=param)


def _path(location: tuple[Any, ...]) -> str:
    """('messages', 0, 'role') -> "messages[0].role"."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return shorten(path)
