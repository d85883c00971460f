"""Memory for bodies, origins, open files."""

import asyncio
import logging
import resource
from types import SimpleNamespace

import httpx
import pytest

from outrider.platform.core.errors import OverloadedError
from outrider.platform.http.app import create_app
from outrider.platform.http.body.body_memory import BodyMemory
from outrider.platform.http.protect import hardening
from outrider.platform.http.protect.hardening import allow_connections, with_cors
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.limits.limiter import Limiter


def test_bodies_share_one_bound():
    memory = BodyMemory(100)
    first, second, third = (memory.body() for _ in range(3))
    first.take(60)
    second.take(40)
    with pytest.raises(OverloadedError, match="long requests"):
        first.take(1)
    for held in (first, second, first):
        held.close()
    third.take(100)


def test_memory_is_given_back_after_every_end(http, llm):
    """Ends of good requests, of bad ones, and of those that are too long."""
    bodies = http.app.state.serving.bodies
    free = bodies.free
    for content in (b'{"prompt": "x"}', b"{", b'{"prompt": "' + b"x" * (9 << 20), b""):
        http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert bodies.free == free


def test_too_many_bodies_at_once_are_refused_with_503(make_http):
    http = make_http(max_body_bytes=1000)
    http.app.state.serving.bodies = BodyMemory(50)
    answer = http.post("/v1/completions", {"prompt": "x" * 100})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "OverloadedError")
    assert http.post("/v1/completions", {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_waiting_requests_body_counts_until_admission(llm, streamed):
    """Also those of clients that go; and not while it runs."""
    principal = Principal(tenant="acme", key_id="k", tenant_limits=Limits(max_concurrent_requests=1))
    limiter = Limiter(lambda *which: None)
    ledger = SimpleNamespace(check=lambda: None, begin=lambda row: None, end=lambda row: None)
    ledger.committed = lambda row: asyncio.sleep(0)
    directory = SimpleNamespace(authenticate=lambda key: principal, is_valid=lambda principal: True)
    tenancy = SimpleNamespace(limiter=limiter, ledger=ledger, directory=directory)
    app = create_app(llm, ServerConfig(served_model_names=("base",)), tenancy=tenancy)
    bodies = app.state.serving.bodies
    free = bodies.free
    llm.blocked = True

    async def until(condition):
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.001)

    async def scenario():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:

            def post():
                body = {"prompt": "x" * 40, "max_tokens": 4, "stream": streamed}
                return asyncio.create_task(http.post("/v1/completions", json=body))

            running = post()
            await until(lambda: llm.running)
            assert bodies.free == free, "it is admitted"
            waiting = [post() for _ in range(3)]
            await until(lambda: limiter.num_waiting == 3)
            held = free - bodies.free
            assert held > 3 * 40
            waiting[0].cancel()
            await until(lambda: limiter.num_waiting == 2 and free - bodies.free == held * 2 // 3)
            running.cancel()  # so that the next one runs
            await until(lambda: limiter.num_waiting == 1 and llm.running and free - bodies.free == held // 3)
            for task in waiting[1:]:
                task.cancel()
            await asyncio.gather(running, *waiting, return_exceptions=True)
            assert bodies.free == free

    asyncio.run(scenario())


def test_a_length_that_only_looks_like_a_number(http):
    headers = {"Content-Type": "application/json", "Content-Length": b"\xb2"}
    assert http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 200


@pytest.mark.parametrize("depth", [150, 10_000, 1_000_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_json(http, depth, opening):
    """Never a recursion too deep for the process; unknown fields are refused at any depth."""
    closing = b"]" if opening == b"[" else b"}"
    value = opening * depth + b"1" + closing * depth
    headers = {"Content-Type": "application/json"}
    for field in (b"prompt", b"chat_template_kwargs", b"unknown"):
        content = b'{"messages": [], "%b": %b}' % (field, value)
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = http.post(path, content=content, headers=headers)
            assert answer.status_code == 400, answer.text
            assert len(answer.text) < 2000


def preflight(app) -> dict:
    """A browser's preflight request before a page of another site may post."""
    sent = []
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    headers["access-control-request-headers"] = "authorization,content-type"
    scope = {
        "type": "http", "method": "OPTIONS", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_no_page_loads_scripts_of_other_sites(http):
    for path in ("/docs", "/redoc"):
        assert http.get(path).status_code == 404
    assert http.get("/openapi.json").status_code == 200


def test_pages_of_other_sites_are_not_let_in(llm):
    app = create_app(llm, ServerConfig(api_keys=("k",)))
    assert not [name for name in preflight(app) if name.startswith("access-control")]


def test_pages_of_named_sites_are(llm):
    app = create_app(llm, ServerConfig(api_keys=("k",)))
    allowed = preflight(with_cors(app, ["https://page.example"]))
    assert allowed["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in allowed["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed
    assert "access-control-allow-origin" not in preflight(with_cors(app, ["https://other.example"]))


def test_the_open_file_limit_is_raised_for_connections(monkeypatch):
    limits = [1024, 1 << 20]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.__setitem__(slice(None), new))
    assert allow_connections(5000) == 5000
    assert limits[0] >= 5000 + hardening.MAX_REFUSED
    assert limits[1] == 1 << 20


def test_a_low_limit_of_open_files_lowers_the_bound(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: None)
    with caplog.at_level(logging.WARNING):
        allowed = allow_connections(5000)
    assert 0 < allowed < 1024
    assert "limited to 1024" in caplog.text
