"""Completions over HTTP: the body of a request, and its stream of events."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from ..request_figures import RequestRecord
from .datasets import Sample
from .http_client import HttpClient, RequestFailed
from .serving_commands import CHAT

_TIMEOUT = 6 * 3600.0
"""Timeout of one request in seconds, as in vLLM's benchmark."""


class EventReader:
    """Parser of server-sent events from pieces of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the complete `data:` lines."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class StreamReader:
    """Reader of one completion's stream into a record."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.usage: dict[str, Any] = {}
        self._events = EventReader()
        self._head = bytearray()

    def receive(self, now: float, data: bytes) -> None:
        """Read bytes that came at `now`."""
        if len(self._head) < 4096:
            self._head += data
        for payload in self._events.feed(data):
            if payload != b"[DONE]":
                self._event(now, json.loads(payload))

    def _event(self, now: float, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.record.error = _message_of(event)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content = choice.get("text") or delta.get("content")
            content = content or delta.get("reasoning_content") or delta.get("reasoning")
            if content:
                self.record.arrivals.append(now)
                self.record.text += content
            self.record.finish_reason = choice.get("finish_reason") or self.record.finish_reason

    def end(self, status: int) -> None:
        """End the stream."""
        record = self.record
        if status != 200:
            record.error = f"status {status}: {self._body_error()}"
        elif record.error is None and record.finish_reason is None and not record.arrivals:
            record.error = f"the answer is no stream of completions: {bytes(self._head[:80])!r}"

    def _body_error(self) -> str:
        """Message of an answer that is an error."""
        try:
            return _message_of(json.loads(bytes(self._head)))
        except ValueError:
            return repr(bytes(self._head[:200]))


def _message_of(body: Any) -> str:
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


class Asker:
    """Sender of samples to one endpoint."""

    def __init__(
        self, client: HttpClient, endpoint: str, model: str, common: dict[str, Any], tokenizer: Any | None
    ) -> None:
        """`common`: fields of every body. Without usage and without a tokenizer, chunks are counted as tokens."""
        self.counted_chunks = False
        """True when the chunks of an answer were counted as its tokens."""
        self._client = client
        self._endpoint = endpoint
        self._is_chat = endpoint.endswith("/chat/completions")
        self._model = model
        self._common = common
        self._tokenizer = tokenizer

    def body(self, sample: Sample) -> bytes:
        """Body of a request.

        Raises:
            RequestFailed: this endpoint does not take such a prompt.
        """
        prompt: Any = sample.prompt
        if self._is_chat:
            if sample.is_ids:
                prompt = self._decode(prompt)
            content = {"messages": prompt if sample.is_messages else [{"role": "user", "content": prompt}]}
        elif sample.is_messages:
            raise RequestFailed(f"{self._endpoint} takes no messages: use --endpoint {CHAT}")
        else:
            content = {"prompt": prompt}
        fields = {"model": sample.adapter or self._model, **content, "max_tokens": sample.max_tokens, "stream": True}
        return json.dumps(fields | {"stream_options": {"include_usage": True}} | self._common).encode()

    def _decode(self, ids: Any) -> str:
        if self._tokenizer is None:
            raise RequestFailed(
                f"{self._endpoint} takes no token ids, and without --tokenizer there is no text of them"
            )
        return str(self._tokenizer.decode(ids))

    async def ask(self, sample: Sample, record: RequestRecord) -> None:
        """Send one request and read its answer. A failure is the record's `error`."""
        reader = StreamReader(record)
        try:
            body = self.body(sample)
            record.adapter = sample.adapter
            record.started = time.perf_counter()
            async with asyncio.timeout(_TIMEOUT):
                status = await self._client.stream(self._endpoint, body, reader.receive)
            reader.end(status)
        except RequestFailed as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"no end after {_TIMEOUT:.0f} s"
        record.ended = time.perf_counter()
        self._count(sample, record, reader.usage)

    def _count(self, sample: Sample, record: RequestRecord, usage: dict[str, Any]) -> None:
        """Set the token counts: the server's, else the tokenizer's, else the number of chunks."""
        record.num_prompt_tokens = usage.get("prompt_tokens") or sample.num_prompt_tokens or 0
        if usage.get("completion_tokens") is not None:
            record.num_output_tokens = usage["completion_tokens"]
        elif self._tokenizer is not None:
            record.num_output_tokens = len(self._tokenizer.encode(record.text, add_special_tokens=False))
        else:
            record.num_output_tokens = len(record.arrivals)
            self.counted_chunks = True
        if not record.num_prompt_tokens and self._tokenizer is not None and isinstance(sample.prompt, str):
            record.num_prompt_tokens = len(self._tokenizer.encode(sample.prompt))
