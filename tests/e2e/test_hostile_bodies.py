"""For each field of each route, the largest and the most numerous values that a body of 8 MiB can hold, right and wrong
in type: a typed answer soon, no other client waits meanwhile, and the memory comes back.

Routes and fields are those of the OpenAPI document, so a new one is covered by itself.
"""

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

KEY = "operator"
SIZE = (8 << 20) - 4096
MAX_STALL_SECONDS = 0.3
MAX_ANSWER_SECONDS = 2.0
MAX_GROWTH = 64 << 20


def repeated(item: bytes) -> bytes:
    return item + (b"," + item) * (SIZE // (len(item) + 1) - 1)


HUGE = {
    "text": b'"' + b"1:+a" * (SIZE // 4) + b'"',
    "numbers": b"[" + repeated(b"1") + b"]",
    "texts": b"[" + repeated(b'"a"') + b"]",
    "objects": b"[" + repeated(b'{"a":[]}') + b"]",
    "names": b"{" + b",".join(b'"%d":1' % i for i in range(SIZE // 11)) + b"}",
    "as many nulls as a body may hold": b"[" + b",".join([b"null"] * 262_000) + b"]",
    "as many names": b"{" + b",".join(b'"%d":1' % i for i in range(65_000)) + b"}",
}
"""For a field."""
LISTS = tuple(kind for kind in HUGE if kind != "text")
"""One of them for each field, beside a text."""
WHOLE = {
    "unknown fields": b"{" + b",".join(b'"u%d":1' % i for i in range(SIZE // 12)) + b"}",
    "long name": b'{"' + b"n" * SIZE + b'":1}',
    "same name": b"{" + repeated(b'"u":1') + b"}",
    "depth": b'{"n":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}",
    "digits": b'{"n":' + b"9" * SIZE + b"}",
    "escapes": b'{"n":"' + b'\\"' * (SIZE // 2) + b'"}',
    "not JSON": b"[" * SIZE,
}
"""Half of them for each route."""
SMALL = {
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


class Answer(NamedTuple):
    status: int
    content: bytes
    seconds: float
    stall: float


class Victim:
    """The server, and how it does."""

    def __init__(self, server) -> None:
        self.server = server
        self._host = server.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(self._host, timeout=60)

    def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def probe(self) -> dict[str, float]:
        return json.loads(self.send("GET", "/probe")[1])

    def answer(self, case: Case) -> Answer:
        self.probe()
        start = time.monotonic()
        status, content = self.send(case.method, case.path, case.body)
        seconds = time.monotonic() - start
        return Answer(status, content, seconds, self.probe()["stall"])

    def memory(self) -> float:
        return self.probe()["memory"] + psutil.Process(self.server.engine().pid).memory_info().rss


@pytest.fixture(scope="module")
def victim(start_server, fixed_drafts, tmp_path_factory) -> Victim:
    database = tmp_path_factory.mktemp("hostile") / "outrider.db"
    options = ("--database", f"sqlite:///{database}", "--admin-api-key", KEY, "--log-level", "error")
    return Victim(start_server(*options, *fixed_drafts, program="stall_server", PYTHONPATH=str(Path(__file__).parent)))


def cases(document: dict) -> Iterator[Case]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" not in content:
                continue
            where = path.replace("{name}", "acme").replace("{key_id}", "none")
            fields = content["application/json"]["schema"]["properties"]
            for index, field in enumerate(fields):
                rest = {name: value for name, value in SMALL.get(path, {}).items() if name != field}
                for kind in ("text", LISTS[index % len(LISTS)]):
                    body = b"%s%s%s:%s}" % (
                        json.dumps(rest).encode()[:-1],
                        b"," if rest else b"",
                        json.dumps(field).encode(),
                        HUGE[kind],
                    )
                    yield Case(method.upper(), where, f"{field}: {kind}", body)
            for kind, body in list(WHOLE.items())[len(path) % 2 :: 2]:
                yield Case(method.upper(), where, kind, body)


def problem_of(answer: Answer) -> str:
    if answer.status >= 500:
        return f"status {answer.status}"
    if answer.status >= 400:
        error = json.loads(answer.content)["error"]
        if len(answer.content) > 2000 or set(error) != {"message", "type", "param", "code"}:
            return f"error {answer.content[:200]!r}"
    if answer.stall > MAX_STALL_SECONDS:
        return f"the event loop stood still for {answer.stall:.3f} s"
    return f"{answer.seconds:.1f} s" if answer.seconds > MAX_ANSWER_SECONDS else ""


@pytest.mark.slow
def test_each_field_of_each_route(victim):
    document = json.loads(victim.send("GET", "/openapi.json")[1])
    victim.send("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 8}')
    before = victim.memory()
    problems, seen = [], []
    for case in cases(document):
        answer = victim.answer(case)
        if problem_of(answer):  # another process may have had the machine
            answer = victim.answer(case)
        if problem_of(answer):
            problems.append(f"{case.method} {case.path} {case.name}: {problem_of(answer)}")
        seen.append((answer.stall, answer.seconds, case.path, case.name, answer.status, answer.content[:150]))
    growth = victim.memory() - before
    for _ in range(5):  # what was freed is given back a little later
        if growth > MAX_GROWTH / 2:
            time.sleep(0.5)
            growth = victim.memory() - before
    print(f"{len(seen)} requests; memory grew by {growth / 2**20:.0f} MiB")
    for line in sorted(seen, key=lambda line: line[0], reverse=True)[:12]:
        print(line)
    assert not problems, "\n".join(problems[:20])
    assert len({path for _, _, path, *_ in seen}) >= len(SMALL)
    assert growth < MAX_GROWTH


WORK = {
    "log-probabilities": {"n": 16, "max_tokens": 60, "logprobs": 20, "return_token_ids": True},
    "log-probabilities of a prompt": {"prompt": "a b " * 500, "echo": True, "logprobs": 20, "prompt_logprobs": 20},
    "stop strings": {"n": 16, "max_tokens": 60, "stop": ["e" * i + "b" * (128 - i) for i in range(64)]},
    "bad words": {"prompt": ["a"] * 4, "bad_words": [f"bad {i}" for i in range(1000)]},
    "biases": {"prompt": ["a"] * 100, "logit_bias": {str(i): 1 for i in range(1024)}},
    "prompts": {"prompt": ["hello world"] * 300},
    "salts": {"n": 128, "cache_salt": "s" * 1024, "user": "u" * 1024},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORK)
def test_the_largest_that_is_served(victim, name):
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True} | WORK[name]
    case = Case("POST", "/v1/completions", name, json.dumps(body).encode())
    answer = victim.answer(case)
    if answer.stall > MAX_STALL_SECONDS:
        answer = victim.answer(case)
    assert answer.status == 200, answer.content[:300]
    assert answer.stall < MAX_STALL_SECONDS
