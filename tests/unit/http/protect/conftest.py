"""A database with tables, and scenarios against a server with a tenant."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.service import Tenancy

from .ledger_server import Server


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory):
    """With tables: migrations take longer than a test."""
    file = tmp_path_factory.mktemp("empty") / "outrider.db"

    async def make():
        await (await Tenancy.open(f"sqlite:///{file}")).close()

    asyncio.run(make())
    return file.read_bytes()


@pytest.fixture
def ledger_server(llm, tmp_path, empty_database):
    """Run a scenario against a server with a tenant "acme" that has these limits."""

    @asynccontextmanager
    async def opened(limits):
        (tmp_path / "outrider.db").write_bytes(empty_database)
        tenancy = await Tenancy.open(f"sqlite:///{tmp_path / 'outrider.db'}")
        try:
            tenancy.store.create_tenant(Tenant(name="acme", limits=limits))
            _, key = tenancy.store.create_key("acme")
            await tenancy.directory.refresh()
            yield Server(llm, tenancy, key)
        finally:
            await tenancy.close()

    def run(scenario, limits=None):
        async def whole():
            async with asyncio.timeout(30), opened(limits or Limits()) as server:
                await scenario(server)

        asyncio.run(whole())

    return run
