"""Server-sent events, and watches for clients that close their connection."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...core.errors import OutriderError
from ...core.tasks import cancel
from ..protect.accounting import limit_headers
from ..protect.error_responses import ClientDisconnectedError, error_content
from .generation import metrics_of, usage_of
from .job import Event, Job
from .json_pieces import OBJECTS, SCALARS, ascii_json, in_blocks, paused, write
from .protocol import StreamOptions

logger = logging.getLogger(__name__)
T = TypeVar("T")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx to pass every event on at once
]
DONE = "data: [DONE]\n\n"


def dumps(value: Any) -> str:
    """Compact JSON."""
    return ascii_json(value)  # an encoder that is there already; `json.dumps` makes one for each call


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientDisconnectedError: the client has gone.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        await cancel(task, watch)


class WithFields(NamedTuple):
    """A choice, and fields of the chunk around it."""

    choice: dict[str, Any]
    fields: dict[str, Any]


Chunk: TypeAlias = str | dict[str, Any] | WithFields
"""Choice of a chunk: JSON, or a value for `json_pieces.write`, maybe with further fields of the chunk."""


class ChunkEncoder(Protocol):
    """Turns events into the choices of an API's chunks."""

    def choices(self, event: Event) -> list[Chunk]:
        """The choice objects of one event; empty when there is nothing to say."""


class StreamWriter(Protocol):
    """Writer of the server-sent events of one API's stream."""

    def events(self, event: Event) -> Iterator[str]:
        """Events for one output, in pieces; maybe none."""

    async def last(self) -> Iterator[str]:
        """The events after the last output, in pieces."""

    def error(self, error: Exception) -> str:
        """The events that end the stream after an error."""

    def close(self) -> None:
        """End the stream. Called last, also when the client has gone."""


class ChunkWriter:
    """Writer of chunks. The text around a chunk's choices is prepared once: a chunk costs a few string joins."""

    def __init__(
        self,
        fixed: dict[str, Any],
        encoder: ChunkEncoder,
        options: StreamOptions | None,
        job: Job,
        *,
        with_metrics: bool,
    ) -> None:
        self._head = f'data: {dumps(fixed)[:-1]},"choices":['
        self._encoder = encoder
        self._usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._metrics = with_metrics
        self._tail = ',"usage":null}\n\n' if self._usage else "}\n\n"
        self._job = job

    def events(self, event: Event) -> Iterator[str]:
        """See StreamWriter. Tokens without text, such as half a character or a special one, have a chunk only if
        usage is requested with every chunk."""
        choices = self._encoder.choices(event)
        for choice in choices:
            yield from self.chunk(choice)
        if not choices and self._continuous:
            yield f'{self._head}],"usage":{dumps(usage_of(self._job))}}}\n\n'

    def chunk(self, choice: Chunk) -> Iterator[str]:
        """One event with one choice, in pieces."""
        yield self._head
        fields: dict[str, Any] = {}
        if isinstance(choice, WithFields):
            choice, fields = choice
        if isinstance(choice, str):
            yield choice
        else:
            yield from write(choice, ascii_json)
        yield "]"
        for name, value in fields.items():
            yield f",{dumps(name)}:"
            yield from write(value, ascii_json)
        yield f',"usage":{dumps(usage_of(self._job))}}}\n\n' if self._continuous else self._tail

    async def last(self) -> Iterator[str]:
        """See StreamWriter: usage and metrics, if requested."""
        extras = {}
        if self._usage:
            extras["usage"] = usage_of(self._job)
        if self._metrics:
            extras["metrics"] = metrics_of(self._job)
        return iter([f"{self._head}],{dumps(extras)[1:]}\n\n" if extras else "", DONE])

    def error(self, error: Exception) -> str:
        """See StreamWriter."""
        return f"data: {json.dumps(error_content(error))}\n\n{DONE}"

    def close(self) -> None:
        """See StreamWriter."""


def _is_large(event: Event) -> bool:
    """True for an event whose JSON is written in blocks, with pauses."""
    output = event.output
    return len(output.prompt_token_ids) > SCALARS or sum([len(new.token_ids) for new in output.outputs]) > OBJECTS


async def events_to_sse(first: Event, events: AsyncGenerator[Event], writer: StreamWriter) -> AsyncGenerator[bytes]:
    """Body of a stream. An error ends it with an error event."""

    try:
        event: Event | None = first
        while event is not None:
            if _is_large(event):
                async for data in in_blocks(paused(writer.events(event))):
                    yield data
            elif text := "".join(writer.events(event)):
                yield text.encode()
            event = await anext(events, None)
        async for data in in_blocks(paused(await writer.last())):
            yield data
    except OutriderError as error:
        yield writer.error(error).encode()
    except Exception as error:
        logger.exception("a stream ended with an unexpected error")
        with suppress(Exception):
            await events.athrow(error)  # this side failed, and did not abandon the request
        yield writer.error(error).encode()
    finally:
        writer.close()


class EventStreamResponse(Response):
    """Sends server-sent events; closes `source`, which `body` reads from, as soon as the client is gone."""

    def __init__(self, body: AsyncGenerator[bytes], source: AsyncGenerator[Event], headers: Mapping[str, str]) -> None:
        # super().__init__() is skipped: it renders the whole body.
        self.status_code = 200
        self.background = None
        self.raw_headers = _HEADERS + [(name.encode(), value.encode()) for name, value in headers.items()]
        self._body = body
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        watch = asyncio.ensure_future(_disconnected(receive))
        work = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait((watch, work), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            work.cancel()
            results = await asyncio.gather(work, watch, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _send_all(self, send: Send) -> None:
        # The source too: closing a generator that has not begun runs none of its code.
        async with aclosing(self._source), aclosing(self._body):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._body:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_response(request: Request, events: AsyncGenerator[Event], writer: StreamWriter) -> Response:
    """Answer with a stream, once the first output is there: an error before it becomes an ordinary error response."""
    first = await until_disconnect(request, anext(events))
    return EventStreamResponse(events_to_sse(first, events, writer), events, limit_headers(request))
