"""Observability of a real server: JSON lines, traces, metrics that the dashboard asks for, and no prompts."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.models.demo import demo_adapters

OPERATOR = "operator-key-of-the-tests"
SECRET = "Zanzibar marmalade quokka"
SECRET_IN_TEXT = re.compile(r"zanzibar|marmalade|quokka", re.IGNORECASE)


@pytest.fixture(scope="module")
def collector():
    """Takes OTLP over HTTP, and keeps it."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", bodies=bodies)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def watched(start_server, collector, tmp_path_factory, fixed_drafts):
    """A server with all telemetry but prompts; some requests have been answered, and some refused."""
    folder = tmp_path_factory.mktemp("observability")
    shutil.copytree(next(iter(demo_adapters().values())), folder / "odd")
    for broken in (folder / "odd" / "draft").glob("*/adapter_model.safetensors"):
        broken.write_bytes(b"broken")
    server = start_server(
        "--database", f"sqlite:///{folder}/outrider.db", "--admin-api-key", OPERATOR, *fixed_drafts,
        "--log-format", "json", "--log-level", "debug", "--otlp-endpoint", collector.url, "--max-model-len", "256",
        "--lora-root", str(folder),
        OTEL_BSP_SCHEDULE_DELAY="50",
    )  # fmt: skip
    with server.http(headers={"Authorization": f"Bearer {OPERATOR}"}) as http:
        models = [card["id"] for card in http.get("/v1/models").json()["data"]]
        messages = [{"role": "user", "content": SECRET}]
        chat = {"model": models[1], "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        headers = {"X-Request-Id": "observed-1", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        answer = http.post("/v1/chat/completions", json=chat | {"stream": True}, headers=headers)
        assert "[DONE]" in answer.text
        http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 4, "n": 2})
        http.post("/v1/completions", json={"prompt": SECRET, "model": "nobody"})
        http.post("/v1/completions", json={"prompt": SECRET * 1000})
        http.post("/v1/completions", json={"prompt": SECRET, "temperature": SECRET})
        http.post("/v1/completions", content=f'{{"prompt": "{SECRET}', headers={"Content-Type": "application/json"})
        http.post("/v1/chat/completions", json={"messages": [{"role": SECRET, "content": SECRET}]})
        http.post("/tokenize", json={"prompt": SECRET})
        metrics = http.get("/metrics").text
        http.post("/admin/v1/tenants", json={"name": "acme", "max_adapters": 1}).raise_for_status()
        odd = {"lora_name": "odd", "lora_path": str(folder / "odd"), "tenant": "acme"}
        http.post("/v1/load_lora_adapter", json=odd).raise_for_status()
    return SimpleNamespace(server=server, adapter=models[1], metrics=metrics)


def log_lines(server):
    """Lines of the log: all of standard error are objects; the summary for people goes to standard output."""
    lines = [json.loads(line) for line in server.output.splitlines() if line.startswith("{")]
    assert all({"time", "level", "logger", "process", "message"} <= line.keys() for line in lines)
    return lines


def test_each_request_has_its_line(watched):
    watched.server.wait_for(lambda: '"path": "/tokenize"' in watched.server.output)
    lines = [line for line in log_lines(watched.server) if line["logger"] == "outrider.requests"]
    chat = next(line for line in lines if line["request_id"] == "observed-1")
    assert (chat["method"], chat["path"], chat["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (chat["model"], chat["adapter"]) == (watched.adapter, watched.adapter)
    assert (chat["output_tokens"], chat["finish_reason"], chat["trace_id"]) == (24, "length", "ab" * 16)
    assert 0 < chat["accepted_tokens"] <= chat["draft_tokens"]
    assert 0 < chat["queue_seconds"] < chat["first_token_seconds"] < chat["seconds"] < 60
    assert chat["id"].startswith("chatcmpl-")
    statuses = [line["status"] for line in lines if line["path"] == "/v1/completions"]
    assert statuses == [200, 404, 400, 400, 400]
    assert len({line["request_id"] for line in lines}) == len(lines)


def test_nothing_of_a_prompt_gets_out(watched, collector):
    """At the level that says most: not into the log, not into metrics, not into traces."""
    watched.server.wait_for(lambda: len(collector.bodies) > 0)
    assert not SECRET_IN_TEXT.search(watched.server.output)
    assert not SECRET_IN_TEXT.search(watched.metrics)
    assert not any(SECRET_IN_TEXT.search(body.decode("latin-1")) for body in collector.bodies)


def test_the_trace_of_a_request(watched, collector):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    def mine():
        resources = [
            r for body in list(collector.bodies) for r in ExportTraceServiceRequest.FromString(body).resource_spans
        ]
        spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
        return {span.name: span for span in spans if span.trace_id.hex() == "ab" * 16}

    watched.server.wait_for(lambda: len(mine()) == 4)
    spans = mine()
    request = spans["POST /v1/chat/completions"]
    assert request.parent_span_id.hex() == "cd" * 8
    order = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(span.parent_span_id == request.span_id for span in order)
    times = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in order]
    assert all(begin < end for begin, end in times)
    assert times[0][1] == times[1][0]
    assert times[1][1] == times[2][0]
    slack = 50_000_000  # the engine's tokens are noted a moment after they came
    assert request.start_time_unix_nano - slack <= times[0][0]
    assert times[2][1] <= request.end_time_unix_nano + slack


def test_both_processes_write_objects(watched):
    """The engine process says that an adapter's draft weights are broken, and calls a tenant's own as people do. After
    its end the supervisor logs that, and the new process writes as before."""
    server = watched.server
    engine_lines = [line for line in log_lines(server) if line["process"] == "engine"]
    (line,) = (line for line in engine_lines if "draft weights" in line["message"])
    assert (line["level"], line["logger"]) == ("WARNING", "outrider.lora.registry.catalog")
    assert line["message"].startswith("adapter 'acme/odd' is served without")
    server.engine().kill()
    server.wait_for(lambda: '"logger": "outrider.platform.client.process.supervisor"' in server.output)
    server.wait_for(lambda: server.http().get("/health").status_code == 200)
    assert {line["process"] for line in log_lines(server)} >= {"api"}
    outside = [line for line in server.output.splitlines() if "DEBUG" in line or "INFO" in line]
    assert all(line.startswith("{") for line in outside)


def test_changes_are_audited(watched):
    lines = [line for line in log_lines(watched.server) if line["logger"] == "outrider.audit"]
    assert [line["action"] for line in lines] == ["created tenant acme", "loaded adapter 'acme/odd'"]
    assert all(line["message"].startswith("the server's own admin key, from 127.0.0.1, ") for line in lines)
    assert len({line["request_id"] for line in lines}) == 2


EXPRESSION_NAME = re.compile(r"(?:outrider:|\bprocess_)\w+")


def test_the_dashboard_queries_existing_metrics(watched, repo_root):
    """Every metric and every label in it: names of the exposition, also of families that have no samples yet."""
    labels = {}
    kinds = {}
    for family in text_string_to_metric_families(watched.metrics):
        kinds[family.name] = family.type
        for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",)):
            labels.setdefault(family.name + suffix, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads((repo_root / "deploy" / "grafana" / "outrider.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert len(expressions) > 40
    asked = set()
    for expression in expressions:
        names = EXPRESSION_NAME.findall(expression)
        assert names, expression
        asked |= set(names)
        assert set(names) <= labels.keys(), expression
        wanted = set(re.findall(r"(\w+)=~", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            wanted |= {name.strip() for name in group.split(",") if name.strip()}
        have = set().union(*(labels[name] for name in names)) | {"instance", "le"}
        if any(labels[name] for name in names):
            assert wanted <= have, expression
    unseen = {name.removesuffix("_total").removesuffix("_bucket") for name in asked}
    left = {name for name in kinds if name.startswith("outrider:") and name not in unseen} - {
        "outrider:lora_requests_info"
    }
    assert left == set(), "no metric is forgotten"


def test_counts_of_errors(watched):
    assert 'outrider:request_errors_total{reason="NotFoundError",tenant="default"} 1.0' in watched.metrics
    assert 'outrider:request_errors_total{reason="ContextLengthExceeded",tenant="default"} 1.0' in watched.metrics
