"""A server's copy of the keys, and its delay."""

import asyncio
import threading
import time

import pytest

from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.tenancy.accounts import directory as directory_module
from outrider.platform.tenancy.accounts.directory import MAX_AGE_SECONDS, Directory
from outrider.platform.tenancy.accounts.principal import Limits, Principal
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.database.connection import Database, DatabaseUnavailableError
from outrider.platform.tenancy.database.store import Store
from outrider.platform.tenancy.service import Tenancy

pytestmark = pytest.mark.slow


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sqlite_store(sqlite) -> Store:
    store = Store(sqlite)
    store.create_tenant(Tenant(name="acme", weight=2.0, limits=Limits(token_budget=9), max_adapters=4))
    return store


@pytest.fixture
def directory(sqlite):
    """A directory that reads only on command."""
    directory = Directory(sqlite, clock=Clock(), age_clock=Clock())
    yield directory
    asyncio.run(directory.close())


def refresh(directory: Directory) -> Directory:
    asyncio.run(directory.refresh())
    return directory


async def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


def test_a_principal_has_all_that_routes_need(sqlite_store, directory):
    key, secret = sqlite_store.create_key("acme", scopes=("inference",), limits=Limits(max_output_tokens=3))
    principal = refresh(directory).authenticate(secret)
    assert principal == Principal(
        tenant="acme", key_id=key.id, scopes=frozenset({"inference"}), weight=2.0, tenant_limits=Limits(token_budget=9),
        key_limits=Limits(max_output_tokens=3), max_adapters=4,
    )  # fmt: skip
    assert not principal.is_admin


def test_keys_that_are_valid_no_more(sqlite_store, sqlite):
    """For requests that have waited since they came."""
    clock = Clock()
    directory = Directory(sqlite, clock=clock)
    revoked, secret = sqlite_store.create_key("acme")
    _, expiring = sqlite_store.create_key("acme", expires_at=4e9)
    principals = [refresh(directory).authenticate(key) for key in (secret, expiring)]
    assert all(map(directory.is_valid, principals))
    sqlite_store.revoke_key(revoked.id)
    refresh(directory)
    assert [*map(directory.is_valid, principals)] == [False, True]
    clock.now = 4e9
    assert [*map(directory.is_valid, principals)] == [False, False]
    assert directory.is_valid(Principal()), "an operator's, which is in no database"
    asyncio.run(directory.close())


def test_a_changed_principal_has_a_later_reading(sqlite_store, directory):
    _, secret = sqlite_store.create_key("acme")
    before = refresh(directory).authenticate(secret)
    assert refresh(directory).authenticate(secret) is before
    sqlite_store.update_tenant("acme", {"weight": 3.0})
    assert refresh(directory).authenticate(secret).reading > before.reading > 0


def test_refused_keys(sqlite_store, directory):
    _, secret = sqlite_store.create_key("acme")
    assert directory.authenticate(secret) is None  # nothing has been read yet
    refresh(directory)
    for wrong in ("", "x", secret[:-1], secret + "x", secret.lower(), f" {secret}", secret[:12], "ä"):
        assert directory.authenticate(wrong) is None


def test_revoked_disabled_deleted(sqlite_store, directory):
    first, first_secret = sqlite_store.create_key("acme")
    _, second_secret = sqlite_store.create_key("acme")
    assert refresh(directory).authenticate(first_secret)
    sqlite_store.revoke_key(first.id)
    assert refresh(directory).authenticate(first_secret) is None
    assert directory.authenticate(second_secret)
    sqlite_store.update_tenant("acme", {"disabled": True})
    assert refresh(directory).authenticate(second_secret) is None
    assert directory.tenants["acme"].disabled
    sqlite_store.update_tenant("acme", {"disabled": False})
    assert refresh(directory).authenticate(second_secret)
    sqlite_store.delete_tenant("acme")
    assert refresh(directory).authenticate(second_secret) is None
    assert dict(directory.tenants) == {}


def test_expiry_needs_no_look_at_the_database(sqlite_store, directory):
    _, secret = sqlite_store.create_key("acme", expires_at=4e9)
    refresh(directory)
    directory._clock.now = 4e9 - 1
    assert directory.authenticate(secret)
    directory._clock.now = 4e9
    assert directory.authenticate(secret) is None


def test_has_admin_key(sqlite, sqlite_store, directory):
    sqlite_store.create_key("acme")
    assert not refresh(directory).has_admin_key
    sqlite_store.create_key("acme", scopes=("admin",), expires_at=4e9)
    assert refresh(directory).has_admin_key
    directory._clock.now = 4e9
    assert not directory.has_admin_key
    operators = Directory(sqlite, ["operator"])
    assert operators.has_admin_key
    asyncio.run(operators.close())


def test_the_servers_own_admin_keys(sqlite):
    directory = Directory(sqlite, ["operator-1", "operator-2"])
    refresh(directory)
    for key in ("operator-1", "operator-2"):
        principal = directory.authenticate(key)
        assert principal.is_admin
        assert (principal.tenant, principal.key_id) == ("", "")
    assert directory.authenticate("operator-3") is None
    asyncio.run(directory.close())


def test_nothing_is_read_again_without_a_change(sqlite_store, directory):
    snapshots = []
    directory.subscribe(snapshots.append)
    refresh(directory)
    refresh(directory)
    assert len(snapshots) == 1
    sqlite_store.add_prefix("hello", [1, 2])
    refresh(directory)
    assert [len(s.prefixes) for s in snapshots] == [0, 1]
    assert snapshots[0].revision < snapshots[1].revision
    later = []
    directory.subscribe(later.append)  # is called at once with the present principals
    assert later == snapshots[1:]


def test_secrets_are_not_in_a_repr(sqlite_store, directory):
    _, secret = sqlite_store.create_key("acme")
    snapshots = []
    directory.subscribe(snapshots.append)
    refresh(directory)
    assert secret not in repr(snapshots)
    assert "digest" not in repr(snapshots)


def test_a_change_made_elsewhere_is_seen(database):
    """In real time, by the server's own looking: a key, then its revocation."""
    store = Store(database)
    store.create_tenant(Tenant(name="acme"))

    async def run() -> None:
        directory = Directory(database)
        await directory.start()
        key, secret = await asyncio.to_thread(store.create_key, "acme")
        await until(lambda: directory.authenticate(secret))
        await asyncio.to_thread(store.revoke_key, key.id)
        await until(lambda: directory.authenticate(secret) is None)
        await directory.close()

    asyncio.run(run())


def test_a_busy_database_does_not_hold_up_revocation(sqlite, sqlite_store):
    """All threads for requests' queries are taken; the directory has its own."""
    release = threading.Event()

    async def run() -> None:
        directory = Directory(sqlite)
        await directory.start()
        busy = [asyncio.ensure_future(sqlite.run(release.wait)) for _ in range(10)]
        _, secret = await asyncio.to_thread(sqlite_store.create_key, "acme")
        await until(lambda: directory.authenticate(secret))
        release.set()
        await asyncio.gather(*busy)
        await directory.close()

    asyncio.run(run())


def test_without_the_database_the_last_copy_serves_for_an_hour(make_postgresql, monkeypatch, caplog):
    monkeypatch.setattr(directory_module, "POLL_SECONDS", 0.02)
    server = make_postgresql()
    clock = Clock()

    async def run() -> None:
        tenancy = await Tenancy.open(server.new_database())
        store, directory = tenancy.store, tenancy.directory
        await tenancy.database.run(store.create_tenant, Tenant(name="acme"))
        _, secret = await tenancy.database.run(store.create_key, "acme")
        await directory.refresh()
        directory._age_clock = clock
        directory._checked_at = clock.now
        await asyncio.to_thread(server.stop)
        with pytest.raises(DatabaseUnavailableError):
            await directory.refresh()
        await until(lambda: "stay as they were" in caplog.text)
        clock.now += MAX_AGE_SECONDS
        assert directory.authenticate(secret)
        clock.now += 1
        with pytest.raises(DatabaseUnavailableError, match="away for too long"):
            directory.authenticate(secret)
        await asyncio.to_thread(server.start)
        await until(lambda: "the database is back" in caplog.text)
        assert directory.authenticate(secret)
        assert caplog.text.count("stay as they were") == 1  # not at every look
        await tenancy.close()

    with caplog.at_level("WARNING"):
        asyncio.run(run())


def test_opening_and_closing(database_url):
    async def run() -> None:
        for _ in range(2):
            tenancy = await Tenancy.open(database_url, admin_api_keys=("operator",))
            assert tenancy.directory.authenticate("operator").is_admin
            await tenancy.close()

    asyncio.run(run())
    assert not [t for t in threading.enumerate() if t.name.startswith("outrider-d")]


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("nonsense", InvalidRequestError),
        ("sqlite:////no/such/folder/x.db", InvalidRequestError),
        ("postgresql://u:secret@/d?host=/no/such/folder", DatabaseUnavailableError),
    ],
)
def test_databases_that_cannot_be_opened(address, error):
    with pytest.raises(error) as refused:
        asyncio.run(Tenancy.open(address))
    assert "secret" not in refused.value.message
    assert not [t for t in threading.enumerate() if t.name.startswith("outrider-d")]


def test_an_unreadable_row_keeps_the_last_directory(sqlite, sqlite_store, directory):
    """An unenforced limit must not count as none."""
    _, secret = sqlite_store.create_key("acme")
    refresh(directory)
    with sqlite.write() as connection:
        connection.exec_driver_sql("UPDATE tenants SET limits = '{\"new_limit\": 1}'")
        connection.exec_driver_sql("UPDATE revisions SET number = number + 1")
    with pytest.raises(InvalidRequestError, match="new_limit"):
        refresh(directory)
    assert directory.authenticate(secret)


def test_two_servers_on_one_file(sqlite, sqlite_store, directory):
    other = Database(sqlite.url)
    Store(other).create_tenant(Tenant(name="from-the-other"))
    assert "from-the-other" in refresh(directory).tenants
    other.close()
