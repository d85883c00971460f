"""Adapters that are loaded over HTTP, in the database: over restarts, and on the other servers."""

import asyncio
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from outrider.platform.client.adapters.sources import sources
from outrider.platform.core.adapter_names import engine_name
from outrider.platform.core.errors import AdapterError, EngineDeadError, InvalidUserInputError, NotFoundError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.http.adapters import database_sync
from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts import directory
from outrider.platform.tenancy.accounts.records import StoredAdapter, Tenant
from outrider.platform.tenancy.database.connection import DatabaseUnavailableError
from outrider.platform.tenancy.service import Tenancy

from ..conftest import FakeAsyncLLM


@asynccontextmanager
async def application(url, llm=None, prepare=None, server="one"):
    """A server, as far as adapters are concerned."""
    journal = Path(url.removeprefix("sqlite:///")).with_name(server)
    tenancy = await Tenancy.open(url, journal=journal, admin_api_keys=("key",))
    try:
        config = ServerConfig(served_model_names=("base",), lora_roots=("/",))
        app = create_app(llm or FakeAsyncLLM(), config, tenancy=tenancy)
        serving = app.state.serving
        if prepare is not None:
            await prepare(serving)
        await serving.follow_database()
        yield app
        await serving.close()
    finally:
        await tenancy.close()


@asynccontextmanager
async def running(*args, **options):
    """Shared state of such a server."""
    async with application(*args, **options) as app:
        yield app.state.serving


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(directory, "POLL_SECONDS", 0.05)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/x.db"


def adapter(name, tenant="", path="/a", **fields):
    return StoredAdapter(tenant=tenant, name=name, path=path, **fields)


async def load(serving, stored, max_adapters=None, **options):
    request = LoRARequest(stored.name, path=stored.path, draft_path=stored.draft_path)
    await serving.models.load(request, tenant=stored.tenant, pinned=stored.pinned, **options)
    await serving.adapter_sync.remember(stored, max_adapters)


async def until(condition):
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def names(serving):
    return set(serving.llm.adapters.requests)


def test_a_server_that_starts_has_them_again(url):
    async def run():
        async with running(url) as serving:
            await serving.tenancy.database.run(serving.tenancy.store.create_tenant, Tenant(name="acme"))
            await load(serving, adapter("sql"))
            await load(serving, adapter("sql", "acme", "/own", draft_path="/d"))
            await load(serving, adapter("hot", pinned=True, digest="0a"))
            await load(serving, adapter("gone"))
            assert await serving.adapter_sync.forget("", "gone")
            assert not await serving.adapter_sync.forget("", "gone")
        async with running(url) as serving:
            own = engine_name("acme", "sql")
            assert names(serving) == {"sql", own, "hot"}
            assert (serving.llm.adapters.requests[own].path, serving.llm.adapters.requests[own].draft_path) == (
                "/own",
                "/d",
            )
            assert serving.llm.in_engine["sql"].digest == "", "it is read when it is asked for"
            assert serving.llm.in_engine["hot"].pinned
            digests = {name: request.digest for name, request in serving.llm.adapters.requests.items()}
            assert digests == {"sql": None, own: None, "hot": "0a"}, "other files than were loaded are refused"

    asyncio.run(run())


def test_servers_follow_each_other(url):
    async def run():
        async with running(url) as one, running(url, server="two") as two:
            await one.tenancy.database.run(one.tenancy.store.create_tenant, Tenant(name="acme"))
            await load(one, adapter("sql", "acme"))
            own = engine_name("acme", "sql")
            await until(lambda: own in names(two))
            await load(one, adapter("sql", "acme", "/newer"), load_inplace=True)
            await until(lambda: two.llm.adapters.requests[own].path == "/newer")
            await one.adapter_sync.pin("acme", "sql", True)
            await until(lambda: two.llm.in_engine[own].pinned)
            await one.models.unload("sql", tenant="acme")
            await one.adapter_sync.forget("acme", "sql")
            await until(lambda: own not in names(two))
            await load(two, adapter("last", "acme"))
            await until(lambda: engine_name("acme", "last") in names(one))
            await one.tenancy.database.run(one.tenancy.store.delete_tenant, "acme")
            await until(lambda: not names(one) and not names(two))

    asyncio.run(run())


def test_a_failed_load_stops_nothing_and_is_retried(url, caplog):
    async def run():
        async with running(url) as serving:
            for name, path in (("a", "/a"), ("bad", "/broken"), ("c", "/c")):
                await serving.adapter_sync.remember(adapter(name, path=path), None)
        llm = FakeAsyncLLM(error=AdapterError("there is no such folder"))
        async with running(url, llm) as serving:
            assert names(serving) == {"a", "c"}
            await serving.adapter_sync.remember(adapter("d"), None)
            await asyncio.sleep(0.4)  # some looks
            assert len([r for r in caplog.records if "'bad'" in r.getMessage()]) == 1, "it is logged once"
            await serving.adapter_sync.remember(adapter("bad", path="/repaired"), None)
            assert await serving.adapter_sync.forget("", "bad")

    asyncio.run(run())


def test_the_command_line_is_stronger(url, caplog):
    async def run():
        async with running(url) as serving:
            await load(serving, adapter("sql", path="/database"))
            await load(serving, adapter("base-to-be"))

        async def command_line(serving):
            await serving.models.load(LoRARequest("sql", path="/command-line"))

        async with running(url, prepare=command_line) as serving:
            assert serving.llm.adapters.requests["sql"].path == "/command-line"
            assert "hidden" in caplog.text

    asyncio.run(run())


def test_loads_that_failed_during_a_restart_are_retried(url, monkeypatch):
    monkeypatch.setattr(database_sync, "RETRY_SECONDS", 0.01)

    async def run():
        async with running(url) as one, running(url, server="two") as two:
            register = two.llm.adapters.register
            refused = []

            async def dead(requests):
                refused.append([request.name for request in requests])
                raise EngineDeadError("it is being started again")

            two.llm.adapters.register = dead
            await load(one, adapter("sql"))
            await until(lambda: len(refused) > 1)
            assert names(two) == set()
            two.llm.adapters.register = register
            await until(lambda: names(two) == {"sql"})  # nothing has changed in the database meanwhile

    asyncio.run(run())


def test_adapters_that_could_not_be_read_are_read_when_the_database_is_back(url, monkeypatch, caplog):
    monkeypatch.setattr(database_sync, "RETRY_SECONDS", 0.01)

    async def run():
        async with running(url) as one, running(url, server="two") as two:
            away, asked = two.tenancy.store.list_adapters, []

            def fails():
                asked.append(1)
                raise DatabaseUnavailableError("it is away")

            two.tenancy.store.list_adapters = fails
            await load(one, adapter("sql"))
            await until(lambda: len(asked) > 2)
            two.tenancy.store.list_adapters = away
            await until(lambda: names(two) == {"sql"})

    asyncio.run(run())
    assert sum("cannot be read" in message for message in caplog.messages) == 1


def test_limits_hold_over_all_servers(url):
    async def run():
        async with running(url) as serving:
            sync = serving.adapter_sync
            await serving.tenancy.database.run(serving.tenancy.store.create_tenant, Tenant(name="acme"))
            await asyncio.gather(*(sync.remember(adapter(name, "acme"), 2) for name in ("a", "b")))
            with pytest.raises(InvalidUserInputError, match="2 adapters"):
                await sync.remember(adapter("c", "acme"), 2)
            await sync.remember(adapter("a", "acme", "/again"), 2)
            await sync.remember(adapter("c", "acme"), None)
            with pytest.raises(NotFoundError):
                await sync.remember(adapter("a", "nobody"), 2)
            stored = await serving.tenancy.database.run(serving.tenancy.store.list_adapters)
            assert sorted(row.name for row in stored) == ["a", "b", "c"]

    asyncio.run(run())


def test_shared_prefixes_reach_the_engines_client(url):
    async def run():
        async with running(url) as one, running(url, server="two") as two:
            assert two.llm.shared_prefixes == []
            await one.tenancy.database.run(one.tenancy.store.add_prefix, "system", [1, 2, 3])
            await until(lambda: two.llm.shared_prefixes == [[1, 2, 3]] == one.llm.shared_prefixes)
            await one.tenancy.database.run(one.tenancy.store.remove_prefix, "system")
            await until(lambda: two.llm.shared_prefixes == [])

    asyncio.run(run())


def test_a_database_that_is_away_refuses_loads(url):
    async def run():
        async with running(url) as serving:

            def away(*arguments):
                raise DatabaseUnavailableError("away")

            serving.tenancy.store.put_adapter = away
            with pytest.raises(DatabaseUnavailableError):
                await serving.adapter_sync.remember(adapter("x"), None)

    asyncio.run(run())


@pytest.mark.parametrize("then", ["unload", "load"])
def test_changes_of_one_adapter_take_turns(url, tmp_path, monkeypatch, then):
    """Otherwise the server would have another adapter, or none, than the database says it has."""
    free = threading.Event()

    def files_digest(folder, most):
        if folder.path.endswith("a"):
            free.wait(20)

    monkeypatch.setattr(sources, "files_digest", files_digest)

    async def run():
        async with application(url) as app:
            serving = app.state.serving
            options = {"base_url": "http://test", "headers": {"Authorization": "Bearer key"}}

            async def change(verb, path):
                more = {"lora_path": str(path), "load_inplace": True} if verb == "load" else {}
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), **options) as client:
                    return (await client.post(f"/v1/{verb}_lora_adapter", json={"lora_name": "x"} | more)).status_code

            paths = [tmp_path / "a", tmp_path / "b"]
            for path in paths:
                path.mkdir()
            first = asyncio.create_task(change("load", paths[0]))
            await until(lambda: names(serving))
            second = asyncio.create_task(change(then, paths[1]))
            await asyncio.wait([second], timeout=0.1)
            free.set()
            assert await asyncio.gather(first, second) == [200, 200]
            stored = await serving.tenancy.database.run(serving.tenancy.store.list_adapters)
            here = {name: request.path for name, request in serving.llm.adapters.requests.items()}
            assert here == {row.name: row.path for row in stored} == ({} if then == "unload" else {"x": str(paths[1])})

    asyncio.run(run())
