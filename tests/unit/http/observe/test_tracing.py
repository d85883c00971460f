"""Spans of requests, as a collector gets them."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from outrider.platform.core.errors import EngineDeadError, InvalidRequestError
from outrider.platform.http.observe.tracing import RequestTracer

SECRET = "correct horse battery staple"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self):
        self.requests = requests = []
        self.paths = paths = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                requests.append(body)
                paths.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def spans(self):
        spans = []
        for body in self.requests:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                attributes = values(resource.resource.attributes)
                assert attributes["service.name"] == "outrider"
                spans += [span for scope in resource.scope_spans for span in scope.spans]
        return spans

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def values(attributes):
    return {a.key: a.value.string_value or a.value.int_value or a.value.double_value for a in attributes}


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(make_http, collector):
    """A server, and the spans that its collector received by the server's end."""
    http = make_http(otlp_endpoint=collector.url)

    def finish():
        http.app.state.serving.tracer.close()
        return collector.spans()

    return http, finish


def seconds(span):
    return span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9


def test_a_request_and_its_parts(traced, collector):
    http, finish = traced
    http.load_adapter("sql")
    response = http.post(
        "/v1/completions",
        {"model": "sql", "prompt": SECRET, "max_tokens": 3},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine-1"},
    )
    spans = finish()
    assert collector.paths == ["/v1/traces"]
    mine = {span.name: span for span in spans if span.trace_id.hex() == TRACE}
    assert set(mine) == {"POST /v1/completions", "queue", "prefill", "decode"}
    request = mine.pop("POST /v1/completions")
    assert request.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in mine.values()} == {request.span_id}
    times = [seconds(mine[name]) for name in ("queue", "prefill", "decode")]
    assert times[0][1] == times[1][0]
    assert times[1][1] == times[2][0]
    assert values(request.attributes).pop("outrider.first_token_seconds") >= 0
    assert values(request.attributes).items() >= {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "sql", "gen_ai.response.id": response.json()["id"], "outrider.adapter": "sql",
        "outrider.request_id": "mine-1", "gen_ai.usage.input_tokens": 29, "gen_ai.usage.output_tokens": 3,
        "outrider.cached_tokens": 2, "outrider.draft_tokens": 6, "outrider.accepted_tokens": 3,
    }.items()  # fmt: skip
    assert SECRET.encode() not in b"".join(collector.requests)
    loading = next(span for span in spans if span.name == "POST /v1/load_lora_adapter")
    assert not any(name.startswith("gen_ai.") for name in values(loading.attributes))
    assert loading.trace_id.hex() != TRACE


def test_errors_and_refusals(traced, llm):
    http, finish = traced
    llm.error, llm.fail_after = EngineDeadError(SECRET), 1
    http.post("/v1/completions", {"prompt": SECRET})
    http.post("/v1/completions", {"prompt": SECRET, "model": "nobody"})
    http.get("/v1/models/one-of-very-many")
    http.get("/health")
    dead, unknown, card = (span for span in finish() if span.parent_span_id == b"")
    assert values(dead.attributes)["error.type"] == "EngineDeadError"
    assert values(unknown.attributes)["http.response.status_code"] == 404
    assert card.name == "GET /v1/models/{model:path}", "few names, however many paths"
    assert {span.status.code for span in (dead, unknown, card)} == {2}
    assert all(SECRET not in str(span) for span in (dead, unknown, card))


def test_unsampled_spans_are_not_sent(traced):
    http, finish = traced
    http.post("/v1/completions", {"prompt": "x"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert finish() == []


@pytest.mark.parametrize("bad", ["x", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "é"])
def test_a_broken_traceparent_begins_a_trace_of_its_own(traced, bad):
    http, finish = traced
    response = http.post("/v1/completions", {"prompt": "x"}, headers={"traceparent": bad.encode()})
    assert response.status_code == 200
    spans = finish()
    assert len(spans) == 4
    assert TRACE not in {span.trace_id.hex() for span in spans}


def test_a_collector_that_is_away_costs_nothing(make_http, collector):
    collector.close()
    http = make_http(otlp_endpoint=collector.url)
    assert http.post("/v1/completions", {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://host:4317", "http://", ""])
def test_no_url(endpoint):
    with pytest.raises(InvalidRequestError, match="must be a URL") as refused:
        RequestTracer(endpoint)
    assert refused.value.param == "otlp_endpoint"
