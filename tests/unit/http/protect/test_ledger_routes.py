"""Limits and the ledger around the generating routes: one row a request, safe before the last byte is sent."""

import asyncio
import logging
import time

import pytest

from outrider.platform.core.errors import EngineDeadError, OverloadedError
from outrider.platform.core.logs import REQUEST_LOGGER, extra_fields
from outrider.platform.http.openai import event_stream
from outrider.platform.http.protect import accounting
from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.ledger.journal import JournalError
from outrider.platform.tenancy.ledger.ledger import Ledger

from .ledger_server import BODIES, CHAT, COMPLETIONS, Client, until


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_row_is_there_before_the_last_byte(ledger_server, path, streamed):
    async def scenario(server):
        client = Client(server, path, stream=streamed)
        await client.task
        last = next(part for part in reversed(client.received) if part[0])
        assert any(end in last[0] for end in ((b"[DONE]", b"message_stop") if streamed else (b'"usage"',)))
        assert last[1] == 1
        assert not streamed or client.received[0][1] == 0

    ledger_server(scenario)


def test_fields_of_a_row(ledger_server, llm):
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

    ledger_server(scenario)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_abandoned_beam_search_is_charged_its_tokens(ledger_server, llm, path):
    waits = asyncio.Event()

    async def beam_search(*args, on_step, **options):
        on_step(2)
        on_step(4)
        waits.set()
        await asyncio.sleep(3600)

    llm.beam_search = beam_search

    async def scenario(server):
        client = Client(server, path, use_beam_search=True, n=2, max_tokens=9)
        await waits.wait()
        await client.hang_up()
        row = await server.row()
        assert (row.status, row.output_tokens, row.prompt_tokens > 0) == ("abort", 4, True)

    ledger_server(scenario)


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_tokenized_and_checked_once(ledger_server, llm, monkeypatch, path):
    encoded, checked = [], []
    encode, prepare = llm.tokenizer.encode, llm.input_processor.prepare
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *args, **options: encoded.append(args) or encode(*args))
    monkeypatch.setattr(
        llm.input_processor, "prepare", lambda *args, **options: checked.append(args) or prepare(*args, **options)
    )

    async def scenario(server):
        assert (await server.http.post(path, json=BODIES[path])).status_code == 200
        assert (len(encoded), len(checked)) == (1, 1)

    ledger_server(scenario, Limits(max_concurrent_requests=1, tokens_per_minute=1000))


def test_a_token_that_is_thrown_away_is_not_charged(ledger_server):
    async def scenario(server):
        await server.http.post(COMPLETIONS, json={"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 0})
        assert (await server.row()).output_tokens == 0

    ledger_server(scenario)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("after", "tokens"), [(0, 0), (2, 2)])
def test_an_engine_that_dies(ledger_server, llm, streamed, after, tokens):
    llm.fail_after, llm.error = after, EngineDeadError("it died")

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=streamed, max_tokens=4)
        await client.task
        assert client.received[0][1] == (0 if tokens and streamed else 1)
        assert [rows for part, rows in client.received if b"EngineDeadError" in part] == [1]
        (row,) = server.rows()
        assert (row.status, row.error_type, row.output_tokens) == ("error", "EngineDeadError", tokens)
        assert (row.prompt_tokens > 0) is (tokens > 0), "a prompt without an answer costs nothing"

    ledger_server(scenario)


def test_an_error_of_this_side_in_the_middle_of_a_stream(ledger_server, monkeypatch):
    def fails(*args):
        raise KeyError("a bug")

    monkeypatch.setattr(event_stream.ChunkWriter, "chunk", fails)

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await client.task
        assert client.received[0][1] == 1
        assert ((await server.row()).status, (await server.row()).error_type) == ("error", "InternalServerError")

    ledger_server(scenario)


@pytest.mark.parametrize(
    ("body", "status"),
    [({"max_tokens": 1000}, 400), ({"min_tokens": 60, "max_tokens": 4}, 400), ({"model": "unknown"}, 404)],
)
def test_a_request_that_is_wrong_leaves_nothing(ledger_server, body, status):
    async def scenario(server):
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab", **body})
        assert answer.status_code == status
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab"})
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert len(server.rows()) == 1

    ledger_server(scenario, Limits(requests_per_minute=10))


def test_a_request_refused_by_the_engines_queue_is_not_charged(ledger_server, llm):
    llm.fail_after, llm.error = 0, OverloadedError("its queue is full")

    async def scenario(server):
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "OverloadedError")
        llm.fail_after = None
        answer = await server.http.post(COMPLETIONS, json={"prompt": "ab"})
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert len(server.rows()) == 1

    ledger_server(scenario, Limits(requests_per_minute=10))


# --- clients that go ---


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
def test_gone_in_the_middle(ledger_server, llm, streamed, prompt):
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

    ledger_server(scenario, Limits(tokens_per_minute=60))


def server_principal(server):
    return server.tenancy.directory.authenticate(server.headers["Authorization"].removeprefix("Bearer "))


def test_gone_before_the_first_token(ledger_server, llm):
    async def run(*args, **options):
        llm.running.add("x")
        try:
            await asyncio.Event().wait()
            yield
        finally:
            llm.running.discard("x")

    llm.run = run

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await until(lambda: llm.running)
        await client.hang_up()
        row = await server.row()
        assert (row.status, row.prompt_tokens, row.output_tokens, row.first_token_at) == ("abort", 3, 0, None)

    ledger_server(scenario)


def test_gone_while_the_commit_is_in_flight(ledger_server, monkeypatch):
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

    ledger_server(scenario)


def test_the_server_cancels_an_answer(ledger_server, llm):
    """The HTTP server cancels answers that take too long at a shutdown."""
    llm.blocked = True

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await until(lambda: client.received)
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert (await server.row()).status == "abort"

    ledger_server(scenario)


def test_a_running_request_is_recorded_as_it_goes(ledger_server, llm, monkeypatch):
    monkeypatch.setattr(accounting, "CHECKPOINT_SECONDS", 0.0)
    checkpoints = []
    monkeypatch.setattr(Ledger, "checkpoint", lambda ledger, row: checkpoints.append((row.status, row.output_tokens)))
    llm.count_speculation = lambda request_id: None

    async def scenario(server):
        await server.http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 3})
        assert checkpoints == [("lost", 1), ("lost", 2), ("lost", 3)]

    ledger_server(scenario)


def test_an_interval_is_not_changed_by_a_clock_that_is_set(ledger_server, llm, monkeypatch):
    llm.blocked = True

    async def scenario(server):
        client = Client(server, COMPLETIONS, stream=True)
        await until(lambda: client.received)
        monkeypatch.setattr("time.time", lambda: 1000.0)  # long ago
        await client.hang_up()
        row = await server.row()
        assert row.received_at <= row.first_token_at <= row.finished_at < row.received_at + 60

    ledger_server(scenario)


# --- refusals ---


def test_a_ledger_that_takes_no_more(ledger_server, monkeypatch):
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

    ledger_server(scenario)


def _full(journal, num_bytes):
    raise JournalError("the journal is full")


def test_requests_waiting_for_a_slot_are_refused_on_drain(ledger_server, llm):
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

    ledger_server(scenario, Limits(max_concurrent_requests=1))


def test_limits_over_http(ledger_server, llm):
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

    ledger_server(scenario, Limits(requests_per_minute=2, max_output_tokens=7))


def test_the_wait_for_a_slot_is_in_the_metrics(ledger_server, llm, caplog):
    """In the time to the first token and in the queue's, the same in the ledger and in the log."""
    caplog.set_level(logging.INFO, REQUEST_LOGGER)

    async def scenario(server):
        llm.blocked = True
        first = Client(server, COMPLETIONS)
        await until(lambda: llm.running)
        llm.blocked = False
        second = asyncio.create_task(server.http.post(COMPLETIONS, json=BODIES[COMPLETIONS]))
        await until(lambda: server.tenancy.limiter.num_waiting)
        await asyncio.sleep(0.3)
        await first.hang_up()
        answer = await second
        assert answer.status_code == 200
        row = next(row for row in server.rows() if row.request_id == answer.json()["id"])
        text = server.app.state.serving.metrics.render().decode()

        def total(name):  # of both requests: the first one waited for nothing
            return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"outrider:{name}_sum"))

        logged = {fields["id"]: fields for record in caplog.records if "id" in (fields := extra_fields(record))}
        line = logged.pop(row.request_id)
        [before] = logged.values()
        assert line["first_token_seconds"] >= line["queue_seconds"] >= 0.3
        assert row.first_token_at - row.received_at == pytest.approx(line["first_token_seconds"], abs=1e-5)
        for name, field in (
            ("time_to_first_token_seconds", "first_token_seconds"), ("request_queue_time_seconds", "queue_seconds")
        ):  # fmt: skip
            assert total(name) == pytest.approx(line[field] + before[field], abs=1e-5)

    ledger_server(scenario, Limits(max_concurrent_requests=1))
