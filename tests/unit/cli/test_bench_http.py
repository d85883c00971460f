"""The HTTP client of `outrider bench serve`, against answers of all kinds."""

import asyncio
import contextlib
import json

import pytest

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.models.demo import demo_model_path
from outrider.platform.cli.bench.request_figures import RequestRecord
from outrider.platform.cli.bench.serving.datasets import Sample
from outrider.platform.cli.bench.serving.http_client import HttpClient, RequestFailed
from outrider.platform.cli.bench.serving.request_load import offer
from outrider.platform.cli.bench.serving.server_facts import find_model, since, speculation_counts
from outrider.platform.cli.bench.serving.streaming import Asker, EventReader
from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.platform.core.messages import SpeculationCounts


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


def test_events_however_they_are_cut():
    stream = b'data: {"a": 1}\r\n\r\n: ping\n\ndata:{"b": "\xc3\xa4"}\n\nevent: x\ndata: [DONE]\n\n'
    whole = EventReader().feed(stream)
    assert whole == [b'{"a": 1}', '{"b": "ä"}'.encode(), b"[DONE]"]
    reader = EventReader()
    assert [event for byte in stream for event in reader.feed(bytes([byte]))] == whole


class Server:
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


def _ask(*answers, sample=None, endpoint="/v1/completions", count=1, tokenizer=None, **common):
    """Records of `count` requests, one after the other, and the server."""

    async def run():
        async with Server(*answers) as server:
            client = HttpClient(server.url, "secret")
            asker = Asker(client, endpoint, "base", common, tokenizer)
            records = [RequestRecord(index) for index in range(count)]
            for record in records:
                await asker.ask(sample or Sample([1, 2], 2, 9), record)
            client.close()
            return records, server, asker

    return asyncio.run(run())


def test_a_streamed_completion():
    usage = {"prompt_tokens": 2, "completion_tokens": 5}
    stream = _chunked(_text(""), _text("one "), _text("two"), _text("", "length"), usage=usage)
    (first, second), server, asker = _ask(stream, stream, count=2, temperature=0.0, ignore_eos=True)
    assert first.error is None
    assert (first.text, first.finish_reason) == ("one two", "length")
    assert (first.num_prompt_tokens, first.num_output_tokens) == (2, 5)
    assert len(first.arrivals) == 2  # chunks without content are no arrivals
    assert 0 < first.ttft < first.e2el <= first.ended - first.started
    assert server.num_connections == 1  # kept alive
    assert not asker.counted_chunks
    head, body = server.requests[1]
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in head
    assert json.loads(body) == {
        "model": "base",
        "prompt": [1, 2],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert second.num_output_tokens == 5


def test_a_streamed_chat_for_an_adapter():
    stream = _chunked(_delta(role="assistant", content=""), _delta(reasoning_content="hm"), _delta("stop", content="A"))
    sample = Sample("Hi", None, 4, "sql")
    (record,), server, asker = _ask(stream, sample=sample, endpoint="/v1/chat/completions")
    assert (record.text, record.finish_reason, len(record.arrivals)) == ("hmA", "stop", 2)
    assert record.num_output_tokens == 2  # neither usage nor tokenizer
    assert asker.counted_chunks
    body = json.loads(server.requests[0][1])
    assert (body["model"], body["messages"]) == ("sql", [{"role": "user", "content": "Hi"}])


def test_tokens_are_counted_where_the_server_does_not_tell(tokenizer):
    text = "The capital of Portugal is Lisbon."
    (record,), _, asker = _ask(_chunked(_text(text, "stop")), sample=Sample("Hi there", None, 9), tokenizer=tokenizer)
    assert record.num_output_tokens == len(tokenizer.encode(text, add_special_tokens=False)) > 1
    assert record.num_prompt_tokens == len(tokenizer.encode("Hi there"))
    assert not asker.counted_chunks


def test_token_ids_become_text_for_chats(tokenizer):
    ids = tokenizer.encode("What is it?", add_special_tokens=False)
    _, server, _ = _ask(
        _chunked(_delta(content="A")), sample=Sample(ids, 3, 1), endpoint="/v1/chat/completions", tokenizer=tokenizer
    )
    assert json.loads(server.requests[0][1])["messages"][0]["content"] == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([b'HTTP/1.1 400 Bad\r\nContent-Length: 29\r\n\r\n{"error": {"message": "nope"}}'[:-1] + b"}"], "status 400"),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"], "status 503: b'busy'"),
        ([*_chunked(_text("one"))[:2], None], "closed the connection"),
        ([None], "closed the connection"),
        ([b"nonsense\r\n\r\n"], "not a readable answer"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"], "no stream of completions"),
        (_chunked({"error": {"message": "engine died"}}), "engine died"),
        ([*_chunked(_text("one"))[:1], b"7\r\ndata: {\r\n", b"1\r\n\n\r\n"], "not a readable answer"),
    ],
)
def test_what_goes_wrong_is_the_requests_error(answer, message):
    (record, after), _, _ = _ask(answer, _chunked(_text("one", "stop")), count=2)
    assert message in record.error
    assert after.error is None  # the next one has a new connection


def test_messages_need_the_chat_endpoint():
    (record,), server, _ = _ask(sample=Sample([{"role": "user", "content": "Hi"}], None, 1))
    assert "/v1/chat/completions" in record.error
    assert not server.requests


def test_a_body_may_end_with_the_connection():
    async def run():
        async with Server([b"HTTP/1.0 200 OK\r\n\r\n", b"all ", b"of it", None]) as server:
            return await HttpClient(server.url + "/prefix").get("/x"), server.requests[0][0]

    response, head = asyncio.run(run())
    assert response.body == b"all of it"
    assert head.startswith("GET /prefix/x HTTP/1.1")
    with pytest.raises(RequestFailed, match="not JSON"):
        response.json()


def test_counts_of_speculation_come_from_the_metrics_page():
    text = (
        b'# TYPE outrider:spec_decode_num_drafts counter\noutrider:spec_decode_num_drafts_total{adapter=""} 3.0\n'
        b'outrider:spec_decode_num_drafts_total{adapter="sql"} 4.0\n'
        b"outrider:spec_decode_num_draft_tokens_total 21.0\noutrider:spec_decode_num_accepted_tokens_total 9.0\n"
        b'outrider:spec_decode_num_accepted_tokens_per_pos_total{adapter="",position="1"} 3.0\n'
        b'outrider:spec_decode_num_accepted_tokens_per_pos_total{adapter="",position="0"} 6.0\n'
    )
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)

    async def run():
        async with Server([answer], [b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"]) as server:
            client = HttpClient(server.url)
            return await speculation_counts(client), await speculation_counts(client)

    counts, none = asyncio.run(run())
    assert counts == SpeculationCounts(7, 21, 9, [6, 3])
    assert none is None
    assert since(SpeculationCounts(2, 6, 3, [3]), counts) == SpeculationCounts(5, 15, 6, [3, 3])
    assert since(None, counts) == SpeculationCounts()


def _answer(status, body):
    text = json.dumps(body).encode()
    return [b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text)]


def test_the_model_is_the_first_of_the_list_or_the_one_that_is_named():
    listed = _answer(200, {"data": [{"id": "base", "root": "/models/base"}, {"id": "sql"}]})

    def find(name, *answers):
        async def run():
            async with Server(*answers) as server:
                found = await find_model(HttpClient(server.url), name, "lora_modules")
                return found, [head.split()[1] for head, _ in server.requests]

        return asyncio.run(run())

    assert find(None, listed)[0] == ("base", "/models/base")
    assert find("sql", listed)[0] == ("sql", None)
    # One that the server finds when it is asked for.
    found, paths = find("org/new one", listed, _answer(200, {"id": "org/new one"}))
    assert (found.name, paths) == ("org/new one", ["/v1/models", "/v1/models/org/new%20one"])
    with pytest.raises(NotFoundError, match="it has base, sql") as error:
        find("nobody", listed, _answer(404, {}))
    assert error.value.param == "lora_modules"
    assert find("any", _answer(404, {}))[0] == ("any", None)  # a server without a list may answer all the same
    with pytest.raises(InvalidRequestError, match="lists no models"):
        find(None, _answer(404, {}))
    with pytest.raises(InvalidRequestError, match="401") as error:
        find(None, _answer(401, {}))
    assert error.value.param == "api_key"


def test_never_more_requests_at_once_than_allowed():
    running, most = 0, 0

    async def ask(sample, record):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        record.ended = asyncio.get_running_loop().time() + 100

    ended = []
    samples = [Sample("x", None, 1) for _ in range(20)]
    load = asyncio.run(offer(samples, [0.0] * 20, ask, 3, ended.append))
    assert most == load.client["peak_concurrency"] == 3
    assert sorted(record.index for record in ended) == list(range(20))
