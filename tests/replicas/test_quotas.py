"""Two replicas count a tenant's limits together, and read no body of a stranger. `make test-ray`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

pytest.importorskip("ray")

from deployed import ON_RAY, free_port

from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.database.store import Store

LIMIT = 40


@pytest.fixture(scope="module")
def database(postgresql: Any) -> Iterator[Database]:
    opened = Database(parse_url(postgresql.new_database()))
    upgrade(opened)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def key(database: Database) -> str:
    """Key of a tenant that may send `LIMIT` requests a minute."""
    store = Store(database)
    store.create_tenant(Tenant(name="team", limits=Limits(requests_per_minute=LIMIT)))
    return store.create_key("team")[1]


@pytest.fixture(scope="module")
def address(
    database: Database, key: str, tmp_path_factory: pytest.TempPathFactory, tethered: Callable[..., list[str]]
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("quotas")
    port = free_port()
    command = [sys.executable, "-m", "outrider.platform.cli.main", "deploy", "--port", str(port), "--no-speculation"]
    command += ["--num-replicas", "2", "--replica-cpus", "0.5", "--journal", str(folder / "journals")]
    variables = ON_RAY | {"OUTRIDER_DATABASE": database.url.render_as_string(hide_password=False)}
    log: Path = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            tethered(command, signal.SIGTERM), stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables
        )
    ends = time.monotonic() + 180
    while "Outrider serves at " not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < ends, log.read_text()[-3000:]
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def ask(address: str, key: str, prompt: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60)


def test_a_quota_holds_over_two_replicas(address: str, key: str, database: Database) -> None:
    """Many more requests than it allows, at once: within one request of it, and a row in the ledger for each."""
    began = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: ask(address, key, f"Hello {number}"), range(3 * LIMIT)))
    allowed = LIMIT + (time.monotonic() - began) * LIMIT / 60
    admitted = [answer for answer in answers if answer.status_code == 200]
    assert LIMIT <= len(admitted) <= allowed
    assert {answer.json()["error"]["param"] for answer in answers if answer.status_code == 429} == {
        "requests_per_minute"
    }
    assert {answer.status_code for answer in answers} == {200, 429}
    with database.read() as connection:
        assert connection.scalar(select(func.count()).where(usage.c.tenant == "team")) == len(admitted)


def test_a_body_is_read_for_a_right_key_alone(address: str, key: str) -> None:
    """The answer comes when the headers have, and the body has not."""
    host, port = address.removeprefix("http://").split(":")

    def status(key: str, seconds: float) -> bytes:
        with socket.create_connection((host, int(port)), timeout=seconds) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"authorization: Bearer " + key.encode() + b"\r\ncontent-length: 4000000\r\n\r\n{"
            )
            return connection.recv(12)

    assert status("sk-or-wrong", 30) == b"HTTP/1.1 401"
    with pytest.raises(TimeoutError):
        status(key, 3)
    refused = ask(address, "sk-or-wrong", "Hello")
    assert refused.json()["error"]["type"] == "AuthenticationError"
    assert refused.headers["x-frame-options"] == "DENY"
