"""For each field of each route, the largest and the most numerous values that a body of 8 MiB can hold, right and wrong
in type: a typed answer soon, no other client waits meanwhile, and the memory comes back.

Routes and fields are those of the OpenAPI document, and of the models that it leaves open, so a new one is covered by
itself. Beside them stand the requests that once stalled a server.
"""

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from outrider.platform.http.body.reader import documented
from outrider.platform.http.openai.chat_messages import ChatMessage

KEY = "operator"
SIZE = (8 << 20) - 4096
MAX_GAP_SECONDS = float(os.environ.get("OUTRIDER_TEST_GAP_MS", "300")) / 1000
"""Gap of another client: 100 ms on a machine of its own, three times that among other tests."""
MAX_ANSWER_SECONDS = 2.0
MAX_GROWTH = 64 << 20


def repeated(item: bytes, count: int = 1 << 30) -> bytes:
    """A list of `count` items, or of as many as fit."""
    return b"[" + b",".join([item] * min(count, SIZE // (len(item) + 1))) + b"]"


def named(count: int, value: bytes = b"1") -> bytes:
    return b"{" + b",".join(b'"%06d":%s' % (i, value) for i in range(count)) + b"}"


def quoted(text: str) -> bytes:
    """A string of as many of these characters as fit."""
    return b'"' + text.encode() * (SIZE // len(text.encode())) + b'"'


@cache
def long_texts() -> list[bytes]:
    """The longest texts: of one, two and four bytes a character, escaped, and of white space."""
    return [*map(quoted, ("1:+a", "İ", "😀", "\\u00e9", " \\n"))]


@cache
def most_values() -> dict[str, bytes]:
    """The most of each kind, which are beyond the bounds of a body."""
    return {
        "numbers": repeated(b"1"),
        "texts": repeated(b'"a"'),
        "lists": repeated(b"[]"),
        "objects": repeated(b'{"a":[]}'),
        "names": named(SIZE // 11),
    }


@cache
def many_values() -> dict[str, bytes]:
    """As many of each kind as a body may hold."""
    return {
        "numbers": repeated(b"1", 262_000),
        "texts": repeated(b'"a"', 65_000),
        "objects": repeated(b"{}", 16_000),
        "names": named(65_000),
    }


@cache
def huge_bodies() -> dict[str, bytes]:
    return {
        "unknown fields": named(SIZE // 11),
        "long name": b'{"' + b"n" * SIZE + b'":1}',
        "same name": b"{" + repeated(b'"u":1')[1:-1] + b"}",
        "depth": b'{"n":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}",
        "digits": b'{"n":' + b"9" * SIZE + b"}",
        "escapes": b'{"n":"' + b'\\"' * (SIZE // 2) + b'"}',
        "not JSON": b"[" * SIZE,
    }


SMALL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/admin/v1/tenants": {"name": "acme"},
    "/admin/v1/keys": {"tenant": "acme"},
    "/admin/v1/prefixes": {"name": "a", "token_ids": [5]},
}
"""What a route needs beside the field that is huge."""


class Case(NamedTuple):
    method: str
    path: str
    name: str
    body: bytes
    status: int = 0
    """The one that is expected; 0: any below 500."""


class Answer(NamedTuple):
    status: int
    content: bytes
    seconds: float


class Victim:
    """The server, and how it does."""

    def __init__(self, server) -> None:
        self.server = server
        self._connection = self.connect()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.server.url.removeprefix("http://"), timeout=60)

    def open(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        response = self.open(self._connection, method, path, body)
        return response.status, response.read()

    def probe(self) -> dict[str, float]:
        return json.loads(self.send("GET", "/probe")[1])

    def answer(self, case: Case) -> Answer:
        start = time.monotonic()
        status, content = self.send(case.method, case.path, case.body)
        return Answer(status, content, time.monotonic() - start)

    def problem(self, *cases: Case) -> str:
        """What is wrong with the answers, or happened to others since the last probe; "" for nothing."""
        for case in cases:
            problem = problem_of(self.answer(case), case.status)
            if problem:
                return f"{case.path} {case.name}: {problem}"
        stall = self.probe()["stall"]
        return "" if stall < MAX_GAP_SECONDS else f"{cases[0].path} {cases[0].name}: {stall:.3f} s of standstill"

    def memory(self) -> float:
        return self.probe()["memory"] + psutil.Process(self.server.engine().pid).memory_info().rss

    def growth(self, before: float) -> float:
        """Bytes more than `before`; what was freed is given back a little later."""
        growth = self.memory() - before
        for _ in range(6):
            if growth > MAX_GROWTH / 2:
                time.sleep(0.5)
                growth = self.memory() - before
        return growth


@pytest.fixture(scope="module")
def victim(start_server, fixed_drafts, tmp_path_factory) -> Victim:
    """With a small KV cache that has been filled: the system counts its pages when they are first written."""
    database = tmp_path_factory.mktemp("hostile") / "outrider.db"
    options = ("--database", f"sqlite:///{database}", "--admin-api-key", KEY, "--log-level", "error")
    options += ("--num-gpu-blocks-override", "512")
    server = start_server(*options, *fixed_drafts, program="stall_server", PYTHONPATH=str(Path(__file__).parent))
    victim = Victim(server)
    filling = {"prompt": [[token] * 2000 for token in range(5, 9)], "max_tokens": 8}
    assert victim.send("POST", "/v1/completions", json.dumps(filling).encode())[0] == 200
    return victim


def problem_of(answer: Answer, status: int) -> str:
    if answer.status >= 500 or status not in (0, answer.status):
        return f"status {answer.status}"
    if answer.status >= 400:
        error = json.loads(answer.content)["error"]
        if len(answer.content) > 2000 or set(error) != {"message", "type", "param", "code"}:
            return f"error {answer.content[:200]!r}"
    return f"{answer.seconds:.1f} s" if answer.seconds > MAX_ANSWER_SECONDS else ""


# --- every field ---


def schema_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["requestBody"]["content"]["application/json"]["schema"]


def places(schema: dict[str, Any], around: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The path of each field, of names and of "[]" for an item of a list, and its schema."""
    for form in (schema, *schema.get("anyOf", ())):
        for name, field in form.get("properties", {}).items():
            if name == "messages":
                field = {"type": "array", "items": schema_of(documented(ChatMessage))}
            yield (*around, name), field
            yield from places(field, (*around, name))
        if "items" in form:
            yield from places(form["items"], (*around, "[]"))


def body_with(value: bytes, place: tuple[str, ...], rest: dict[str, Any]) -> bytes:
    """A body with a value at a place, and all else that the route needs."""
    before, after = b"", b""
    for name in place:
        before += b"[" if name == "[]" else b"{%s:" % json.dumps(name).encode()
        after = (b"]" if name == "[]" else b"}") + after
    others = {name: item for name, item in rest.items() if name != place[0]}
    if others:
        before = json.dumps(others).encode()[:-1] + b"," + before[1:]
    return b"".join((before, value, after))


SMALL_ITEMS = {
    "messages": (4_000, b'{"role":"user","content":"a"}'),
    "content": (16_000, b'{"type":"text","text":"a"}'),
    "tool_calls": (8_000, b'{"function":{"name":"f","arguments":"{}"}}'),
    "adapters": (16_000, b'{"name":"a"}'),
}
"""Number and entry of a list of objects that is right in type."""


def is_number(kinds: set[str]) -> bool:
    return not kinds.isdisjoint({"integer", "number"})


def values_of(name: str, schema: dict[str, Any], turn: int) -> dict[str, bytes]:
    """The largest and the most numerous values of a field, right in type where there are such, and wrong. `turn`
    chooses the characters of texts, every other time the plain ones, and the kind of wrong entries."""
    text, digits = long_texts()[(turn % 2) * (turn // 2 % len(long_texts()))], b"9" * SIZE
    forms = (schema, *schema.get("anyOf", ()))
    kinds = {form["type"] for form in forms if "type" in form}
    items = [form["items"] for form in forms if "items" in form]
    values = {"text": text} if is_number(kinds) else {"text": text, "text in a list": b"[%s]" % text}
    if is_number(kinds):
        values["digits"] = digits
    many, right = many_values(), set()
    for item in items:
        item_kinds = {form["type"] for form in (item, *item.get("anyOf", ())) if "type" in form}
        if is_number(item_kinds):
            values["digits in a list"] = b"[%s]" % digits
        right |= {"numbers"} if is_number(item_kinds) else set()
        right |= {"texts"} if "string" in item_kinds else set()
        if "object" in item_kinds:
            count, small = SMALL_ITEMS.get(name, (16_000, b"{}"))
            values["entries"] = repeated(small, count)
    if "object" in kinds:
        values["text in an object"] = b'{"5":%s}' % text
        right |= {"names"}
    wrong = sorted(many.keys() - right)
    return values | {kind: many[kind] for kind in {*right, wrong[turn % len(wrong)]}}


def cases(document: dict[str, Any]) -> Iterator[list[Case]]:
    """The cases of each field, and of each route as a whole. A body beyond its bounds ends before its fields are known:
    one field of each route stands for all."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "application/json" not in operation.get("requestBody", {}).get("content", {}):
                continue
            where = path.replace("{name}", "acme").replace("{key_id}", "none")
            for index, (place, schema) in enumerate(places(schema_of(operation))):
                values = values_of(next(name for name in reversed(place) if name != "[]"), schema, index)
                if index == 0:
                    values |= {f"most {kind}": value for kind, value in most_values().items()}
                bodies = {kind: body_with(value, place, SMALL.get(path, {})) for kind, value in values.items()}
                yield [Case(method.upper(), where, f"{'.'.join(place)}: {kind}", body) for kind, body in bodies.items()]
            yield [Case(method.upper(), where, *whole) for whole in list(huge_bodies().items())[len(path) % 2 :: 2]]


@pytest.mark.slow
def test_each_field_of_each_route(victim):
    document = json.loads(victim.send("GET", "/openapi.json")[1])
    before = victim.memory()
    problems, fields, count = [], set(), 0
    for field in cases(document):
        count += len(field)
        fields.add((field[0].path, field[0].name.partition(":")[0]))
        if victim.problem(*field):  # another process may have had the machine
            problems += filter(None, (victim.problem(case) and victim.problem(case) for case in field))
    growth = victim.growth(before)
    print(f"{count} requests for {len(fields)} fields; memory grew by {growth / 2**20:.0f} MiB")
    assert not problems, "\n".join(problems[:20])
    assert {path for path, _ in fields} >= SMALL.keys()
    chat = {name for path, name in fields if path == "/v1/chat/completions"}
    assert {"messages", "messages.[].content", "messages.[].content.[].text", "adapters.[].name", "stop"} <= chat
    assert growth < MAX_GROWTH


# --- requests that stalled a server ---


def refused() -> Iterator[Case]:
    def completion(**fields: bytes) -> Case:
        values = b"".join(b',"%s":%s' % (name.encode(), value) for name, value in fields.items())
        body = b'{"prompt":"a","max_tokens":1%s}' % values
        return Case("POST", "/v1/completions", " ".join(fields), body, 400)

    def post(path: str, body: bytes) -> Case:
        return Case("POST", path, "", body, 400)

    yield completion(bad_words=b'["%s"]' % (b"w" * 8_000_000))
    yield completion(bad_words=repeated(b'"%s"' % (b"w" * 8000), 1000))
    for wrong in (b"null", b"{}", b"1", b'"a"'):
        for name in ("stop", "bad_words", "stop_token_ids", "adapters"):
            yield completion(**{name: repeated(wrong)})
        yield post("/detokenize", b'{"tokens":%s}' % repeated(wrong))
    yield completion(allowed_token_ids=repeated(b"12", 2_600_000))
    yield completion(logit_bias=named(600_000))
    yield post("/v1/completions", b'{"prompt":%s}' % repeated(b"[5]", 1_900_000))
    messages = repeated(b'{"role":"user","content":"a"}', 200_000)
    yield post("/v1/chat/completions", b'{"messages":%s}' % messages)
    messages = repeated(b'{"role":"user","content":"%s"}' % (b"some words " * 180), 4000)
    yield post("/v1/chat/completions", b'{"messages":%s}' % messages)
    for text in long_texts():
        yield completion(prompt=text)
        yield post("/v1/chat/completions", b'{"messages":[{"role":"user","content":%s}]}' % text)
    parts = repeated(b'{"text":"a"}', 500_000)
    yield post("/v1/chat/completions", b'{"messages":[{"role":"user","content":%s}]}' % parts)
    yield post("/v1/completions", named(500_000))
    for text in (b"a:1.+", b"+++++", b"11111"):
        yield completion(model=b'"%s"' % (text * (SIZE // 5)))._replace(status=0)  # 400 or 404
    for name in ("cache_salt", "user"):
        yield completion(n=b"128", **{name: b'"%s"' % (b"s" * 8_000_000)})
    for text in (b"a b ", b"aaaa"):
        yield post("/tokenize", b'{"return_token_strs":true,"prompt":"%s"}' % (text * (SIZE // 4)))
    for n in (b"16", b"128"):
        for stop in (repeated(b'"%s"' % (b"s" * 10_000), 64), b'"%s"' % (b"s" * 4_000_000)):
            yield completion(n=n, max_tokens=b"1500", stop=stop)
        yield completion(n=n, bad_words=repeated(b'"bad word"', 2000))


@pytest.mark.slow
def test_what_stalled_a_server_is_refused(victim):
    before = victim.memory()
    for case in refused():
        assert len(case.body) < 8 << 20
        problem = victim.problem(case)
        assert not (problem and victim.problem(case)), problem
    assert victim.growth(before) < MAX_GROWTH


LOGPROBS = {"max_tokens": 100, "logprobs": 20, "return_token_ids": True}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"n": 16} | LOGPROBS,
    "log-probabilities of prompts": {"prompt": [[5] * 2000] * 8, "max_tokens": 0, "echo": True, "logprobs": 20},
    "both": {"prompt": "a b " * 500, "echo": True, "logprobs": 20, "prompt_logprobs": 20},
    "stop strings": {"n": 16, "max_tokens": 60, "stop": ["e" * i + "b" * (128 - i) for i in range(64)]},
    "bad words": {"n": 16, "max_tokens": 20, "bad_words": [f"bad {i}" for i in range(400)]},
    "more bad words": {"n": 8, "max_tokens": 20, "bad_words": [f"bad {i}" for i in range(1000)]},
    "bad words of prompts": {"prompt": ["a"] * 4, "bad_words": [f"bad {i}" for i in range(1000)]},
    "biases": {"prompt": ["a"] * 100, "logit_bias": {str(i): 1 for i in range(1024)}},
    "prompts": {"prompt": ["hello world"] * 300},
    "salts": {"n": 128, "cache_salt": "s" * 1024, "user": "u" * 1024},
}
CHATS: dict[str, dict[str, Any]] = {
    "log-probabilities of a chat": {"n": 16, "max_tokens": 100, "logprobs": True, "top_logprobs": 20},
    "messages": {"messages": [{"role": "user", "content": ""}] * 400, "max_tokens": 1},
}
SERVED = {name: ("/v1/completions", {"prompt": "a", "max_tokens": 2} | body) for name, body in COMPLETIONS.items()} | {
    name: ("/v1/chat/completions", SMALL["/v1/chat/completions"] | body) for name, body in CHATS.items()
}
"""Large requests and answers. Prompts' log-probabilities are as many as 16 sequences of 1000 tokens have."""


class Stream:
    """Another client's stream, read in a thread: the longest time between two of its chunks."""

    def __init__(self, victim: Victim) -> None:
        self._connection = victim.connect()
        usage = {"continuous_usage_stats": True}  # a chunk for each token, also for one without a text
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True, "stream_options": usage}
        self._response = victim.open(self._connection, "POST", "/v1/completions", json.dumps(body).encode())
        self._response.readline()
        self.gap = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        since = time.monotonic()
        while self._response.readline():
            now = time.monotonic()
            self.gap, since = max(self.gap, now - since), now

    def close(self) -> float:
        self._connection.sock and self._connection.sock.shutdown(2)
        self._reader.join(10)
        self._connection.close()
        return self.gap


@pytest.mark.slow
def test_the_largest_that_is_served(victim):
    """Answers take as long as they need. The event loop and streams beside many sequences go on; memory comes back."""
    before = victim.memory()
    for name, (path, body) in SERVED.items():
        gaps = []
        for _ in range(3):  # another process may have had the machine
            stream = Stream(victim) if "n" in body else None
            victim.probe()
            answer = victim.answer(Case("POST", path, name, json.dumps(body).encode()))
            gaps.append((victim.probe()["stall"], 0.0 if stream is None else stream.close()))
            assert answer.status == 200, (name, answer.content[:300])
            if max(gaps[-1]) < MAX_GAP_SECONDS:
                break
        print(f"{name}: {answer.seconds:.1f} s, {len(answer.content) >> 10} KiB, gaps {gaps}")
        assert max(gaps[-1]) < MAX_GAP_SECONDS, (name, gaps)
    growth = victim.growth(before)
    print(f"memory grew by {growth / 2**20:.0f} MiB")
    assert growth < MAX_GROWTH
