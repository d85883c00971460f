"""Two real servers of one PostgreSQL with --shared-limits: a tenant has its limits once, not once a server."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import httpx
import pytest
from sqlalchemy import select

from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.database.store import Store

LIMIT = 50


@pytest.fixture
def database_url(postgresql):
    return postgresql.new_database()


@pytest.fixture
def database(database_url):
    database = Database(parse_url(database_url))
    upgrade(database)
    yield database
    database.close()


def new_key(database, name, **limits) -> str:
    store = Store(database)
    store.create_tenant(Tenant(name=name, limits=Limits(**limits)))
    return store.create_key(name)[1]


def test_two_servers(database, database_url, start_server, tmp_path):
    quick = new_key(database, "quick", requests_per_minute=LIMIT)
    narrow = new_key(database, "narrow", max_concurrent_requests=1)
    common = ("--database", database_url, "--shared-limits", "--no-speculation", "--open-metrics", "--journal")
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    servers = [
        start_server(*common, str(tmp_path / f"journal{i}"), ready=False, program="short_lease_server", PYTHONPATH=path)
        for i in range(2)
    ]
    for server in servers:
        server.wait_until_ready()

    clients = [server.http() for server in servers]

    def ask(number: int, key: str, tokens: int = 1) -> httpx.Response:
        body = {"prompt": "All", "max_tokens": tokens, "ignore_eos": True}
        return clients[number % 2].post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

    began = monotonic()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: ask(number, quick), range(3 * LIMIT)))
    admitted = [answer for answer in answers if answer.status_code == 200]
    assert LIMIT <= len(admitted) <= LIMIT + (monotonic() - began) * LIMIT / 60
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {(answer.status_code, answer.json()["error"]["param"]) for answer in refused} == {
        (429, "requests_per_minute")
    }
    assert all(answer.headers["x-ratelimit-limit-requests"] == str(LIMIT) for answer in answers)
    with database.read() as connection:
        rows = connection.execute(select(usage.c.request_id).where(usage.c.tenant == "quick")).scalars().all()
    assert sorted(rows) == sorted(answer.json()["id"] for answer in admitted)

    # kill -9 of the server that has the tenant's only slot: it is free again when the lease has ended.
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, 0, narrow, 1900)
        servers[0].wait_for(lambda: clients[0].get("/load").json()["server_load"] == 1)
        waiting = pool.submit(ask, 1, narrow)
        servers[1].wait_for(lambda: "limiter_waiting 1.0" in clients[1].get("/metrics").text)
        servers[0].process.kill()
        with pytest.raises(httpx.HTTPError):
            running.result()
        assert waiting.result().status_code == 200
    for server in servers:
        server.stop()
