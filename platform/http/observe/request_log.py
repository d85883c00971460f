"""Observation of every HTTP request from outside: one line in the log, counts of refusals, and a trace if that is
on.

What happens inside is kept in the request's `RequestLog` by those who know it: its generations, the error handlers. No
text of a prompt is kept, unless the operator asks for it.
"""

from __future__ import annotations

import logging
import re
import time
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.logs import REQUEST_LOGGER, current_request_id, with_fields
from ...core.text import shorten
from ...tenancy.accounts.principal import Principal
from ..anthropic.errors import is_anthropic
from ..protect.paths import ASKED_METHOD
from .generations import Generation, sum_speculation

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
ADAPTER_DIGEST = "x-outrider-adapter-digest"
"""Header with the digest of the adapter's version that answered, or with several if the prompts differ in it."""
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

_current: ContextVar[RequestLog | None] = ContextVar("request_log", default=None)


@dataclass(slots=True)
class RequestLog:
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
    """The name that was requested, of a model that there is."""
    model_field: str = ""
    """Field in which the request names its adapters; "" on routes that run none."""
    error: str = ""
    """Type of the error that it was answered with."""
    reason: str = ""
    """Error's type, or the limit that was reached."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Fields of the request that were ignored: the first path of each, without indices."""
    generations: list[Generation] = field(default_factory=list)
    """Its prompts, once they run."""
    tokenizer: Any = None
    """Tokenizer of its prompts, with --log-prompts; None: the model's."""
    keeps_texts: bool = False
    """True with --log-prompts."""

    def begin(self, generations: list[Generation]) -> None:
        """Observe these prompts, which are about to run."""
        self.generations = generations
        for generation in generations[: MAX_TEXTS if self.keeps_texts else 0]:
            generation.pieces = []

    @property
    def begun(self) -> list[Generation]:
        """The prompts that have begun to be answered."""
        return [generation for generation in self.generations if generation.metrics is not None]

    @property
    def first_token_seconds(self) -> float | None:
        """Time to the first token of the prompt that had it first."""
        return min((g.first_token_seconds for g in self.generations if g.first_token_seconds is not None), default=None)

    @property
    def tenant(self) -> str:
        """Name of the tenant; "" for none."""
        return "" if self.principal is None else self.principal.tenant

    @property
    def adapter(self) -> str:
        """Label of the adapter; "" for the base model."""
        return self.begun[0].adapter if self.begun else ""

    @property
    def adapter_digests(self) -> list[str]:
        """Digests of the adapter's versions that the prompts run on; none of the base model."""
        digests = (generation.metrics.adapter_digest for generation in self.begun if generation.metrics is not None)
        return list(dict.fromkeys(filter(None, digests)))

    def fields(self) -> dict[str, Any]:
        """Fields of the log line."""
        seconds = {"seconds": round(self.ended - self.started, 6)}
        begun, first = self.begun, self.first_token_seconds
        if begun and begun[0].metrics is not None:
            seconds["queue_seconds"] = round(begun[0].metrics.queue_seconds, 6)
        if first is not None:
            seconds["first_token_seconds"] = round(first, 6)
        counts: dict[str, int] = {}
        if begun:
            drafts = sum_speculation(begun)
            counts = asdict(begun[0].counts)
            counts |= {"draft_tokens": drafts.num_draft_tokens, "accepted_tokens": drafts.num_accepted_tokens}
        reasons = [reason for g in self.generations for reason in (*g.finish_reasons.values(), g.failure) if reason]
        principal = self.principal or Principal()
        texts = {
            "request_id": self.request_id,
            "id": self.id,
            "tenant": principal.tenant,
            "key_id": principal.key_id,
            "model": self.model,
            "adapter": self.adapter,
            "finish_reason": ",".join(dict.fromkeys(reasons)),
            "error": self.error,
            "reason": self.reason if self.reason != self.error else "",
        }
        request: dict[str, Any] = {"method": self.method, "path": self.path, "status": self.status}
        return request | {name: text for name, text in texts.items() if text} | counts | seconds


def current_log() -> RequestLog | None:
    """RequestLog of the request that the running code answers."""
    return _current.get()


def log_error(kind: str, reason: str | None = None) -> None:
    """Note that the request is answered with an error of this type; `reason` is more exact, if it is one of a
    few."""
    log = _current.get()
    if log is not None and not log.error:
        log.error, log.reason = kind, reason or kind


def log_tokenizer(tokenizer: Any) -> None:
    """RequestLog the tokenizer of the request's prompts, which may be an adapter's."""
    log = _current.get()
    if log is not None and log.keeps_texts:
        log.tokenizer = tokenizer


def log_ignored(path: str) -> None:
    """Note that a field of the request, such as "messages[0].id", is ignored. It is named once for all paths that
    differ by an index, in characters that a header can hold; beyond `MAX_IGNORED` fields the last one is "..."."""
    log = _current.get()
    if log is None or "..." in log.ignored:
        return
    key = _INDEX.sub("[]", path[: 2 * MAX_IGNORED_NAME])
    if key not in log.ignored:
        full = len(log.ignored) == MAX_IGNORED
        log.ignored["..." if full else key] = "..." if full else _UNSAFE.sub("?", path[:MAX_IGNORED_NAME])


class Observer:
    """Outermost layer of the application but for `Paths`, which puts paths and methods right."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        log = RequestLog(scope.get(ASKED_METHOD, scope["method"]), shorten(scope["path"]))
        log.is_anthropic = is_anthropic(scope)
        log.keeps_texts = self._serving.config.log_prompts
        sent_id = current_request_id.set("-")
        here = _current.set(log)

        async def send_and_observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                if log.ignored:
                    ignored = ",".join(log.ignored.values()).encode()
                    message["headers"] = [*message["headers"], (b"x-outrider-ignored", ignored)]
                if digests := log.adapter_digests:
                    message["headers"] = [*message["headers"], (ADAPTER_DIGEST.encode(), ",".join(digests).encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_and_observe)
        finally:
            log.ended = time.monotonic()
            log.status = log.status or GONE
            log.request_id = current_request_id.get()
            log.route = getattr(scope.get("route"), "path", "")
            principal = scope.get("state", {}).get("principal")
            log.principal = principal if isinstance(principal, Principal) else None
            self._end(log, Headers(scope=scope))
            _current.reset(here)
            current_request_id.reset(sent_id)

    def _end(self, log: RequestLog, headers: Headers) -> None:
        serving = self._serving
        if log.error:
            serving.metrics.on_error(log.reason, log.tenant)
        if log.ignored:
            serving.metrics.on_ignored(log.ignored)
            logger.debug("request %s: ignored fields: %s", log.request_id, ",".join(log.ignored.values()))
        trace_id = serving.tracer.record(log, headers) if serving.tracer is not None else ""
        if logger.isEnabledFor(logging.INFO) and (log.status >= 400 or not log.path.startswith(QUIET)):
            fields = log.fields() | ({"trace_id": trace_id} if trace_id else {}) | self._texts(log)
            logger.info("request", extra=with_fields(fields))

    def _texts(self, log: RequestLog) -> dict[str, Any]:
        logged = [(g.prompt_token_ids, g.pieces) for g in log.begun if g.pieces is not None]
        if not logged:
            return {}
        tokenizer = log.tokenizer or self._serving.llm.tokenizer
        decode = str if tokenizer is None else tokenizer.decode
        return {
            "prompts": [shorten(decode(ids[:MAX_TEXT]), MAX_TEXT) for ids, _ in logged],
            "outputs": [shorten("".join(pieces), MAX_TEXT) for _, pieces in logged],
        }
