"""JSON answers, written in pieces so that other requests are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.background import BackgroundTask
from starlette.responses import Response, StreamingResponse

from ..body.body_memory import give_back_memory

SCALARS = 4096
"""Numbers or texts of a list that are written in one go."""
OBJECTS = 32
"""Entries of a `Slices` that are made and written in one go."""
MAX_WHOLE = 256 << 10
"""Characters above which an answer is sent while it is being made."""
BLOCK = 64 << 10
"""Characters that are sent in one go."""
_PAUSE_SECONDS = 0.001

Encode = Callable[[Any], str]
"""JSON of a value that is small."""
_encode: Encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
ascii_json: Encode = json.JSONEncoder(separators=(",", ":")).encode
"""JSON in ASCII for server-sent events: some clients take more characters than line feeds for ends of lines."""


class Pieces(Protocol):
    """A value that writes its own JSON."""

    def pieces(self, encode: Encode) -> Iterator[str]:
        """Pieces of its JSON; each step is short, and may be empty."""


class Slices(NamedTuple):
    """A list whose entries are made when they are written."""

    items: Sequence[Any]
    make: Callable[[Sequence[Any]], list[Any]]
    """The entries for some of the items."""

    def pieces(self, encode: Encode) -> Iterator[str]:
        """See `Pieces`."""
        yield "["
        for start in range(0, len(self.items), OBJECTS):
            entries = encode(self.make(self.items[start : start + OBJECTS]))[1:-1]
            yield f",{entries}" if start else entries
        yield "]"


def write(value: Any, encode: Encode = _encode) -> Iterator[str]:
    """The JSON of `value`, parts of which may be `Pieces`."""
    if isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield f"{',' if index else ''}{encode(name)}:"
            yield from write(item, encode)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield "["
        for index, item in enumerate(value):
            if index:
                yield ","
            yield from write(item, encode)
        yield "]"
    elif isinstance(value, list) and len(value) > SCALARS:
        yield "["
        for start in range(0, len(value), SCALARS):
            yield f"{',' if start else ''}{encode(value[start : start + SCALARS])[1:-1]}"
        yield "]"
    elif hasattr(value, "pieces"):
        yield from value.pieces(encode)
    else:
        yield encode(value)


async def json_answer(
    content: Mapping[str, Any] | Sequence[Any] | Pieces, headers: Mapping[str, str] | None = None
) -> Response:
    """The response with this JSON: whole if it is small, else sent in pieces."""
    steps = paused(write(content))
    parts: list[str] = []
    size = 0
    async for piece in steps:
        parts.append(piece)
        size += len(piece)
        if size > MAX_WHOLE:
            body = in_blocks(steps, parts)
            then = BackgroundTask(give_back_memory)
            return StreamingResponse(body, 200, dict(headers or {}), "application/json", then)
    return Response("".join(parts).encode(), headers=dict(headers or {}), media_type="application/json")


async def paused(pieces: Iterator[str]) -> AsyncIterator[str]:
    """The pieces, with a pause for the event loop each millisecond."""
    since = time.monotonic()
    for piece in pieces:
        yield piece
        if time.monotonic() - since > _PAUSE_SECONDS:
            await asyncio.sleep(0)
            since = time.monotonic()


async def in_blocks(pieces: AsyncIterator[str], begun: list[str] | None = None) -> AsyncIterator[bytes]:
    """Join pieces, after those in `begun`, into blocks of bytes."""
    parts = begun or []
    size = sum(map(len, parts))
    async for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > BLOCK:
            yield "".join(parts).encode()
            parts.clear()
            size = 0
    yield "".join(parts).encode()
