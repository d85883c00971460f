"""The log line of each request, and the texts that never appear in one."""

import asyncio
import io
import json
import logging
import re

import pytest

from outrider.platform.core.adapter_names import engine_name
from outrider.platform.core.errors import AdapterError, EngineDeadError
from outrider.platform.core.logs import (
    REQUEST_LOGGER,
    TextFormatter,
    current_request_id,
    format_trace,
    json_formatter,
    with_fields,
)
from outrider.platform.http.app import Authentication, create_app
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.authenticator import StaticKeys
from outrider.platform.tenancy.accounts.principal import Principal

SECRET = "correct horse battery staple"


class Log:
    """Output of a handler with one of our formatters, for all loggers."""

    def __init__(self, formatter):
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(formatter)

    @property
    def text(self):
        return self.stream.getvalue()

    def lines(self, logger=REQUEST_LOGGER):
        """Lines of the log, parsed as JSON."""
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if line["logger"] == logger]


@pytest.fixture(params=["json", "text"])
def any_log(request):
    yield from attached(json_formatter("api") if request.param == "json" else TextFormatter())


@pytest.fixture
def log():
    yield from attached(json_formatter("api"))


def attached(formatter):
    log, root, requests = Log(formatter), logging.getLogger(), logging.getLogger(REQUEST_LOGGER)
    level = root.level
    root.addHandler(log.handler)
    root.setLevel(logging.DEBUG)
    requests.setLevel(logging.INFO)
    yield log
    root.removeHandler(log.handler)
    root.setLevel(level)
    requests.setLevel(logging.NOTSET)


def test_a_line_has_tenant_request_and_duration(http, log):
    http.load_adapter("sql")
    body = {"model": "base:sql", "prompt": SECRET, "max_tokens": 3, "n": 2}
    answer = http.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"}).json()
    line = log.lines()[-1]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    seconds = [line.pop(name) for name in ("first_token_seconds", "seconds", "queue_seconds")]
    assert 0 <= seconds[0] <= seconds[1] < 60
    assert line == {
        "level": "INFO", "logger": "outrider.requests", "process": "api", "message": "request",
        "method": "POST", "path": "/v1/completions", "status": 200, "request_id": "mine-1", "id": answer["id"],
        "model": "base:sql", "adapter": "sql", "finish_reason": "length",
        "prompt_tokens": len(SECRET) + 1, "cached_tokens": 2, "output_tokens": 6, "draft_tokens": 6,
        "accepted_tokens": 3,
    }  # fmt: skip


def test_tenant_key_and_its_own_adapter(http, llm, log):
    acme = Principal(tenant="acme", key_id="key-1", scopes=frozenset({"inference"}), max_adapters=1)
    http.app = create_app(
        llm, ServerConfig(served_model_names=("base",)), type("One", (), {"authenticate": lambda self, key: acme})()
    )
    name = engine_name("acme", "own")
    llm.adapters.requests[name] = llm.adapters.requests.get(name) or _request(name)
    http.post("/v1/chat/completions", {"model": "own", "messages": [{"role": "user", "content": "x"}], "stream": True})
    line = log.lines()[-1]
    assert (line["tenant"], line["key_id"]) == ("acme", "key-1")
    assert (line["model"], line["adapter"]) == ("own", "acme/own")


def _request(name):
    from outrider.platform.core.lora_request import LoRARequest

    return LoRARequest(name, path="/own")


def test_several_prompts_are_added_up(http, log):
    http.post("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 2})
    line = log.lines()[-1]
    assert (line["prompt_tokens"], line["output_tokens"]) == (6, 4)


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"prompt": SECRET, "model": "nobody"}, 404, "NotFoundError"),
        ({"prompt": SECRET, "temperature": -1}, 400, "BadRequestError"),
        ({"prompt": SECRET * 10}, 400, "ContextLengthExceeded"),
        ({"prompt": {SECRET: SECRET}}, 400, "BadRequestError"),
    ],
)
def test_refusals_are_logged_with_their_type(http, any_log, body, status, error):
    assert http.post("/v1/completions", body).status_code == status
    assert f'"status": {status}' in any_log.text or f"status={status}" in any_log.text
    assert error in any_log.text
    assert SECRET not in any_log.text


def test_the_method_and_path_are_logged(http, log):
    http.request("HEAD", "/v1/models/")
    assert [log.lines()[-1][name] for name in ("method", "path", "status")] == ["HEAD", "/v1/models", 200]


def test_refusals_are_counted_by_reason_and_tenant(http, make_http):
    for path, body in (("/v1/completions", {"prompt": "x", "model": "nobody"}), ("/v1/completions", {}), ("/no", {})):
        http.post(path, body)
    metrics = http.get("/metrics").text
    assert 'outrider:request_errors_total{reason="NotFoundError",tenant="default"} 2.0' in metrics
    assert 'outrider:request_errors_total{reason="BadRequestError",tenant="default"} 1.0' in metrics
    guarded = make_http(api_keys=("k",))
    guarded.post("/v1/completions", {"prompt": "x"})
    assert 'request_errors_total{reason="AuthenticationError",tenant="default"} 1.0' in guarded.get("/metrics").text


def test_an_error_in_the_middle_of_a_stream(http, llm, log):
    llm.fail_after, llm.error = 2, EngineDeadError("it died")
    http.post("/v1/completions", {"prompt": "x", "stream": True})
    line = log.lines()[-1]
    assert (line["status"], line["error"], line["finish_reason"]) == (200, "EngineDeadError", "error")
    assert line["output_tokens"] == 2
    assert 'request_errors_total{reason="EngineDeadError",tenant="default"} 1.0' in http.get("/metrics").text


class TokenizerError(Exception):
    pass


@pytest.mark.parametrize("where", ["route", "stream"])
def test_an_unexpected_error_is_logged_without_its_message(http, llm, any_log, where):
    """It may quote the prompt. The log has the traceback, and the classes of the error and its causes."""
    llm.error = TokenizerError(f"cannot take {SECRET}")
    llm.error.__cause__ = ValueError(SECRET)
    llm.fail_after = 0 if where == "route" else 1
    http.post("/v1/completions", {"prompt": SECRET, "stream": where == "stream"}, headers={"X-Request-Id": "bad-1"})
    assert "TokenizerError" in any_log.text
    assert "ValueError" in any_log.text
    assert "conftest.py" in any_log.text
    assert "bad-1" in any_log.text
    assert SECRET not in any_log.text


def test_with_log_prompts_the_texts_are_there(make_http, log):
    make_http(log_prompts=True).post("/v1/completions", {"prompt": [SECRET, "other"], "max_tokens": 3, "n": 1})
    line = log.lines()[-1]
    assert line["prompts"] == [SECRET, "other"]
    assert line["outputs"] == ["Hel", "Hel"]


def test_healthy_probes_are_not_worth_a_line(http, llm, log):
    for path in ("/health", "/metrics", "/version"):
        http.get(path)
    assert log.lines() == []
    llm.state = "restarting"
    http.get("/health")
    assert [line["status"] for line in log.lines()] == [503]


def test_without_the_option_there_is_no_line(http, log):
    logging.getLogger(REQUEST_LOGGER).setLevel(logging.WARNING)
    http.post("/v1/completions", {"prompt": "x"})
    assert log.lines() == []


def test_text_lines_are_lines(http):
    """Text of users cannot make a second line, or a field of its own."""
    for formatter in (TextFormatter(), json_formatter("api")):
        record = logging.LogRecord("x", logging.INFO, "f", 1, "said %r", ("a\nb",), None)
        record.__dict__ |= with_fields({"path": "/v1/a b\nERROR x: faked tenant=root", "n": 3, "s": 0.25, "none": ""})
        text = formatter.format(record)
        assert "\n" not in text
    record.__dict__ |= with_fields({"path": "a b", "adapter": "acme/own", "n": 3})
    assert TextFormatter().format(record).endswith(r"INFO x: said 'a\nb' " + 'path="a b" adapter=acme/own n=3')


def test_names_of_tenants_adapters_in_any_record():
    record = logging.LogRecord("x", logging.INFO, "f", 1, "adapter %r", (engine_name("acme", "own"),), None)
    assert TextFormatter().format(record).endswith("adapter 'acme/own'")
    assert json.loads(json_formatter("engine").format(record))["message"] == "adapter 'acme/own'"


def test_traces_without_messages():
    try:
        try:
            raise ValueError(SECRET)
        except ValueError as error:
            raise AdapterError("a typed one says it itself") from error
    except AdapterError as error:
        shown = format_trace(error)
    assert "AdapterError: a typed one says it itself" in shown
    assert shown.endswith("because of ValueError")
    assert SECRET not in shown
    assert format_trace(None) == ""


def test_outside_of_requests_exceptions_are_whole():
    def shown():
        try:
            raise RuntimeError(" ".join(("the", "disk", "is", "full")))
        except RuntimeError:
            return TextFormatter().format(
                logging.LogRecord("x", logging.ERROR, "f", 1, "m", (), __import__("sys").exc_info())
            )

    assert "the disk is full" in shown()
    token = current_request_id.set("r")
    assert "the disk is full" not in shown()
    current_request_id.reset(token)


async def _cut_short(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise KeyError(SECRET)


def test_a_cut_answer_leaves_no_prompt_in_the_http_servers_log(any_log):
    """It logs what it gets, when the request's own context is gone."""
    gate = Authentication(_cut_short, StaticKeys())
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "state": {}}
    sent = []

    async def send(message):
        sent.append(message)

    async def as_the_http_server_does():
        try:
            await asyncio.create_task(gate(scope, None, send))
        except Exception:
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application")

    asyncio.run(as_the_http_server_does())
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert "Exception in ASGI application" in any_log.text
    assert "KeyError" in any_log.text, "our own line says what it was"
    assert SECRET not in any_log.text
