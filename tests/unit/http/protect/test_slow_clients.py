"""Clients that send or read slowly or not at all, and answers that come before their request has ended."""

import contextlib
import time

import pytest
from connection_helpers import CLOSE, answer, error, post

from outrider.platform.http.protect import connections

# --- slow clients ---


@pytest.mark.parametrize("begin", [b"GET /echo HT", post(b"/echo", 100), post(b"/echo", 100) + b"some"])
def test_a_request_that_does_not_arrive(serve, begin):
    served = serve(client_timeout=0.3)
    refused = error(served.ask(begin))
    assert refused == (408, "RequestTimeout", "The request did not arrive within 0.3 s")
    told = int(b"\r\n\r\n" in begin)  # the application is notified that the client has gone
    served.until(lambda: served.app.gone == told)


@pytest.mark.slow
def test_dripping_does_not_help(serve, monkeypatch):
    """A byte now and then is no progress; a body at the least rate is."""
    monkeypatch.setattr(connections, "MIN_BODY_RATE", 100)
    served = serve(client_timeout=0.5)
    with served.connect(post(b"/echo", 100)) as client:
        client.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                client.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    assert client.recv(1 << 16).startswith(b"HTTP/1.1 408")
                    break
            else:
                pytest.fail("a hundred bytes at a fifth of the least rate were waited for")
    with served.connect(post(b"/echo", 1800)) as client:
        for _ in range(18):
            client.sendall(b"x" * 100)
            time.sleep(0.06)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_closed_without_an_answer(serve):
    served = serve(client_timeout=0.2)
    with served.connect() as client, contextlib.suppress(ConnectionError):
        assert client.recv(1) == b""
    served.until(lambda: served.admission.num_open == 0)


@pytest.mark.slow
def test_a_client_may_wait_for_its_answer(serve):
    """It is the server that is slow."""
    served = serve(client_timeout=0.2)
    with served.connect(b"GET /wait HTTP/1.1\r\n\r\n") as client:
        client.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert served.app.gone == 0


@pytest.mark.slow
def test_time_in_which_the_server_stood_still_is_not_the_clients(serve, monkeypatch):
    monkeypatch.setattr(connections, "_STANDSTILL_SECONDS", 1.0)
    served = serve(client_timeout=2.0)
    with served.connect(post(b"/echo", 4) + b"so") as client:
        served.until(lambda: served.app.scopes)
        served.server.loop.call_soon_threadsafe(time.sleep, 2.5)
        time.sleep(2.6)
        client.sendall(b"me")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_nothing_is_dropped(serve):
    served = serve(client_timeout=0.5)
    served.app.size = 64 << 20
    with served.connect(b"GET /big HTTP/1.1\r\n\r\n", SO_RCVBUF=4096):
        served.until(lambda: served.admission.num_open == 1)
        (connection,) = served.server.server_state.connections
        served.until(lambda: connection.transport.get_write_buffer_size() > 0)
        assert connection.transport.get_write_buffer_size() < 1 << 18  # what waits for the client is bounded
        served.until(lambda: served.admission.num_open == 0)
    served.until(lambda: served.app.gone == 1)


@pytest.mark.slow
def test_a_slow_reader_is_served(serve):
    served = serve(client_timeout=1.5)
    with served.connect(b"GET /big HTTP/1.1\r\nconnection: close\r\n\r\n", SO_RCVBUF=4096) as client:
        total, begun = 0, time.monotonic()
        while piece := client.recv(1 << 15):
            total += len(piece)
            if time.monotonic() - begun < 2.5:
                time.sleep(0.02)
    assert total > 1 << 20


# --- answers that come before the request has ended ------------------------------------------------------------------


def test_an_early_answer_arrives_and_the_connection_serves_on(serve):
    served = serve()
    size = 50 << 20
    with served.connect(post(b"/early", size)) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        for _ in range(size >> 20):
            client.sendall(b"x" * (1 << 20))
        client.sendall(CLOSE)
        assert answer(client)[0] == 200
    assert not served.app.scopes[0].get("body")


def test_bytes_after_an_early_answer_are_bounded(serve, monkeypatch):
    monkeypatch.setattr(connections, "MAX_DISCARDED_BYTES", 1 << 20)
    served = serve()
    with served.connect(post(b"/early", 1 << 30)) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            client.sendall(b"x" * (200 << 20))


@pytest.mark.slow
def test_a_client_that_never_closes_after_a_refusal_is_closed(serve, monkeypatch):
    monkeypatch.setattr("outrider.platform.http.protect.connections.LINGER_SECONDS", 0.2)
    served = serve()
    with served.connect(b"GET / HTTP/1.1\r\nbad header\r\n") as client:
        assert answer(client)[0] == 400
        served.until(lambda: served.admission.num_open == 0)
