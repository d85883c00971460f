"""Observation of every HTTP request from outside: one line in the log, counts of refusals, and a trace where that is
on.

What happens inside is noted in the request's `Note` by those who know it: the recorder of a generation, the error
handlers. No text of a prompt is noted, unless the operator asks for it.
"""

from __future__ import annotations

import logging
import re
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.logs import REQUEST_LOGGER, current_request_id, with_fields
from ...core.outputs import RequestMetrics, RequestOutput
from ...core.text import shorten
from ...tenancy.accounts.principal import Principal
from ..anthropic.errors import is_of as is_anthropic
from ..protect.paths import ASKED_METHOD

if TYPE_CHECKING:
    from ..serving_state import Serving

logger = logging.getLogger(REQUEST_LOGGER)

QUIET = ("/health", "/ping", "/load", "/metrics", "/version", "/openapi.json", "/console")
"""Paths that machines ask for all day long: such a request gets no line while all is well."""
GONE = 499
"""The status of a request whose client did not wait for the answer, as nginx has it."""
MAX_TEXTS = 16
MAX_TEXT = 10_000
"""Prompts of one request, and characters of each, that --log-prompts writes."""

MAX_IGNORED = 32
"""Ignored fields of one request that the header `x-outrider-ignored` names."""
MAX_IGNORED_NAME = 64
"""Longest name of an ignored field in the header."""
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

_current: ContextVar[Note | None] = ContextVar("note", default=None)


@dataclass(slots=True)
class Note:
    """Facts about one HTTP request."""

    method: str
    path: str
    wall_time_ns: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.monotonic)
    """Monotonic clock at the same moment."""
    ended: float = 0.0
    is_anthropic: bool = False
    """True for a request of Anthropic's API."""
    status: int = 0
    """0 until an answer has begun."""
    request_id: str = ""
    """The `X-Request-Id` of the answer."""
    id: str = ""
    """Id of the answer: "chatcmpl-…"."""
    route: str = ""
    """The path's pattern, of which there are few."""
    principal: Principal | None = None
    model: str = ""
    """The name that was asked for, of a model that there is."""
    model_field: str = ""
    """Field in which the request names its adapters; "" on routes that run none."""
    error: str = ""
    """Type of the error that it was answered with."""
    reason: str = ""
    """Error's type, or the limit that was reached."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Fields of the request that were ignored: the first place of each, by its path without indices."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    first_token_seconds: float | None = None
    finish_reasons: dict[str, None] = field(default_factory=dict)
    """Finish reasons in their order."""
    prompts: list[PromptNote] = field(default_factory=list)
    tokenizer: Any = None
    """Tokenizer of its prompts, with --log-prompts; None: the model's."""
    texts: list[tuple[list[int], list[str]]] | None = None
    """Token ids of each prompt and the pieces of its answer, with --log-prompts."""

    @property
    def tenant(self) -> str:
        """Name of the tenant; "" for none."""
        return "" if self.principal is None else self.principal.tenant

    @property
    def adapter(self) -> str:
        """Label of the adapter; "" for the base model."""
        return self.prompts[0].adapter if self.prompts else ""

    def fields(self) -> dict[str, Any]:
        """Fields of the log line."""
        seconds = {"seconds": round(self.ended - self.started, 6)}
        if self.prompts and self.prompts[0].metrics is not None:
            seconds["queue_seconds"] = round(self.prompts[0].metrics.queue_seconds, 6)
        if self.first_token_seconds is not None:
            seconds["first_token_seconds"] = round(self.first_token_seconds, 6)
        counts = {
            name: getattr(self, name)
            for name in ("prompt_tokens", "cached_tokens", "output_tokens", "draft_tokens", "accepted_tokens")
            if self.prompts
        }
        principal = self.principal or Principal()
        texts = {
            "request_id": self.request_id,
            "id": self.id,
            "tenant": principal.tenant,
            "key_id": principal.key_id,
            "model": self.model,
            "adapter": self.adapter,
            "finish_reason": ",".join(self.finish_reasons),
            "error": self.error,
            "reason": self.reason if self.reason != self.error else "",
        }
        request: dict[str, Any] = {"method": self.method, "path": self.path, "status": self.status}
        return request | {name: text for name, text in texts.items() if text} | counts | seconds


@dataclass(slots=True)
class PromptNote:
    """Facts about one prompt of a request, noted as it is generated from. Times are those of the monotonic clock."""

    note: Note
    adapter: str
    """Adapter's label; "" for the base model."""
    metrics: RequestMetrics | None = None
    """None before the first output."""
    end: float = 0.0
    _pieces: list[str] | None = None  # of the answer, with --log-prompts

    def on_output(self, output: RequestOutput, now: float) -> None:
        """Note an output that holds only what is new."""
        note, metrics = self.note, output.metrics or RequestMetrics()
        if self.metrics is None:
            self.metrics = metrics
            note.prompts.append(self)
            note.prompt_tokens += len(output.prompt_token_ids)
            note.cached_tokens += metrics.num_cached_tokens
            if note.first_token_seconds is None:
                note.first_token_seconds = now - note.started
            if note.texts is not None and len(note.texts) < MAX_TEXTS:
                self._pieces = []
                note.texts.append((output.prompt_token_ids, self._pieces))
        for completion in output.outputs:
            note.output_tokens += len(completion.token_ids)
            if self._pieces is not None:
                self._pieces.append(completion.text)
        if output.finished:
            self.end = now
            note.draft_tokens += metrics.num_draft_tokens
            note.accepted_tokens += metrics.num_accepted_tokens

    def on_end(self, reason: str) -> None:
        """Note that a sequence ended: the engine's finish reason, or "abort" or "error" without its word."""
        self.note.finish_reasons[reason] = None


def current_note() -> Note | None:
    """Note of the request that the running code answers."""
    return _current.get()


def note_error(kind: str, reason: str | None = None) -> None:
    """Note that the request is answered with an error of this type; `reason` is more exact, where it is one of a
    few."""
    note = _current.get()
    if note is not None and not note.error:
        note.error, note.reason = kind, reason or kind


def note_tokenizer(tokenizer: Any) -> None:
    """Note the tokenizer of the request's prompts, which may be an adapter's."""
    note = _current.get()
    if note is not None and note.texts is not None:
        note.tokenizer = tokenizer


def note_ignored(path: str) -> None:
    """Note that a field of the request, such as "messages[0].id", is ignored. It is named once for all places that
    differ by an index, in characters that a header can hold; beyond `MAX_IGNORED` fields the last one is "..."."""
    note = _current.get()
    if note is None or "..." in note.ignored:
        return
    key = _INDEX.sub("[]", path[: 2 * MAX_IGNORED_NAME])
    if key not in note.ignored:
        full = len(note.ignored) == MAX_IGNORED
        note.ignored["..." if full else key] = "..." if full else _UNSAFE.sub("?", path[:MAX_IGNORED_NAME])


class Observer:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = Note(scope.get(ASKED_METHOD, scope["method"]), shorten(scope["path"]))
        note.is_anthropic = is_anthropic(scope)
        if self._serving.config.log_prompts:
            note.texts = []
        sent_id = current_request_id.set("-")
        here = _current.set(note)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                if note.ignored:
                    ignored = ",".join(note.ignored.values()).encode()
                    message["headers"] = [*message["headers"], (b"x-outrider-ignored", ignored)]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            note.ended = time.monotonic()
            note.status = note.status or GONE
            note.request_id = current_request_id.get()
            note.route = getattr(scope.get("route"), "path", "")
            principal = scope.get("state", {}).get("principal")
            note.principal = principal if isinstance(principal, Principal) else None
            self._end(note, Headers(scope=scope))
            _current.reset(here)
            current_request_id.reset(sent_id)

    def _end(self, note: Note, headers: Headers) -> None:
        serving = self._serving
        if note.error:
            serving.metrics.on_error(note.reason, note.tenant)
        if note.ignored:
            serving.metrics.on_ignored(note.ignored)
            logger.debug("request %s: ignored fields: %s", note.request_id, ",".join(note.ignored.values()))
        trace_id = serving.tracer.record(note, headers) if serving.tracer is not None else ""
        if logger.isEnabledFor(logging.INFO) and (note.status >= 400 or not note.path.startswith(QUIET)):
            fields = note.fields() | ({"trace_id": trace_id} if trace_id else {}) | self._texts(note)
            logger.info("request", extra=with_fields(fields))

    def _texts(self, note: Note) -> dict[str, Any]:
        if not note.texts:
            return {}
        tokenizer = note.tokenizer or self._serving.llm.tokenizer
        decode = str if tokenizer is None else tokenizer.decode
        return {
            "prompts": [shorten(decode(ids[:MAX_TEXT]), MAX_TEXT) for ids, _ in note.texts],
            "outputs": [shorten("".join(pieces), MAX_TEXT) for _, pieces in note.texts],
        }
