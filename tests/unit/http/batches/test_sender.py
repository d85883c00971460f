"""Tries of lines that the server refuses."""

import asyncio
from collections import Counter

import pytest
from batch_helpers import line
from starlette.responses import JSONResponse

from outrider.platform.core.errors import EngineDeadError
from outrider.platform.http.batches import sender as module
from outrider.platform.http.batches.lines import LineRequest
from outrider.platform.http.batches.sender import MAX_DEATHS, MAX_TRIES, Sender, answer_line


class Refusing:
    """An application that refuses a number of times."""

    def __init__(self, status: int, kind: str, times: int) -> None:
        self.status, self.kind, self.times = status, kind, times
        self.calls: Counter[str] = Counter()

    async def __call__(self, scope, receive, send) -> None:
        self.calls[scope["path"]] += 1
        refused = self.calls[scope["path"]] <= self.times
        content = {"error": {"type": self.kind}} if refused else {"ok": True}
        answer = JSONResponse(content, self.status if refused else 200, {"retry-after": "0"})
        await answer(scope, receive, send)


@pytest.mark.parametrize(
    ("status", "kind", "tries"),
    [
        (429, "RateLimitError", 21),
        (529, "overloaded_error", 21),
        (503, "OverloadedError", 21),
        (503, "EngineAsleep", 21),
        (503, "AdapterSourceError", MAX_TRIES),
        (503, "overloaded_error", MAX_TRIES),
        (503, "EngineDeadError", MAX_DEATHS),
        (409, "AdapterReplaced", MAX_TRIES),
        (500, "InternalServerError", 1),
        (400, "BadRequestError", 1),
    ],
)
def test_errors_unrelated_to_the_request_are_retried(status, kind, tries):
    async def main():
        app = Refusing(status, kind, 20)
        async with Sender(app) as sender:
            response = await sender.send(LineRequest("a", "/v1/completions", b"{}"), "id")
        assert app.calls["/v1/completions"] == tries
        assert response.status_code == (200 if tries == 21 else status)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("aborted", "whole"),
    [
        (
            {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]},
            {"choices": [{"finish_reason": "stop"}]},
        ),
        ({"status": "cancelled", "output": []}, {"status": "incomplete", "output": []}),
    ],
)
def test_aborted_lines_are_retried(aborted, whole, monkeypatch):
    """An operator's pause aborts them."""
    monkeypatch.setattr(module, "MAX_WAIT", 0.0)
    answers = [aborted, aborted, whole]

    async def app(scope, receive, send):
        await JSONResponse(answers.pop(0))(scope, receive, send)

    async def main():
        async with Sender(app) as sender:
            assert (await sender.send(LineRequest("a", "/x", b"{}"), "id")).json() == whole
        assert not answers

    asyncio.run(main())


def test_a_line_that_is_aborted_each_time_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT", 0.0)
    calls = []

    async def app(scope, receive, send):
        calls.append(scope["path"])
        await JSONResponse({"choices": [{"finish_reason": "abort"}]})(scope, receive, send)

    async def main():
        async with Sender(app) as sender:
            assert (await sender.send(LineRequest("a", "/x", b"{}"), "id")).status_code == 200
        assert len(calls) == MAX_TRIES

    asyncio.run(main())


def test_a_number_of_waits_may_be_the_bound():
    async def main():
        app = Refusing(503, "ShuttingDownError", 20)
        async with Sender(app, max_waits=3) as sender:
            assert (await sender.send(LineRequest("a", "/x", b"{}"), "id")).status_code == 503
        assert app.calls["/x"] == 3

    asyncio.run(main())


def test_a_line_that_kills_the_engine_is_given_up(site, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT", 0.01)
    site.llm.fail_after, site.llm.error = 0, EngineDeadError("died")

    async def work(api):
        batch = await api.end((await api.begin(line("a")))["id"])
        assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 1)
        (error,) = await api.content(batch["error_file_id"])
        assert error["response"]["status_code"] == 503
        assert len(site.llm.calls) == MAX_DEATHS

    site.run(work)


def test_answers_on_several_lines_become_one():
    response = module_response(b'{"a":\n[1]}')
    written = answer_line("id", "\ud800", response)
    assert written.count(b"\n") == 1
    assert b'"body":{"a": [1]}' in written


def module_response(content: bytes):
    import httpx

    return httpx.Response(200, content=content)
