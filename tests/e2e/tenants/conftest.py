"""A server with a database. Each file has tenants of its own, which are there before the server starts."""

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from outrider.models.demo import demo_adapters
from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.accounts.records import StoredAdapter, Tenant
from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.database.store import Store

OPERATOR = "operator-key-of-the-tests"
BLOCK = 16
TENANTS = {
    **{name: Tenant(name=name, max_adapters=2) for name in ("acme", "globex", "routes", "neighbour")},
    "batches": Tenant(name="batches", limits=Limits(max_concurrent_requests=4)),
    "few-batches": Tenant(name="few-batches", limits=Limits(requests_per_minute=60)),
    "free": Tenant(name="free"),
    "slow": Tenant(name="slow", limits=Limits(requests_per_minute=2, tokens_per_minute=5000)),
    "poor": Tenant(name="poor", limits=Limits(token_budget=60, budget_period="month")),
    "narrow": Tenant(name="narrow", limits=Limits(max_concurrent_requests=1, max_output_tokens=20)),
}
STORED = {"acme": "old", "routes": "mine"}
"""Names of adapters that tenants had before the server started; all are the demo's `sql`."""


class Site:
    """The database, a folder of adapters of acme and globex, and the server."""

    def __init__(self, folder: Path, start: Callable) -> None:
        self.folder, self._start = folder, start
        url = f"sqlite:///{folder}/outrider.db"
        self.database = Database(parse_url(url))
        upgrade(self.database)
        store = Store(self.database)
        self.keys = {"operator": OPERATOR}
        for name, tenant in TENANTS.items():
            store.create_tenant(tenant)
            self.keys[name] = store.create_key(name)[1]
        for name, adapter in STORED.items():
            store.put_adapter(StoredAdapter(tenant=name, name=adapter, path=str(demo_adapters()["sql"])))
        for name in ("acme", "globex"):
            shutil.copytree(demo_adapters()["sql"], folder / "adapters" / name / "mine")
        self._options = [
            *("--database", url, "--admin-api-key", OPERATOR, "--lora-root", str(folder / "adapters")),
            *("--max-model-len", "512", "--block-size", str(BLOCK), "--dtype", "float32", "--shutdown-timeout", "0"),
            *("--batch-dir", str(folder / "batches"), "--batch-concurrency", "4"),
        ]

    @functools.cached_property
    def server(self):
        return self._start(*self._options)

    def start_again(self):
        """Another server with the same database: the first must have ended."""
        self.server = self._start(*self._options)
        return self.server

    def http(self, who: str) -> httpx.Client:
        """A client of a tenant, or of the operator."""
        return self.server.http(headers={"Authorization": f"Bearer {self.keys[who]}"})

    def rows(self, tenant: str) -> list:
        """The tenant's rows of the ledger."""
        with self.database.read() as connection:
            query = usage.select().where(usage.c.tenant == tenant).order_by(usage.c.finished_at)
            return list(connection.execute(query))


@pytest.fixture(scope="session")
def site(start_shared, fixed_drafts, tmp_path_factory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("tenants"), lambda *options: start_shared(*options, *fixed_drafts))
    yield site
    site.database.close()


@pytest.fixture(scope="module")
def clients(site) -> Iterator[Callable[[str], httpx.Client]]:
    """clients(name of a tenant, or "operator")"""
    with ExitStack() as opened:
        yield lambda who: opened.enter_context(site.http(who))
