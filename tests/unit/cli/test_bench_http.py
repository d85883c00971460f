"""The HTTP client of `outrider bench serve`, against answers of all kinds."""

import asyncio
import contextlib
import json

import pytest

from outrider.platform.cli.bench.request_figures import RequestRecord
from outrider.platform.cli.bench.serving.completions import CHAT, COMPLETIONS, Server
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.messages import SpeculationCounts


class FakeServer:
    """Answers every request with the next of some raw answers: pieces of bytes, sent one after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.num_connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self._server.close()

    async def _serve(self, reader, writer):
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("Content-Length")), 0)
                self.requests.append((head, await reader.readexactly(size)))
                for piece in self.answers.pop(0):
                    if piece is None:
                        writer.close()
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)


def _chunked(*events, usage=None):
    """A stream of completions in HTTP chunks."""
    payloads = [*events, *([{"choices": [], "usage": usage}] if usage else [])]
    texts = [f"data: {json.dumps(payload)}\n\n".encode() for payload in payloads] + [b"data: [DONE]\n\n"]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(text), text) for text in texts), b"0\r\n\r\n"]


def _text(text, finish=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def _delta(finish=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def _ask(*answers, path=COMPLETIONS, count=1, **body):
    """Records of `count` requests, one after the other, and the server."""

    async def run():
        async with FakeServer(*answers) as server:
            records = [RequestRecord(index) for index in range(count)]
            for record in records:
                await Server(server.url, "secret").stream(path, body, record)
            return records, server

    return asyncio.run(run())


def test_a_streamed_completion():
    counts = {"num_drafts": 4, "num_draft_tokens": 8, "num_accepted_tokens": 3, "accepted_per_position": [0.5, 0.25]}
    last = {"choices": [], "metrics": {"speculative_decoding": counts}}
    usage = {"prompt_tokens": 2, "completion_tokens": 5}
    stream = _chunked(_text(""), _text("one "), _text("two"), _text("", "length"), last, usage=usage)
    (first, second), server = _ask(stream, stream, count=2, prompt=[1, 2])
    assert first.error is None
    assert (first.text, first.finish_reason) == ("one two", "length")
    assert (first.num_prompt_tokens, first.num_output_tokens) == (2, 5)
    assert first.speculation == SpeculationCounts(4, 8, 3, [2, 1])
    assert len(first.arrivals) == 2  # chunks without content are no arrivals
    assert 0 < first.ttft < first.e2el <= first.ended - first.started
    head, body = server.requests[1]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in head
    assert json.loads(body) == {"prompt": [1, 2]}
    assert second.num_output_tokens == 5


def test_a_streamed_chat_without_usage_counts_its_chunks():
    stream = _chunked(_delta(role="assistant", content=""), _delta(reasoning_content="hm"), _delta("stop", content="A"))
    (record,), _ = _ask(stream, path=CHAT)
    assert (record.text, record.finish_reason, len(record.arrivals)) == ("hmA", "stop", 2)
    assert record.num_output_tokens == 2


def test_events_however_they_are_cut():
    body = b"".join(_chunked(_text("\u00e4"), _text("b", "stop"))[1:])
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    (record,), _ = _ask([head, *(body[i : i + 7] for i in range(0, len(body), 7))])
    assert (record.text, record.error) == ("\u00e4b", None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([b'HTTP/1.1 400 Bad\r\nContent-Length: 29\r\n\r\n{"error": {"message": "nope"}}'[:-1] + b"}"], "status 400"),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"], "status 503: busy"),
        ([*_chunked(_text("one"))[:2], None], "ended before its last event"),
        ([None], "status 0"),
        ([b"nonsense\r\n\r\n"], "not a readable answer"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"], "ended before its last event"),
        (_chunked({"error": {"message": "engine died"}}), "engine died"),
        ([*_chunked(_text("one"))[:1], b"8\r\ndata: {\n\r\n"], "Expecting property name"),
    ],
)
def test_failures_are_errors_of_the_request(answer, message):
    (record, after), _ = _ask(answer, _chunked(_text("one", "stop")), count=2)
    assert message in record.error
    assert after.error is None


def _answer(status, body):
    text = json.dumps(body).encode()
    return [b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text), None]


def test_the_model_is_the_first_of_the_list():
    def find(answer):
        async def run():
            async with FakeServer(answer) as server:
                return await asyncio.to_thread(Server(server.url).first_model)

        return asyncio.run(run())

    assert find(_answer(200, {"data": [{"id": "base"}, {"id": "sql"}]})) == "base"
    for answer, message in ((_answer(200, {"data": []}), "lists no models"), (_answer(401, {}), "401")):
        with pytest.raises(InvalidRequestError, match=message):
            find(answer)
