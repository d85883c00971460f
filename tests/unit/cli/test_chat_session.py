"""`outrider chat` against a scripted server."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import httpx
import pytest

from outrider.platform.cli.chat import chat_client
from outrider.platform.cli.chat import chat_command as chat
from outrider.platform.cli.chat.chat_client import ChatClient, UnreachableError
from outrider.platform.cli.main import main
from outrider.platform.core.errors import NotFoundError, PromptTooLongError

MODELS = {"data": [{"id": "base", "parent": None}, {"id": "sql", "parent": "base"}]}


def sse(*objects) -> bytes:
    return b"".join(b"data: " + json.dumps(o).encode() + b"\n\n" for o in objects) + b"data: [DONE]\n\n"


def piece(text, finish=None):
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


TOTALS = {
    "choices": [],
    "usage": {"completion_tokens": 7},
    "metrics": {"speculative_decoding": {"acceptance_length": 2.5}},
}


class Server:
    """Answers every chat with `answer`."""

    def __init__(self) -> None:
        self.answer = sse(piece("Hel"), piece("lo", "stop"), TOTALS)
        self.models = json.dumps(MODELS).encode()
        self.status = 200
        self.delay = 0.0
        self.requests: list[dict] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            time.sleep(self.delay)
            return httpx.Response(200, content=self.models)
        assert request.url.path == "/v1/chat/completions"
        self.requests.append(json.loads(request.content))
        return httpx.Response(self.status, content=self.answer)


class Screen:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def say(self, text):
        self.lines.append(("say", text))

    def fail(self, text):
        self.lines.append(("fail", text))

    def piece(self, text):
        self.lines.append(("piece", text))

    def end(self, stats):
        self.lines.append(("end", stats))

    def of(self, kind):
        return [text for k, text in self.lines if k == kind]


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def client(server):
    with ChatClient("http://test/v1/", "key", httpx.MockTransport(server)) as client:
        yield client


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def talk(client, screen):
    conversation = chat.Conversation(client, screen, {"temperature": 0.5})
    conversation.choose_model(None)
    return conversation


def test_an_answer_comes_in_pieces_with_its_numbers(talk, screen, server):
    assert talk.handle("hi")
    assert screen.of("piece") == ["Hel", "lo"]
    (stats,) = screen.of("end")
    assert "7 tokens" in stats
    assert "acceptance length 2.50" in stats
    (request,) = server.requests
    assert request["model"] == "base"
    assert request["temperature"] == 0.5
    assert request["stream"] is True
    assert server.headers[-1]["authorization"] == "Bearer key"


def test_the_conversation_is_remembered_until_cleared(talk, server):
    talk.handle("one")
    talk.handle("two")
    assert [m["content"] for m in server.requests[1]["messages"]] == ["one", "Hello", "two"]
    talk.handle("/clear")
    talk.handle("three")
    assert [m["content"] for m in server.requests[2]["messages"]] == ["three"]


def test_system_prompt(talk, server):
    talk.handle("one")
    talk.handle("/system Be brief.")
    talk.handle("two")
    assert server.requests[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two"},
    ]
    talk.handle("/system")
    talk.handle("three")
    assert server.requests[2]["messages"][0]["role"] == "user"


def test_switching_the_model(talk, screen, server):
    talk.handle("/model sql")
    talk.handle("hi")
    assert server.requests[0]["model"] == "sql"
    talk.handle("/model base:sql")
    assert talk.model == "base:sql"
    talk.handle("/model nobody")
    assert talk.model == "base:sql"
    assert screen.of("fail") == ["there is no model 'nobody'; there are base, sql"]


def test_listing_models(talk, screen):
    talk.handle("/model")
    assert screen.of("say") == ["* base", "  sql  (adapter of base)"]


def test_leaving_help_and_unknown_commands(talk, screen, server):
    assert not talk.handle("/exit")
    assert talk.handle("/help")
    assert "/model NAME" in screen.of("say")[0]
    assert talk.handle("/fly")
    assert "/fly" in screen.of("fail")[0]
    assert talk.handle("   ")
    assert server.requests == []


def test_an_interrupt_stops_the_answer_and_keeps_its_text(talk, screen, server, monkeypatch):
    def interrupted(response):
        yield piece("Hel")
        raise KeyboardInterrupt

    events = chat_client._events
    monkeypatch.setattr(chat_client, "_events", interrupted)
    assert talk.handle("hi")
    assert screen.of("end") == ["stopped"]
    monkeypatch.setattr(chat_client, "_events", events)
    talk.handle("go on")
    assert [m["content"] for m in server.requests[1]["messages"]] == ["hi", "Hel", "go on"]


def test_a_refused_message_is_forgotten(talk, screen, server):
    error = {"message": "too long", "type": "ContextLengthExceeded", "param": "messages", "code": None}
    good, server.answer, server.status = server.answer, json.dumps({"error": error}).encode(), 400
    talk.handle("very long")
    assert screen.of("fail") == ["too long (/clear begins a new conversation)"]
    server.answer, server.status = good, 200
    talk.handle("short")
    assert [m["content"] for m in server.requests[1]["messages"]] == ["short"]
    assert talk.failures == 1


def test_errors_are_typed(client, server):
    server.status = 400
    for kind, expected in (("ContextLengthExceeded", PromptTooLongError), ("NotFoundError", NotFoundError)):
        server.answer = json.dumps({"error": {"type": kind, "message": "no", "param": "x"}}).encode()
        with pytest.raises(expected, match="no"):
            list(client.stream("base", [], {}))


def test_an_error_in_the_middle_of_an_answer(talk, screen, server):
    error = {"message": "the engine died", "type": "EngineDeadError", "param": None, "code": None}
    server.answer = sse(piece("Hel"), {"error": error})
    talk.handle("hi")
    assert screen.lines == [("piece", "Hel"), ("end", "failed"), ("fail", "the engine died")]


def test_answers_of_other_servers_are_errors(client, server):
    server.status, server.answer = 502, b"<html>bad gateway</html>"
    with pytest.raises(Exception, match="502"):
        list(client.stream("base", [], {}))


def test_no_server():
    def refuse(request):
        raise httpx.ConnectError("refused")

    with ChatClient("http://test", transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(UnreachableError, match="is the server running"):
            client.models()
        with pytest.raises(UnreachableError):
            list(client.stream("base", [], {}))


@pytest.fixture
def piped(monkeypatch, server):
    """Runs the command with lines on standard input; returns its status."""

    def run(text: str, *arguments: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        original = httpx.Client
        monkeypatch.setattr(
            chat_client.httpx, "Client", lambda **o: original(**o | {"transport": httpx.MockTransport(server)})
        )
        return main(["chat", *arguments])

    return run


def test_pipes(piped, capsys, server):
    assert piped("hi\n/model sql\nho\n/exit\nnever\n", "--max-tokens", "5", "--system", "S") == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\nHello\n"  # the answers and nothing else
    assert "now talking to sql" in captured.err
    assert [r["model"] for r in server.requests] == ["base", "sql"]
    assert server.requests[0]["max_tokens"] == 5
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "S"}


def test_one_message_with_vllms_options(piped, capsys, server):
    assert piped("never\n", "-q", "hi", "--model-name", "sql", "--system-prompt", "S") == 0
    assert capsys.readouterr().out == "Hello\n"
    (request,) = server.requests
    assert request["model"] == "sql"
    assert [message["content"] for message in request["messages"]] == ["S", "hi"]
    assert piped("never\n", "-q", "/etc/hosts, what is it?") == 0
    assert server.requests[1]["messages"][-1]["content"] == "/etc/hosts, what is it?"


def test_failures_in_a_pipe_are_in_the_status(piped, capsys):
    assert piped("/model nobody\n") == 1
    assert "error: there is no model 'nobody'" in capsys.readouterr().err
    assert piped("hi\n", "--model", "nobody") == 1
    assert capsys.readouterr().err.startswith("outrider: error: there is no model")


def one_line(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--api-key", "ключ"], "--api-key: a key must be printable ASCII"),
        (["--url", "http://[::1"], "--url"),
        (["--url", "http://a:b"], "--url"),
        (["--url", ""], "--url: '' must be http://host:port"),
        (["--url", ":8000"], "--url: ':8000' must be http://host:port"),
        (["--url", "ftp://a"], "--url: 'ftp://a' must be http://host:port"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "inf"], "--temperature"),
    ],
)
def test_wrong_arguments_are_one_line(piped, capsys, arguments, part):
    assert piped("hi\n", *arguments) == 1
    assert part in one_line(capsys)


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1:8000/v1", "[::1]:8000/", "https://example.com/v1/"])
def test_a_url_may_come_without_its_scheme(server, url):
    with ChatClient(url, transport=httpx.MockTransport(server)) as client:
        assert client.models()
        assert client.url == (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def test_a_server_that_does_not_answer_yet_is_named(piped, capsys, server, monkeypatch):
    monkeypatch.setattr(chat, "START_EVERY", 0.05)
    server.delay = 0.5
    assert piped("hi\n", "--url", "test:80") == 0
    assert "http://test:80 has not answered yet; it may be loading its model" in capsys.readouterr().err


def test_a_key_of_the_environment(piped, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_API_KEY", "ключ")
    assert piped("hi\n") == 1
    assert "OUTRIDER_API_KEY: a key must be printable ASCII" in one_line(capsys)


@pytest.mark.parametrize("models", [b"<html>", b'{"data": []}', b'{"object": 1}', b"[]", b'{"data": [3]}', b"null"])
def test_servers_of_another_kind(piped, capsys, server, models):
    server.models = models
    assert piped("hi\n", "--url", "http://test") == 1
    assert one_line(capsys).startswith("outrider: error: http://test ")


@pytest.mark.parametrize(
    "answer", [b"data: <html>\n\n", b"data: 3\n\n", b"data: {}\n\n", b'data: {"choices": [1]}\n\n']
)
def test_answers_of_another_kind(talk, screen, server, answer):
    server.answer = answer
    talk.handle("hi")
    assert "does not answer as the OpenAI API does" in screen.of("fail")[0]


class _Handler(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict]] = []

    def do_GET(self):
        self._send(json.dumps(MODELS).encode())

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send(sse(*[piece("word ")] * 50, TOTALS))

    def _send(self, content):
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def process():
    """Starts the command in a process of its own, against a server that answers every chat."""
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    command = [
        sys.executable,
        "-m",
        "outrider.platform.cli.main",
        "chat",
        "--url",
        f"http://127.0.0.1:{server.server_port}",
    ]

    def start(*arguments, **environment):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*command, *arguments], env={**os.environ, **environment}, **pipes)

    _Handler.bodies = []
    yield start
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_bytes_that_are_no_text(process):
    with process("--system", b"s\xff", PYTHONIOENCODING="utf-8:strict") as chatting:
        _, err = chatting.communicate(b"h\xff\xfei\nnext\n", timeout=60)
    assert chatting.returncode == 0, err
    assert [body["messages"][-1]["content"] for body in _Handler.bodies] == ["h\ufffd\ufffdi", "next"]
    assert _Handler.bodies[0]["messages"][0]["content"] == "s\ufffd"


@pytest.mark.slow
def test_a_closed_pipe_is_one_line(process):
    with process() as chatting:
        chatting.stdout.close()
        chatting.stdin.write(b"hi\nhi\n")
        chatting.stdin.close()
        err = chatting.stderr.read().decode()
        chatting.wait(timeout=60)
    assert chatting.returncode == 1
    assert err == "outrider: error: the reader of the output is gone\n"
