"""A server with a folder for batches, whose engine answers from a script; it may be killed and started again."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from outrider.platform.http.app import create_app
from outrider.platform.http.batches.store import ENDED
from outrider.platform.http.server_config import ServerConfig


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    body = body or {"prompt": "ab"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


class Api:
    """Calls of one client."""

    def __init__(self, app: Any, key: str = "") -> None:
        self.app = app
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await self._client.request(method, path, **options)

    async def upload(self, content: bytes | str, status: int = 200, **fields: str) -> dict[str, Any]:
        content = content.encode() if isinstance(content, str) else content
        form = {"purpose": "batch", **fields}
        answer = await self.call("POST", "/v1/files", files={"file": ("in.jsonl", content)}, data=form)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def begin(self, lines: str | bytes, status: int = 200, **fields: Any) -> dict[str, Any]:
        file = await self.upload(lines)
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h", **fields}
        answer = await self.call("POST", "/v1/batches", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return (await self.call("GET", f"/v1/batches/{batch_id}")).raise_for_status().json()

    async def until(self, batch_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while not holds(batch := await self.batch(batch_id)):
                await asyncio.sleep(0.01)
        return batch

    async def end(self, batch_id: str) -> dict[str, Any]:
        return await self.until(batch_id, lambda batch: batch["status"] in ENDED)

    async def content(self, file_id: str) -> list[dict[str, Any]]:
        answer = (await self.call("GET", f"/v1/files/{file_id}/content")).raise_for_status()
        assert answer.headers["content-length"] == str(len(answer.content))
        return [json.loads(line) for line in answer.content.splitlines()]


class Site:
    """Folder and options of servers, one after another."""

    def __init__(self, llm: Any, folder: Path) -> None:
        self.llm = llm
        llm.info = replace(llm.info, max_num_seqs=8)
        self.folder = folder
        self.people: dict[str, Any] = {}
        """Options of `create_app`."""

    def app(self, **options: Any) -> Any:
        config = ServerConfig(served_model_names=("base",), batch_dir=str(self.folder), **options)
        return create_app(self.llm, config, **self.people)

    @asynccontextmanager
    async def server(self, **options: Any) -> AsyncIterator[Api]:
        app = self.app(**options)
        app.state.serving.batches.start(app)
        try:
            yield Api(app)
        finally:
            await app.state.serving.close()

    def run(self, work: Callable[[Api], Awaitable[Any]], **options: Any) -> Any:
        """The result of `work` with a server."""

        async def main() -> Any:
            async with self.server(**options) as api:
                return await work(api)

        return asyncio.run(main())
