"""Helpers of the fault tests; imported by its name."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

FAULTS = Path(__file__).parent


class Accounts:
    """A database with one tenant, and its ledger."""

    def __init__(self, url: str) -> None:
        from outrider.platform.tenancy.accounts.records import Tenant
        from outrider.platform.tenancy.database.connection import Database, parse_url
        from outrider.platform.tenancy.database.migrations.upgrade import upgrade
        from outrider.platform.tenancy.database.store import Store

        self.url = url
        self._database = Database(parse_url(url))
        upgrade(self._database)
        store = Store(self._database)
        store.create_tenant(Tenant(name="acme"))
        _, self.key = store.create_key("acme", scopes=("inference", "admin"))

    def rows(self) -> list[dict[str, Any]]:
        """The whole ledger."""
        from outrider.platform.tenancy.database.schema import usage

        with self._database.read() as connection:
            return [dict(row._mapping) for row in connection.execute(usage.select())]

    def by_client_id(self, prefix: str) -> dict[str, dict[str, Any]]:
        """The rows of requests whose client's id begins so; each has exactly one."""
        rows = [row for row in self.rows() if row["client_request_id"].startswith(prefix)]
        found = {row["client_request_id"]: row for row in rows}
        assert len(found) == len(rows), "a request has two rows"
        return found

    def close(self) -> None:
        self._database.close()


class Load:
    """Streams that run in threads of their own, and their results."""

    def __init__(self, server, key: str, prefix: str, count: int, **body: Any) -> None:
        self.prefix = prefix
        self.lines: dict[str, list[str]] = {f"{prefix}-{i}": [] for i in range(count)}
        self.status: dict[str, int] = {}
        self.broken: dict[str, Exception] = {}
        self._body = {
            "model": "outrider-demo",
            "prompt": "Once",
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},
        } | body
        self._url, self._key = server.url, key
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in self.lines]
        for thread in self._threads:
            thread.start()

    def _run(self, name: str) -> None:
        headers = {"Authorization": f"Bearer {self._key}", "X-Request-Id": name}
        try:
            with (
                httpx.Client(base_url=self._url, headers=headers, timeout=60) as http,
                http.stream("POST", "/v1/completions", json=self._body) as response,
            ):
                self.status[name] = response.status_code
                for line in response.iter_lines():
                    if line:
                        self.lines[name].append(line)
        except httpx.HTTPError as error:
            self.broken[name] = error

    def wait_until_all_stream(self, server, events: int = 1) -> None:
        server.wait_for(lambda: all(len(lines) >= events for lines in self.lines.values()))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client waits forever"

    def chunks(self, name: str) -> list[dict[str, Any]]:
        """All events of a stream but `[DONE]`."""
        return [json.loads(line.removeprefix("data: ")) for line in self.lines[name] if line != "data: [DONE]"]

    def num_tokens(self, name: str) -> int:
        """Number of delivered tokens."""
        return max(chunk["usage"]["completion_tokens"] for chunk in self.chunks(name) if "usage" in chunk)

    def texts(self) -> dict[str, str]:
        """Texts of the streams, all of which have ended."""
        assert all(lines[-1] == "data: [DONE]" for lines in self.lines.values())
        return {
            name: "".join(choice["text"] for chunk in self.chunks(name) for choice in chunk["choices"])
            for name in self.lines
        }


@contextlib.contextmanager
def file_limit(process, size: int) -> Iterator[None]:
    """No file of `process` may become longer than `size` bytes: to it, the disk is full."""
    import psutil

    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)


def served(server, key: str, **body: Any) -> httpx.Response:
    with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
        return http.post("/v1/completions", json={"prompt": "All", "max_tokens": 2} | body)
