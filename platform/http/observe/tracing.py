"""OpenTelemetry traces of requests, sent by OTLP over HTTP. The packages (extra `tracing`) are imported only here, and
this module only with --otlp-endpoint.

A request is known in full when it has ended, so all its spans are made then, with the times that were noted:

    POST /v1/chat/completions     kind server; parent: the client's `traceparent`, if it sent one
      queue                       from the request's arrival to its first step in the engine
      prefill                     to the first token
      decode                      to the last

With several prompts each has these three. The usual variables of OpenTelemetry hold: OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .... import __version__
from ...core.errors import InvalidRequestError
from ...core.outputs import RequestMetrics
from .generations import Generation, sum_speculation
from .request_log import QUIET, RequestLog

CLOSE_SECONDS = 3.0
"""Seconds for the last spans to reach the collector when the server ends."""
_SCOPE = "outrider"
_PATH = "/v1/traces"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Route -> `gen_ai.operation.name`, of those that OpenTelemetry's conventions for generative AI name."""


class RequestTracer:
    """Tracer of requests; a thread of its own sends the spans, and drops those that a collector which is away does not
    take."""

    def __init__(self, endpoint: str) -> None:
        """
        Args:
            endpoint: Of the collector, "http://host:4318"; without a path OTLP's own is meant.

        Raises:
            InvalidRequestError: it is no URL.
        """
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError("must be a URL like http://collector:4318", param="otlp_endpoint")
        url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH
        attributes = {"service.version": __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            attributes["service.name"] = _SCOPE
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer(_SCOPE, __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, log: RequestLog, headers: Mapping[str, str]) -> str:
        """Send the spans of a request that has ended; returns its trace's id, in hexadecimal, "" when none is kept."""
        if log.status < 400 and log.path.startswith(QUIET):
            return ""
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{log.method} {log.route}".rstrip(),
            self._propagator.extract(given, otel_context.Context()),
            SpanKind.SERVER,
            attributes=_attributes(log),
            start_time=_nanoseconds(log, log.started),
        )
        if span.is_recording():
            inside = set_span_in_context(span, otel_context.Context())
            for generation in log.begun:
                self._record_prompt(log, generation, inside)
            if log.error or log.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(log, log.ended))
        found = span.get_span_context()
        return f"{found.trace_id:032x}" if found.is_valid else ""

    def _record_prompt(self, log: RequestLog, prompt: Generation, inside: otel_context.Context) -> None:
        metrics = prompt.metrics or RequestMetrics()
        arrival = metrics.arrival_time or log.started
        end = max(prompt.ended_at or log.ended, arrival)
        first = min(max(metrics.first_token_time or end, arrival), end)
        started = min(arrival + metrics.queue_seconds, first)
        times = {"queue": (arrival, started), "prefill": (started, first), "decode": (first, end)}
        for name, (begin, until) in times.items():
            span = self._tracer.start_span(name, inside, start_time=_nanoseconds(log, begin))
            span.end(_nanoseconds(log, until))

    def close(self) -> None:
        """Send what is left. Blocks, at most `CLOSE_SECONDS`: a collector that is away must not hold up the end."""
        work = threading.Thread(target=self._provider.shutdown, name="outrider-tracing-end", daemon=True)
        work.start()
        work.join(CLOSE_SECONDS)


def _nanoseconds(log: RequestLog, monotonic: float) -> int:
    """Wall clock time in nanoseconds, counted from the request's begin: a clock that is set meanwhile changes no
    duration."""
    return log.wall_time_ns + int((monotonic - log.started) * 1e9)


def _attributes(log: RequestLog) -> dict[str, str | int | float]:
    """Attributes of a span, under OpenTelemetry's own names if there are any. They hold no text of the request or of
    the answer."""
    texts = {
        "http.request.method": log.method,
        "http.route": log.route,
        "url.path": log.path,
        "gen_ai.operation.name": _OPERATIONS.get(log.route, ""),
        "gen_ai.provider.name": _SCOPE if log.route in _OPERATIONS else "",
        "gen_ai.request.model": log.model,
        "gen_ai.response.id": log.id,
        "error.type": log.error,
        "outrider.request_id": log.request_id,
        "outrider.tenant": log.tenant,
        "outrider.key_id": "" if log.principal is None else log.principal.key_id,
        "outrider.adapter": log.adapter,
    }
    attributes: dict[str, str | int | float] = {name: text for name, text in texts.items() if text}
    attributes["http.response.status_code"] = log.status
    if log.begun:
        counts, drafts = log.begun[0].counts, sum_speculation(log.begun)
        attributes |= {
            "gen_ai.usage.input_tokens": counts.prompt_tokens,
            "gen_ai.usage.output_tokens": counts.output_tokens,
            "outrider.cached_tokens": counts.cached_tokens,
            "outrider.draft_tokens": drafts.num_draft_tokens,
            "outrider.accepted_tokens": drafts.num_accepted_tokens,
        }
        if log.first_token_seconds is not None:
            attributes["outrider.first_token_seconds"] = log.first_token_seconds
    return attributes
