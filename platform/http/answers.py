"""JSON answers written in pieces: while a large one is made and sent, others are served in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response, StreamingResponse

SCALARS = 4096
"""Numbers or texts of a list that are written in one go."""
OBJECTS = 32
"""Entries of a `Slices` that are made and written in one go."""
MAX_WHOLE = 256 << 10
"""Characters above which an answer is sent while it is being made."""
_PAUSE_SECONDS = 0.001

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Pieces(Protocol):
    """A value of an answer that writes itself."""

    def pieces(self) -> Iterator[str]:
        """Its JSON; each step is short, and may be empty."""


class Slices(NamedTuple):
    """A list whose entries are made when they are written."""

    items: Sequence[Any]
    make: Callable[[Sequence[Any]], list[Any]]
    """The entries for some of the items."""

    def pieces(self) -> Iterator[str]:
        """See `Pieces`."""
        yield "["
        for start in range(0, len(self.items), OBJECTS):
            entries = _encode(self.make(self.items[start : start + OBJECTS]))[1:-1]
            yield f",{entries}" if start else entries
        yield "]"


def write(value: Any) -> Iterator[str]:
    """The JSON of `value`, in which lists may be `Pieces`."""
    if isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield f"{',' if index else ''}{_encode(name)}:"
            yield from write(item)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield "["
        for index, item in enumerate(value):
            if index:
                yield ","
            yield from write(item)
        yield "]"
    elif isinstance(value, list) and len(value) > SCALARS:
        yield "["
        for start in range(0, len(value), SCALARS):
            yield f"{',' if start else ''}{_encode(value[start : start + SCALARS])[1:-1]}"
        yield "]"
    elif hasattr(value, "pieces"):
        yield from value.pieces()
    else:
        yield _encode(value)


async def json_answer(content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """The response with this JSON: whole where it is small, else sent in pieces."""
    steps = _paused(write(content))
    parts: list[str] = []
    size = 0
    async for piece in steps:
        parts.append(piece)
        size += len(piece)
        if size > MAX_WHOLE:
            body = _bytes(parts, steps)
            return StreamingResponse(body, headers=dict(headers or {}), media_type="application/json")
    return Response("".join(parts).encode(), headers=dict(headers or {}), media_type="application/json")


async def _paused(pieces: Iterator[str]) -> AsyncIterator[str]:
    """The same, with the event loop let go each millisecond."""
    since = time.monotonic()
    for piece in pieces:
        yield piece
        if time.monotonic() - since > _PAUSE_SECONDS:
            await asyncio.sleep(0)
            since = time.monotonic()


async def _bytes(parts: list[str], rest: AsyncIterator[str]) -> AsyncIterator[bytes]:
    size = 0
    yield "".join(parts).encode()
    parts.clear()
    async for piece in rest:
        parts.append(piece)
        size += len(piece)
        if size > MAX_WHOLE:
            yield "".join(parts).encode()
            parts.clear()
            size = 0
    yield "".join(parts).encode()
