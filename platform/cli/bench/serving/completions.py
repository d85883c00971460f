"""Streamed completions over HTTP/1.1. The client shares the machine with the server, so a chunk must cost it little."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import httptools

from ....core.errors import InvalidRequestError
from ....core.messages import SpeculationCounts
from ..request_figures import RequestRecord

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_CONNECT_SECONDS, _ANSWER_SECONDS = 30.0, 6 * 3600.0
_READ_BYTES = 1 << 16


class Server(NamedTuple):
    """A server with an OpenAI-compatible API."""

    url: str
    api_key: str | None = None

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        authorization = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"User-Agent": "outrider-bench", "Content-Type": "application/json", **authorization}

    def first_model(self) -> str:
        """Name of the first model that the server lists.

        Raises:
            InvalidRequestError: the address is none of HTTP, or there is no server, or it lists no model.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise InvalidRequestError("must be http://HOST:PORT or https://..., without a user", param="base_url")
        try:
            with urlopen(Request(f"{self.url}/v1/models", headers=self.headers()), timeout=_CONNECT_SECONDS) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except OSError as error:
            raise InvalidRequestError(f"{self.url}: {error}", param="base_url") from None
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(f"{self.url} lists no models: {error!r}", param="base_url") from None

    async def stream(self, path: str, body: Mapping[str, Any], record: RequestRecord) -> None:
        """POST a request and read its stream into `record`. Whatever fails becomes the record's error."""
        stream = _Stream(record)
        record.started = time.perf_counter()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._exchange(path, json.dumps(body).encode(), stream)
        except OSError as error:  # a timeout, too
            record.error = f"{type(error).__name__}: {error}"
        except httptools.HttpParserError as error:
            if not stream.is_complete:  # else only what follows the answer is wrong
                record.error = f"not a readable answer: {error.__context__ or error!r}"
        record.ended = time.perf_counter()
        stream.finish()

    async def _exchange(self, path: str, body: bytes, stream: _Stream) -> None:
        parts = urlsplit(self.url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or (443 if tls else 80), ssl=tls)
        headers = {"Host": parts.netloc, "Connection": "close", "Content-Length": len(body), **self.headers()}
        lines = [f"POST {parts.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        stream.record.started = time.perf_counter()
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            while not stream.is_complete and (data := await reader.read(_READ_BYTES)):
                stream.now = time.perf_counter()
                stream.parser.feed_data(data)
        finally:
            writer.transport.abort()


class _Stream:
    """Answer to a request, as httptools parses it."""

    def __init__(self, record: RequestRecord) -> None:
        self.parser: Any = httptools.HttpResponseParser(self)
        self.record = record
        self.now = 0.0
        """Arrival of the bytes that are parsed."""
        self.is_complete = False
        self._rest = b""
        """Bytes of a line that is not complete, or of an answer that is an error."""

    def on_body(self, body: bytes) -> None:
        """Read the events of a part of the body."""
        if self.parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                self._read(json.loads(payload))

    def on_message_complete(self) -> None:
        """End the answer."""
        self.is_complete = True

    def _read(self, event: dict[str, Any]) -> None:
        record = self.record
        if event.get("error"):
            record.error = json.dumps(event["error"])
        if usage := event.get("usage"):
            record.num_prompt_tokens, record.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if counts := (event.get("metrics") or {}).get("speculative_decoding"):
            per_pos = [round(share * counts["num_drafts"]) for share in counts["accepted_per_position"]]
            drafts, drafted, accepted = (
                counts[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens")
            )
            record.speculation = SpeculationCounts(drafts, drafted, accepted, per_pos)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            if content or delta.get("tool_calls"):
                record.arrivals.append(self.now)
                record.text += content or ""
            record.finish_reason = choice.get("finish_reason") or record.finish_reason

    def finish(self) -> None:
        """Record what is wrong with the answer. Without usage its chunks count as its tokens."""
        record, status = self.record, self.parser.get_status_code()
        if record.error is None and status != 200:
            record.error = f"status {status}: {self._rest.decode(errors='replace')[:300]}"
        elif record.error is None and record.finish_reason is None:
            record.error = "the answer ended before its last event"
        record.num_output_tokens = record.num_output_tokens or len(record.arrivals)
