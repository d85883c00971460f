"""The bounds on connections and on arriving bytes, with sockets: refusals, their messages, and what is served."""

import contextlib
import time

import pytest
from connection_helpers import CLOSE, GET, answer, error, post, rest

from outrider.platform.http.protect import connections

# --- how many ---


def test_connections_above_the_bound_get_503(serve):
    served = serve(max_connections=2)
    held = [served.connect(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n") for _ in range(2)]
    served.until(lambda: served.admission.num_open == 2)
    for request in (GET, post(b"/echo", 1 << 20) + b"x" * 1000):  # a reset must not swallow the answer
        refused = served.ask(request)
        assert refused[1][b"retry-after"] == b"1"
        assert error(refused) == (503, "OverloadedError", "The server has 2 connections open already (max_connections)")
    probe = served.ask(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (probe[0], probe[1][b"connection"]) == (200, b"close")
    held.pop().close()
    served.until(lambda: served.admission.num_open == 1)
    assert served.ask(CLOSE)[0] == 200
    held.pop().close()


def test_most_of_very_many_connections_are_dropped(serve, monkeypatch):
    monkeypatch.setattr(connections, "MAX_REFUSED", 3)
    served = serve(max_connections=1)
    held = [served.connect(GET)]
    served.until(lambda: served.admission.num_open == 1)
    held += [served.connect() for _ in range(3)]
    served.until(lambda: served.admission.num_refused == 3)
    with contextlib.suppress(ConnectionError), served.connect() as dropped:
        assert dropped.recv(1) == b""  # or reset
    for client in held:
        client.close()


def test_silent_connections_above_the_bound_are_closed_soon(serve, monkeypatch):
    monkeypatch.setattr(connections, "_REFUSED_SECONDS", 0.2)
    served = serve(max_connections=1)
    with served.connect(GET), served.connect() as silent:
        with contextlib.suppress(ConnectionError):
            assert silent.recv(1) == b""
        served.until(lambda: served.admission.num_refused == 0)


# --- what arrives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nname: a\x00b\r\n\r\n",
        b"CONNECT other:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",  # smuggling
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http(serve, data):
    served = serve()
    assert error(served.ask(data)) == (400, "BadRequestError", "This is not a valid HTTP request")


def header(size: int) -> bytes:
    return b"GET /echo HTTP/1.1\r\nconnection: close\r\nx: " + b"a" * size + b"\r\n\r\n"


def test_size_of_headers(serve):
    served = serve()
    others = len(b"connection" + b"close" + b"x")
    assert served.ask(header(connections.MAX_HEADER_BYTES - others))[0] == 200
    refused = error(served.ask(header(connections.MAX_HEADER_BYTES - others + 1)))
    assert refused[:2] == (431, "BadRequestError")
    assert "65536 bytes" in refused[2]


def test_number_of_headers(serve):
    served = serve()
    lines = b"".join(b"x-%d: 1\r\n" % i for i in range(connections.MAX_HEADERS - 1))
    assert served.ask(b"GET /echo HTTP/1.1\r\nconnection: close\r\n" + lines + b"\r\n")[0] == 200
    assert served.ask(b"GET /echo HTTP/1.1\r\nconnection: close\r\n" + lines + b"one: more\r\n\r\n")[0] == 431


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n", b"GET /", b""])
def test_headers_without_an_end(serve, start, monkeypatch):
    """A flood of one line, of many, of the URL, and of empty lines before a request."""
    monkeypatch.setattr("outrider.platform.http.protect.connections.LINGER_SECONDS", 0.2)
    served = serve()
    piece = b"x: 1\r\n" * 1000 if start.endswith(b"\n") else b"\r\n" * 1000 if not start else b"a" * 6000
    with served.connect(start) as client:
        with contextlib.suppress(ConnectionError):  # after the answer, what is sent on meets a closed door
            for _ in range(1000):
                client.sendall(piece)
        with contextlib.suppress(ConnectionError):
            assert answer(client)[0] in (414, 431)
        served.until(lambda: served.admission.num_open == 0)


def test_length_of_the_url(serve):
    served = serve()
    path = b"/echo?" + b"a" * (connections.MAX_URL_BYTES - 6)
    request = b"GET %b HTTP/1.1\r\nconnection: close\r\n\r\n"
    assert served.ask(request % path)[0] == 200
    assert error(served.ask(request % (path + b"a")))[0] == 414


@pytest.mark.parametrize("hosts", [b"host: a\r\nHOST: b\r\n", b"Host: a\r\nx: 1\r\nhost: a\r\n", b"host:\r\nhost:\r\n"])
def test_two_hosts_are_refused(serve, hosts):
    """A proxy may have judged by one of them, and the application by the other."""
    served = serve()
    request = b"GET /echo HTTP/1.1\r\n%bconnection: close\r\n\r\n"
    assert error(served.ask(request % hosts))[:2] == (400, "BadRequestError")
    assert served.app.scopes == []
    one = b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"
    assert served.ask(one + request % b"host: a\r\n")[0] == 200, "each request has its own"


def test_trailers_are_no_headers(serve):
    served = serve()
    head = b"POST /echo HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    answered = served.ask(head + b"1\r\nx\r\n0\r\nauthorization: Bearer stolen\r\n\r\n")
    assert answered[0] == 200
    assert b"authorization" not in dict(served.app.scopes[-1]["headers"])


def test_an_upgrade_is_answered_as_it_is(serve):
    """As curl --http2 asks, or a websocket client."""
    served = serve()
    for kind in (b"h2c", b"websocket"):
        request = b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: " + kind + b"\r\n\r\n"
        assert served.ask(request)[0] == 200


def test_keep_alive(serve):
    served = serve()
    with served.connect() as client:
        for request in (GET, GET, CLOSE):
            client.sendall(request)
            if request is CLOSE:
                assert answer(client)[0] == 200
            else:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


# --- pipelining -----------------------------------------------------------------------------------------------------


def test_a_few_requests_may_wait(serve):
    served = serve()
    with served.connect(GET * 5 + CLOSE) as client:
        assert rest(client).count(b"HTTP/1.1 200") == 6


def test_too_many_pipelined_requests_close_the_connection(serve):
    served = serve()
    waiting = b"GET /wait HTTP/1.1\r\n\r\n"
    with served.connect(waiting * 1000) as client:
        with contextlib.suppress(ConnectionError):
            assert client.recv(1 << 16) == b""
        served.until(lambda: served.app.gone == 1)
    assert len(served.app.scopes) == 1


def test_the_first_of_several_requests_is_aborted_on_disconnect(serve):
    served = serve()
    client = served.connect(b"GET /wait HTTP/1.1\r\n\r\n" * 2)
    served.until(lambda: served.app.scopes)
    client.close()
    served.until(lambda: served.app.gone == 1)
    time.sleep(0.1)
    assert len(served.app.scopes) == 1  # the second is not begun: its client has gone
