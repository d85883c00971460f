"""Clients that are too many, too slow, too large, or gone."""

import contextlib
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

BOUND = 64


@pytest.fixture(scope="module")
def server(start):
    return start("--max-connections", str(BOUND), "--client-timeout", "3", "--max-num-seqs", "64")


@pytest.fixture
def connect(server):
    address = urlsplit(server.url)
    opened: list[socket.socket] = []

    def connect(data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        opened.append(client)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(30)
        client.connect((address.hostname, address.port))
        client.sendall(data)
        return client

    yield connect
    for client in opened:
        client.close()


@pytest.fixture(autouse=True)
def _as_before(server, check_served):
    """After each fault everything is free again, and others are served."""
    yield
    server.wait_for(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
    server.wait_for(lambda: server.metric("kv_cache_usage_perc") == 0)
    check_served(server)
    assert "Traceback" not in server.output


def post(key: str, content: bytes, *, path: str = "/v1/completions", name: str = "x", more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nx-request-id: {name}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n{more}\r\n"
    ).encode() + content


def body(**fields) -> bytes:
    return json.dumps({"prompt": "Once", "ignore_eos": True} | fields).encode()


def rest(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 16):
            data += piece
    return data


def resident(server) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def test_500_connections_on_a_bound_of_64(server, accounts, connect, outcome):
    """All ask at once: as many as the bound are served, the others get 503 at once; probes pass."""
    request = post(accounts.key, body(max_tokens=200, stream=True), more="connection: close\r\n")
    server.wait_for(lambda: not psutil.Process(server.process.pid).net_connections("tcp")[1:])
    with ThreadPoolExecutor(50) as pool:
        clients = list(pool.map(lambda _: connect(request), range(500)))
        probe = httpx.get(f"{server.url}/health", timeout=60)
        answers = list(pool.map(rest, clients))
    assert probe.status_code == 200
    served = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200")]
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503")]
    assert len(served) + len(refused) == 500
    assert len(served) >= BOUND
    assert server.metric("http_connections_refused_total") >= len(refused)
    assert refused  # how many depends on how fast clients connect, and on how soon places are free again
    assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in served)
    for answer in refused:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["type"] == "OverloadedError"
    outcome(f"{len(served)} were served wholly, {len(refused)} got 503, /health answered 200")


def test_idle_connections(server, connect, check_served, outcome):
    """The bound is taken by clients that say nothing: they go after the timeout."""
    for _ in range(BOUND):
        connect()
    refused = httpx.get(f"{server.url}/v1/models", timeout=60)
    assert refused.status_code == 503
    server.wait_for(lambda: httpx.get(f"{server.url}/v1/models").status_code == 401, 20)
    check_served(server)
    outcome("while they held all places others got 503; they were closed after the timeout")


def test_slow_readers(server, accounts, connect, check_served, outcome):
    """Clients that ask for much and read nothing: memory stays bounded, they are dropped, their requests end."""
    fields = {"max_tokens": 1500, "stream": True, "logprobs": 5, "n": 4, "temperature": 1.0}
    before = resident(server)
    for number in range(8):
        connect(post(accounts.key, body(**fields), name=f"slow-{number}"), receive_buffer=4096)
    server.wait_for(lambda: server.metric("num_requests_running") > 8)
    check_served(server)
    server.wait_for(lambda: len(accounts.by_client_id("slow-")) == 8)
    grown = resident(server) - before
    assert grown < 64 << 20
    assert server.metric("http_clients_dropped_total") > 0
    states = {row["status"] for row in accounts.by_client_id("slow-").values()}
    assert states <= {"abort", "length"}
    outcome(f"8 rows {sorted(states)}; the server's memory grew by less than 64 MiB")


def test_slow_writers(server, accounts, connect, outcome):
    """Requests that never arrive wholly are answered with 408 and closed."""
    whole = post(accounts.key, body(max_tokens=1))
    clients = [connect(whole[: len(whole) * part // 10]) for part in (1, 3, 6, 9)]
    for client in clients:
        answer = rest(client)
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "RequestTimeout"
    outcome("408 RequestTimeout for a header and a body that stop anywhere")


def test_disconnect_storm(server, accounts, connect, outcome):
    """Hundreds hang up at any moment: before, in and after their request, politely or not."""
    dice = random.Random(7)
    whole = post(accounts.key, body(max_tokens=30, stream=True))

    def client(number: int) -> None:
        request = whole.replace(b"x-request-id: x", f"x-request-id: storm-{number}".encode())
        with contextlib.suppress(OSError):
            connection = connect(request[: dice.choice([0, 50, len(request) - 5, len(request), len(request)])])
            time.sleep(dice.choice([0, 0, 0.01, 0.1]))
            if dice.random() < 0.5:  # a reset instead of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(client, range(400)))
    server.wait_for(lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0)
    server.wait_for(lambda: server.metric("ledger_pending_rows") == 0)
    states = [row["status"] for row in accounts.by_client_id("storm-").values()]  # each at most once
    assert set(states) <= {"abort", "length"}
    outcome(f"nothing is left running; {len(states)} had been admitted and have one row each")


@pytest.mark.parametrize("kind", ["length", "chunked"])
def test_bodies_of_50_mb(server, accounts, outcome, kind):
    """Refused with 413 before they are in memory, whether they say how long they are or not."""
    size, before = 50 << 20, resident(server)

    def pieces():
        yield b'{"prompt": "'
        for _ in range(size >> 20):
            yield b"x" * (1 << 20)
        yield b'"}'

    headers = {"Authorization": f"Bearer {accounts.key}", "Content-Type": "application/json"}
    if kind == "length":
        headers["Content-Length"] = str(size + 14)
    with server.http(headers=headers) as http:
        answer = http.post("/v1/completions", content=pieces())
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "RequestTooLarge"
    assert resident(server) - before < 40 << 20
    outcome("413 RequestTooLarge")


def test_long_bodies_of_strangers_are_not_read(server, outcome):
    answer = httpx.post(f"{server.url}/v1/completions", content=b"x" * (50 << 20), timeout=60)
    assert answer.status_code == 401
    outcome("401 before anything of the body is kept")


DEEP = 100_000
ODD = {
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "null character in a name": b'{"pro\\u0000mpt": "x"}',
    "deep lists": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"prompt": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "very long number": b'{"prompt": "x", "seed": ' + b"9" * 100_000 + b"}",
    "very many fields": b"{" + b",".join(b'"f%d": 1' % i for i in range(50_000)) + b"}",
    "the same field twice": b'{"prompt": "x", "prompt": 5}',
    "not an object": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_bodies(server, accounts, outcome, name):
    headers = {"Authorization": f"Bearer {accounts.key}", "Content-Type": "application/json"}
    with server.http(headers=headers) as http:
        answers = [http.post(path, content=ODD[name]) for path in ("/v1/completions", "/v1/chat/completions")]
    for answer in answers:
        assert answer.status_code == 400, answer.text[:500]
        assert answer.json()["error"]["message"]
        assert len(answer.content) < 4000
    outcome("400")


FLOODS = {
    "many headers": b"GET /v1/models HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20_000)),
    "one long header": b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * (2 << 20),
    "a long URL": b"GET /" + b"y" * (2 << 20),
    "many requests at once": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 2000,
    "garbage": random.Random(1).randbytes(100_000),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_of_headers(server, connect, outcome, name):
    before = resident(server)
    client = connect()
    with contextlib.suppress(ConnectionError):  # the server may have closed before all is sent
        client.sendall(FLOODS[name])
    first = rest(client).partition(b"\r\n")[0]
    assert first.split(b" ")[1:2] in ([], [b"400"], [b"401"], [b"414"], [b"431"]), first
    assert resident(server) - before < 20 << 20
    outcome(first.decode() or "closed")
