"""A server of the real protocol around an application that does what its path says, and sockets to talk to it; imported
by its name."""

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time

import uvicorn

from outrider.platform.http.protect.connections import Admission, Connection, check_all
from outrider.platform.http.protect.hardening import SECURITY_HEADERS


class App:
    """`/echo` answers the body, `/early` answers without reading it, `/big` sends `size` bytes, `/wait` never ends."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.scopes: list[dict] = []
        self.gone = 0
        self.size = 1 << 20

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        body = b""
        if scope["path"] in ("/echo", "/health"):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone += 1
                    return
                body += message["body"]
                more = message["more_body"]
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone += 1
            return
        headers = [] if scope["path"] == "/big" else [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/big":
            for _ in range(self.size >> 14):
                await send({"type": "http.response.body", "body": b"x" * (1 << 14), "more_body": True})
        await send({"type": "http.response.body", "body": body})
        self.gone += (await receive())["type"] == "http.disconnect"


class Served:
    def __init__(self, app: App, **limits) -> None:
        self.app = app
        self.admission = Admission(**{"max_connections": 100, "client_timeout": 30.0} | limits)
        self.listener = socket.create_server(("127.0.0.1", 0))
        options = uvicorn.Config(
            app, http=functools.partial(Connection, admission=self.admission), ws="none", lifespan="off",
            log_config=None, server_header=False, headers=SECURITY_HEADERS, timeout_graceful_shutdown=1,
        )  # fmt: skip

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self):
                yield

            async def on_tick(self, counter):
                self.loop = asyncio.get_running_loop()
                check_all(self.server_state.connections)
                return await super().on_tick(counter)

        self.server = Server(options)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.listener])))
        self.thread.start()

    def connect(self, data: bytes = b"", **options) -> socket.socket:
        client = socket.socket()
        for name, value in options.items():
            client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        client.settimeout(20)
        client.connect(self.listener.getsockname())
        client.sendall(data)
        return client

    def ask(self, data: bytes) -> tuple[int, dict, bytes]:
        with self.connect(data) as client:
            return answer(client)

    def until(self, condition) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def rest(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    return data


def parse(data: bytes) -> tuple[int, dict, bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
    return int(first.split()[1]), headers, body


def answer(client: socket.socket) -> tuple[int, dict, bytes]:
    """The answer, after which the server must close."""
    return parse(rest(client))


def error(answer: tuple[int, dict, bytes]) -> tuple[int, str, str]:
    status, headers, body = answer
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"connection"] == b"close"
    assert headers[b"x-content-type-options"] == b"nosniff"
    value = json.loads(body)["error"]
    assert set(value) == {"message", "type", "param", "code"}
    return status, value["type"], value["message"]


GET = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSE = b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def post(path: bytes, length: int) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, length)
