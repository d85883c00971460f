"""Limits and the ledger around the generating routes: one row a request, safe before the last byte is sent."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import httpx
import pytest
from sqlalchemy import select

from outrider.platform.core.errors import EngineDeadError, OverloadedError
from outrider.platform.http.app import create_app
from outrider.platform.http.openai import event_stream
from outrider.platform.http.protect import accounting
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.ledger.journal import JournalError
from outrider.platform.tenancy.ledger.ledger import Ledger
from outrider.platform.tenancy.service import Tenancy

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
SAID = [{"role": "user", "content": "x"}]
BODIES = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": SAID}, MESSAGES: {"messages": SAID, "max_tokens": 9}}


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """With tables: migrations take longer than a test."""
    file = tmp_path_factory.mktemp("empty") / "outrider.db"

    async def make():
        await (await Tenancy.open(f"sqlite:///{file}")).close()

    asyncio.run(make())
    return file.read_bytes()


class Server:
    def __init__(self, llm, tenancy: Tenancy, key: str) -> None:
        self.tenancy, self.llm = tenancy, llm
        self.app = create_app(llm, ServerConfig(served_model_names=("base",)), tenancy=tenancy)
        self.headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://test", headers=self.headers,
        )  # fmt: skip

    def rows(self) -> list:
        with self.tenancy.database.read() as connection:
            return connection.execute(select(usage)).all()

    async def row(self):
        """The only one, which nobody has waited for."""
        async with asyncio.timeout(30):
            while not self.rows():
                await asyncio.sleep(0.005)
        (row,) = self.rows()
        return row


@pytest.fixture
def serve(llm, tmp_path, empty_database):
    """Run a scenario against a server with a tenant "acme" that has these limits."""

    @asynccontextmanager
    async def opened(limits):
        (tmp_path / "outrider.db").write_bytes(empty_database)
        tenancy = await Tenancy.open(f"sqlite:///{tmp_path / 'outrider.db'}")
        try:
            tenancy.store.create_tenant(Tenant(name="acme", limits=limits))
            _, key = tenancy.store.create_key("acme")
            await tenancy.directory.refresh()
            yield Server(llm, tenancy, key)
        finally:
            await tenancy.close()

    def run(scenario, limits=None):
        async def whole():
            async with asyncio.timeout(30), opened(limits or Limits()) as server:
                await scenario(server)

        asyncio.run(whole())

    return run


class Client:
    """A bare ASGI client: can hang up, and sees whether there is a row when it gets each part of the answer."""

    def __init__(self, server: Server, path: str, **body) -> None:
        headers = [(b"content-type", b"application/json")]
        headers += [(name.lower().encode(), value.encode()) for name, value in server.headers.items()]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.server = server
        self.received: list[tuple[bytes, int]] = []  # body, rows in the database by then
        self.hung_up = asyncio.Event()
        content = json.dumps(BODIES[path] | body).encode()
        self._messages = [{"type": "http.request", "body": content, "more_body": False}]
        self.task = asyncio.create_task(server.app(scope, self._receive, self._send))

    async def _receive(self):
        if self._messages:
            return self._messages.pop()
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.body":
            self.received.append((message["body"], len(self.server.rows())))

    async def hang_up(self) -> None:
        self.hung_up.set()
        await self.task


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_row_is_there_before_the_last_byte(serve, path, streamed):
    async def scenario(server):
        client = Client(server, path, stream=streamed)
        await client.task
        last = next(part for part in reversed(client.received) if part[0])
        assert any(end in last[0] for end in ((b"[DONE]", b"message_stop") if streamed else (b'"usage"',)))
        assert last[1] == 1
        assert not streamed or client.received[0][1] == 0

    serve(scenario)


def test_what_a_row_says(serve, llm):
    async def scenario(server):
        body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 3, "model": "base"}
        answer = await server.http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine-7"})
        (row,) = server.rows()
        counts = answer.json()["usage"]
        assert row.request_id == answer.json()["id"]
        assert (row.client_request_id, row.tenant, row.endpoint, row.model) == ("mine-7", "acme", COMPLETIONS, "base")
        assert row.key_id
        assert (row.prompt_tokens, row.output_tokens) == (counts["prompt_tokens"], counts["completion_tokens"])
        assert row.output_tokens == 12
        assert row.cached_tokens == counts["prompt_tokens_details"]["cached_tokens"] == 4
        assert (row.drafted_tokens, row.accepted_tokens) == (12, 6)
        assert row.received_at <= row.first_token_at <= row.finished_at
        assert (row.status, row.error_type) == ("length", "")
        assert {call["tenant"] for call in llm.calls} == {"acme"}

    serve(scenario)


def test_a_token_that_is_thrown_away_is_not_charged(serve):
    async def scenario(server):
        await server.http.post(COMPLETIONS, json={"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 0})
        assert (await server.row()).output_tokens == 0

    serve(scenario)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("after", "tokens"), [(0, 0), (2, 2)])
def test_an_engine_that_dies(serve, llm, streamed, after, tokens):
    llm.fail_after, llm.error = after, EngineDeadError("it died")

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=streamed, max_tokens=4)
        await client.task
        assert client.received[0][1] == (0 if tokens and streamed else 1)
        assert [rows for part, rows in client.received if b"EngineDeadError" in part] == [1]
        (row,) = server.rows()
        assert (row.status, row.error_type, row.output_tokens) == ("error", "EngineDeadError", tokens)
        assert (row.prompt_tokens > 0) is (tokens > 0), "a prompt without an answer costs nothing"

    serve(scenario)


def test_an_error_of_this_side_in_the_middle_of_a_stream(serve, monkeypatch):
    def fails(*args):
        raise KeyError("a bug")

    monkeypatch.setattr(event_stream.ChunkWriter, "chunk", fails)

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await client.task
        assert client.received[0][1] == 1
        assert ((await server.row()).status, (await server.row()).error_type) == ("error", "InternalServerError")

    serve(scenario)


@pytest.mark.parametrize("body", [{"max_tokens": 1000}, {"min_tokens": 60, "max_tokens": 4}, {"model": "unknown"}])
def test_a_request_that_is_wrong_leaves_nothing(serve, body):
    async def scenario(server):
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab", **body})
        assert answer.status_code in (400, 404)
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab"})
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert len(server.rows()) == 1

    serve(scenario, Limits(requests_per_minute=10))


def test_a_request_that_the_engine_has_no_room_for_was_not_admitted(serve, llm):
    llm.fail_after, llm.error = 0, OverloadedError("its queue is full")

    async def scenario(server):
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "OverloadedError")
        llm.fail_after = None
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab"})
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert len(server.rows()) == 1

    serve(scenario, Limits(requests_per_minute=10))


# --- clients that go ---


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
def test_gone_in_the_middle(serve, llm, streamed, prompt):
    llm.blocked = True

    async def scenario(server):
        began = time.monotonic()
        client = Client(server, COMPLETIONS, stream=streamed, prompt=prompt, max_tokens=5)
        await until(lambda: len(llm.running) == (1 if prompt == "ab" else 2))
        await asyncio.sleep(0.02)
        await client.hang_up()
        assert not llm.running
        row = await server.row()
        sequences = 1 if prompt == "ab" else 2
        assert (row.status, row.output_tokens) == ("abort", sequences)
        assert row.prompt_tokens == sequences * 3  # with the token that begins a text
        remaining = int(server.tenancy.limiter.headers(server_principal(server))["x-ratelimit-remaining-tokens"])
        most = row.prompt_tokens + row.output_tokens  # not the 5 reserved; one comes back each second
        assert most - (time.monotonic() - began) - 1 <= 60 - remaining <= most

    serve(scenario, Limits(tokens_per_minute=60))


def server_principal(server):
    return server.tenancy.directory.authenticate(server.headers["Authorization"].removeprefix("Bearer "))


def test_gone_before_the_first_token(serve, llm):
    async def generate(*args, **options):
        llm.running.add("x")
        try:
            await asyncio.Event().wait()
            yield
        finally:
            llm.running.discard("x")

    llm.generate = generate

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await until(lambda: llm.running)
        await client.hang_up()
        row = await server.row()
        assert (row.status, row.prompt_tokens, row.output_tokens, row.first_token_at) == ("abort", 3, 0, None)

    serve(scenario)


def test_gone_while_the_commit_is_under_way(serve, monkeypatch):
    """All the text was there: the row says so."""
    waiting = asyncio.Event()

    async def hangs(ledger, row):
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Ledger, "committed", hangs)

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await waiting.wait()
        await client.hang_up()
        assert (await server.row()).status == "stop"

    serve(scenario)


def test_the_server_cancels_an_answer(serve, llm):
    """What the HTTP server does with answers that take too long at a shutdown."""
    llm.blocked = True

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await until(lambda: client.received)
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert (await server.row()).status == "abort"

    serve(scenario)


def test_a_running_request_is_recorded_as_it_goes(serve, llm, monkeypatch):
    monkeypatch.setattr(accounting, "CHECKPOINT_SECONDS", 0.0)
    checkpoints = []
    monkeypatch.setattr(Ledger, "checkpoint", lambda ledger, row: checkpoints.append((row.status, row.output_tokens)))
    llm.count_speculation = lambda request_id: None

    async def scenario(server):
        await server.http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 3})
        assert checkpoints == [("lost", 1), ("lost", 2), ("lost", 3)]

    serve(scenario)


def test_an_interval_is_not_changed_by_a_clock_that_is_set(serve, llm, monkeypatch):
    llm.blocked = True

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await until(lambda: client.received)
        monkeypatch.setattr("time.time", lambda: 1000.0)  # long ago
        await client.hang_up()
        row = await server.row()
        assert row.received_at <= row.first_token_at <= row.finished_at < row.received_at + 60

    serve(scenario)


# --- refusals ---


def test_a_ledger_that_takes_no_more(serve, monkeypatch):
    async def scenario(server):
        ledger = server.tenancy.ledger
        monkeypatch.setattr(type(ledger._journal), "_make_room", _full)
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "OverloadedError")
        assert "retry-after" in answer.headers
        health = await server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "ledger_unavailable")
        monkeypatch.undo()
        assert (await server.http.get("/health")).status_code == 200

    serve(scenario)


def _full(journal, num_bytes):
    raise JournalError("the journal is full")


def test_those_who_wait_for_a_place_are_refused_when_the_server_drains(serve, llm):
    llm.blocked = True

    async def scenario(server):
        first = Client(server, COMPLETIONS, stream=True)
        await until(lambda: llm.running)
        waiting = asyncio.create_task(server.http.post(COMPLETIONS, json={"prompt": "ab"}))
        await until(lambda: server.tenancy.limiter.num_waiting)
        server.app.state.serving.begin_draining()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ShuttingDownError")
        assert llm.running, "what runs goes on"
        await first.hang_up()
        assert len(server.rows()) <= 1
        await server.row()

    serve(scenario, Limits(max_concurrent_requests=1))


def test_limits_over_http(serve, llm):
    async def scenario(server):
        answer = await server.http.post(CHAT, json=BODIES[CHAT])
        assert llm.calls[-1]["params"].max_tokens == 7, "the missing max_tokens is lowered"
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        too_many = await server.http.post(CHAT, json=BODIES[CHAT] | {"max_completion_tokens": 8})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "max_completion_tokens")
        streamed = await server.http.post(COMPLETIONS, json={"prompt": "ab", "stream": True})
        assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await server.http.post(COMPLETIONS, json={"prompt": "ab", "stream": True})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == (
            "RateLimitError", "rate_limit_exceeded", "requests_per_minute",
        )  # fmt: skip
        assert (await server.http.post("/tokenize", json={"prompt": "ab"})).status_code == 429
        assert len(server.rows()) == 2

    serve(scenario, Limits(requests_per_minute=2, max_output_tokens=7))
