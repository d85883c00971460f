"""A replica: the server's application called without a socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from outrider.platform.core.config import EngineArgs
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.replicas.replica import ForwardedRequest, Replica, claim, unclaimed


class Application:
    """Echo of a body, piece by piece, until the client goes."""

    def __init__(self) -> None:
        self.ended = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["path"].encode())]})
        gone = asyncio.create_task(receive())
        for _ in range(1000 if message["body"] == b"forever" else 2):
            await send({"type": "http.response.body", "body": message["body"], "more_body": True})
            await asyncio.wait([gone], timeout=0.001)
            if gone.done():
                self.ended = gone.result()["type"]
                return
        gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ended = "answered"


def make_replica(app: Application) -> Replica:
    replica = Replica(EngineArgs(), ServerConfig(), "second")
    replica.app = app
    return replica


def request(body: bytes) -> ForwardedRequest:
    return ForwardedRequest("POST", "/v1/chat/completions", b"", [], body, None)


def test_an_answer_is_a_stream_of_messages() -> None:
    async def run() -> list[dict[str, Any]]:
        return [message async for message in make_replica(Application()).answer(request(b"hello"))]

    messages = asyncio.run(run())
    assert messages[0]["headers"][0] == (b"x-path", b"/v1/chat/completions")
    assert {(b"x-frame-options", b"DENY"), (b"x-replica", b"second")} <= set(messages[0]["headers"])
    assert [message["body"] for message in messages[1:]] == [b"hello", b"hello", b""]


def test_a_client_that_stops_reading_has_hung_up() -> None:
    app = Application()

    async def run() -> None:
        messages: AsyncIterator[dict[str, Any]] = make_replica(app).answer(request(b"forever"))
        for _ in range(3):
            await anext(messages)
        await messages.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert app.ended == "http.disconnect"


def test_the_folder_of_a_dead_replica_is_taken_over(tmp_path: Path) -> None:
    first, file = claim(tmp_path)
    second, _ = claim(tmp_path)
    assert (first.name, second.name) == ("0", "1")
    assert list(unclaimed(tmp_path)) == []
    os.close(file)  # as the system does when a process dies
    ((left, kept),) = unclaimed(tmp_path)
    assert left == first
    os.close(kept)
    assert claim(tmp_path)[0] == first
