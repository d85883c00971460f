"""Audit entries: as certain as the change itself."""

import asyncio
import contextvars
import logging

import pytest

from outrider.platform.core.errors import InvalidRequestError, OutriderError
from outrider.platform.tenancy.accounts.principal import Limits
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.database import audit as audit_module
from outrider.platform.tenancy.database import store as store_module
from outrider.platform.tenancy.database.audit import Actor, list_audit
from outrider.platform.tenancy.database.schema import MAX_ACTION

pytestmark = pytest.mark.slow

ALICE = Actor(key_id="key-1", tenant="operators", client="10.0.0.7")


def actions(database) -> list[str]:
    """Oldest first."""
    return [row["action"] for row in reversed(list_audit(database))]


def test_notes_of_a_tenant_are_bounded(store, database, monkeypatch):
    monkeypatch.setattr(audit_module, "MAX_NOTES", 3)
    alice, bob = store.by(ALICE), store.by(Actor(key_id="key-2", tenant="bob"))
    alice.create_tenant(Tenant(name="acme"))
    bob.note("loaded adapter 'b'")
    for number in range(5):
        alice.note(f"loaded adapter '{number}'")
        alice.note(f"unloaded adapter '{number}'")
    kept = ["unloaded adapter '3'", "loaded adapter '4'", "unloaded adapter '4'"]
    assert actions(database) == ["created tenant acme", "loaded adapter 'b'", *kept]


def test_every_change_of_tenants_keys_and_prefixes(store, database):
    alice = store.by(ALICE)
    alice.create_tenant(Tenant(name="acme"))
    alice.update_tenant("acme", {"weight": 2.0, "limits": {"token_budget": 5, "requests_per_minute": None}})
    alice.update_tenant("acme", {"disabled": True, "limits": {}})
    key, secret = alice.create_key("acme", scopes=("admin",), limits=Limits(token_budget=1))
    alice.update_key(key.id, {"name": "mine"})
    alice.revoke_key(key.id)
    alice.add_prefix("p", [1, 2, 3])
    alice.remove_prefix("p")
    alice.note("loaded adapter 'x'")
    alice.delete_tenant("acme")
    alice.list_tenants(), alice.list_keys()
    assert actions(database) == [
        "created tenant acme",
        "updated tenant acme: weight=2.0, limits.token_budget=5, limits.requests_per_minute=null",
        "updated tenant acme: disabled=true",
        f"created key {key.id} of tenant acme with the scopes admin",
        f'updated key {key.id}: name="mine"',
        f"revoked key {key.id}",
        "declared the shared prefix p of 3 tokens",
        "removed the shared prefix p",
        "loaded adapter 'x'",
        "deleted tenant acme",
    ]
    rows = list_audit(database)
    assert {(row["via"], row["key_id"], row["tenant"], row["client"]) for row in rows} == {
        ("http", "key-1", "operators", "10.0.0.7")
    }
    assert all(row["changed_at"] > 1e9 for row in rows)
    assert secret not in str(rows)


def test_refused_and_rolled_back_changes_are_not_audited(store, database, monkeypatch):
    store.create_tenant(Tenant(name="acme"))
    for refused in (
        lambda: store.create_tenant(Tenant(name="acme")),
        lambda: store.update_tenant("nobody", {"weight": 2.0}),
        lambda: store.update_tenant("acme", {"weight": -1.0}),
        lambda: store.create_key("nobody"),
    ):
        with pytest.raises(OutriderError):
            refused()
    assert actions(database) == ["created tenant acme"]

    def fails(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(store_module, "write_row", fails)
    with pytest.raises(ZeroDivisionError):
        store.delete_tenant("acme")
    assert store.get_tenant("acme"), "a change without a record is none"


def test_long_values_are_cut(store, database, caplog):
    names = [f"adapter-{i}" for i in range(5000)]
    store.create_tenant(Tenant(name="acme"))
    with caplog.at_level(logging.INFO, "outrider.audit"):
        store.update_tenant("acme", {"limits": {"allowed_adapters": names}})
    assert len(actions(database)[-1]) == MAX_ACTION
    assert len(caplog.records[-1].getMessage()) < MAX_ACTION + 200


def test_pages(store, database):
    for i in range(5):
        store.note(f"action {i}")
    first = list_audit(database, 2)
    assert [row["action"] for row in first] == ["action 4", "action 3"]
    assert [row["action"] for row in list_audit(database, 2, before=first[-1]["id"])] == ["action 2", "action 1"]
    for limit in (0, 1001):
        with pytest.raises(InvalidRequestError) as refused:
            list_audit(database, limit)
        assert refused.value.param == "limit"


@pytest.mark.parametrize(
    ("actor", "shown"),
    [
        (ALICE, "key-1 (operators), from 10.0.0.7"),
        (Actor(client="10.0.0.7"), "the server's own admin key, from 10.0.0.7"),
        (Actor(via="cli", client="root@host"), "outrider admin, from root@host"),
    ],
)
def test_description_of_an_actor(actor, shown):
    assert actor.description == shown


def test_work_for_the_database_sees_the_requests_context(sqlite):
    """The lines of the log have the request's id."""
    variable = contextvars.ContextVar("variable", default="")

    async def scenario():
        variable.set("request-1")
        assert await sqlite.run(variable.get) == "request-1"

    asyncio.run(scenario())
