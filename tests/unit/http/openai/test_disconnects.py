"""A client that goes away takes its request with it."""

import asyncio
import json

import pytest


class Client:
    """A bare ASGI client that can hang up, and wait for a number of messages."""

    def __init__(self, app, path: str, body: dict) -> None:
        self.received: list[dict] = []
        self.hung_up = asyncio.Event()
        self._news = asyncio.Condition()
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._messages:
            return self._messages.pop()
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        async with self._news:
            self.received.append(message)
            self._news.notify_all()

    async def wait_for(self, count: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: len(self.received) >= count)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


BODIES = [
    ("/v1/completions", {"prompt": "ab"}),
    ("/v1/completions", {"prompt": ["ab", "cd"], "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_stream(http, llm, path, body):
    async def run():
        llm.blocked = True
        client = Client(http.app, path, body | {"stream": True})
        await client.wait_for(2)  # the start and a first token
        assert llm.running
        client.hung_up.set()
        await until(lambda: not llm.running)
        await client.task
        assert client.received[-1]["type"] == "http.response.body"  # no [DONE]: the client has gone
        assert b"[DONE]" not in client.received[-1]["body"]

    asyncio.run(run())


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_whole_answer(http, llm, path, body):
    async def run():
        llm.blocked = True
        client = Client(http.app, path, body)
        await until(lambda: llm.running)
        client.hung_up.set()
        await until(lambda: not llm.running)
        await client.task
        assert client.received == []

    asyncio.run(run())


def test_before_the_first_token_of_a_stream(http, llm):
    async def run():
        waits = asyncio.Event()

        async def run(*args, **options):
            llm.running.add("x")
            try:
                await waits.wait()
                yield
            finally:
                llm.running.discard("x")

        llm.run = run
        client = Client(http.app, "/v1/completions", {"prompt": "x", "stream": True})
        await until(lambda: llm.running)
        client.hung_up.set()
        await until(lambda: not llm.running)
        await client.task
        assert client.received == []

    asyncio.run(run())


def test_a_cancelled_stream_ends_its_request(http, llm):
    """The HTTP server cancels answers that take too long at a shutdown."""

    async def run():
        llm.blocked = True
        client = Client(http.app, "/v1/completions", {"prompt": "x", "stream": True})
        await client.wait_for(2)
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert not llm.running

    asyncio.run(run())


@pytest.mark.parametrize(
    ("draining", "statuses"), [(False, []), (True, [503])], ids=["for another reason", "at the end of a shutdown"]
)
def test_a_request_cancelled_before_its_answer(http, llm, monkeypatch, draining, statuses):
    """A load or the check of a constraint may take longer than the server waits for it at its shutdown."""
    begun = asyncio.Event()

    async def wait_without_end(*_, **__):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(llm, "prepare", wait_without_end)

    async def run():
        client = Client(http.app, "/v1/completions", {"prompt": "x"})
        await begun.wait()
        http.app.state.serving.draining = draining
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert [message["status"] for message in client.received[:1]] == statuses
        assert all(b"ShuttingDownError" in message["body"] for message in client.received[1:])
        assert len(client.received) == 2 * len(statuses)

    asyncio.run(run())


def test_one_failure_among_several_prompts_ends_the_others(http, llm):
    async def run():
        llm.blocked = True
        body = {"prompt": ["ab", "x" * 100], "stream": True}
        client = Client(http.app, "/v1/completions", body)
        await client.task
        assert client.received[0]["status"] == 400
        assert not llm.running

    asyncio.run(run())


def test_aborts_are_counted(http, llm):
    async def run():
        llm.blocked = True
        client = Client(http.app, "/v1/completions", {"prompt": "x", "stream": True})
        await client.wait_for(2)
        client.hung_up.set()
        await client.task

    asyncio.run(run())
    assert (
        'outrider:request_success_total{adapter="",finished_reason="abort",tenant="default"} 1.0'
        in http.get("/metrics").text
    )
