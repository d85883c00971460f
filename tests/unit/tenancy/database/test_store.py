"""Tenants, keys, prefixes and adapters, in each kind of database."""

import threading

import pytest
from sqlalchemy import insert, select

from outrider.platform.core.errors import InvalidRequestError, InvalidUserInputError, NotFoundError
from outrider.platform.tenancy.accounts.authenticator import hash_key
from outrider.platform.tenancy.accounts.principal import Limits, limit_fields, merge_limits
from outrider.platform.tenancy.accounts.records import StoredAdapter, Tenant
from outrider.platform.tenancy.database.schema import api_keys, tenants
from outrider.platform.tenancy.database.store import Store, read_revision

ALL_LIMITS = Limits(
    requests_per_minute=1, tokens_per_minute=2, max_concurrent_requests=3, max_queued_requests=0, max_context_tokens=4,
    max_output_tokens=5, allowed_adapters=("sql", "x y"), token_budget=10**15, budget_period="day",
)  # fmt: skip


def revision(database) -> int:
    with database.read() as connection:
        return read_revision(connection)


@pytest.fixture
def acme(store) -> Tenant:
    return store.create_tenant(Tenant(name="acme", weight=2.5, limits=ALL_LIMITS, max_adapters=3))


# --- tenants ---


def test_a_tenant_comes_back_as_it_was(store, acme):
    assert acme.created_at > 0
    assert store.get_tenant("acme") == acme
    assert store.list_tenants() == [acme]


@pytest.mark.parametrize("name", ["", "Acme", "-a", "a b", "a/b", "ä", "x" * 65, "a\n"])
def test_names_that_are_none(store, name):
    with pytest.raises(InvalidRequestError) as refused:
        store.create_tenant(Tenant(name=name))
    assert refused.value.param == "name"


@pytest.mark.parametrize("name", ["default", "other"])
def test_names_that_metrics_need_for_themselves(store, database, name):
    with pytest.raises(InvalidRequestError, match=f"^name: .*{name}.* labels") as refused:
        store.create_tenant(Tenant(name=name))
    assert refused.value.param == "name"
    with database.write() as connection:  # as an older version let one be made
        connection.execute(insert(tenants).values(name=name, created_at=1.0))
    assert store.update_tenant(name, {"weight": 2.0}).weight == 2.0
    store.create_key(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0.0), ("weight", float("nan")), ("weight", float("inf")), ("weight", -1.0), ("weight", 2e6),
        ("max_adapters", -1), ("max_adapters", 10**7),
    ],
)  # fmt: skip
def test_values_out_of_range(store, acme, field, value):
    with pytest.raises(InvalidRequestError) as refused:
        store.create_tenant(Tenant(name="globex", **{field: value}))
    assert refused.value.param == field
    with pytest.raises(InvalidRequestError):
        store.update_tenant("acme", {field: value})
    assert store.list_tenants() == [acme]


def test_updates_change_only_the_named_fields(store, acme):
    store.update_tenant("acme", {"weight": 4.0, "limits": {"token_budget": 7, "allowed_adapters": None}})
    changed = store.get_tenant("acme")
    assert (changed.weight, changed.max_adapters, changed.created_at) == (4.0, 3, acme.created_at)
    assert changed.limits == merge_limits({"token_budget": 7, "allowed_adapters": None}, ALL_LIMITS)
    assert store.update_tenant("acme", {"disabled": True}).disabled
    assert store.get_tenant("acme").disabled
    for field in ("name", "created_at", "nonsense"):
        with pytest.raises(InvalidRequestError, match="cannot be changed"):
            store.update_tenant("acme", {field: "x"})


def test_a_name_is_never_given_again(store, acme):
    for _ in range(2):
        with pytest.raises(InvalidUserInputError, match="never given again"):
            store.create_tenant(Tenant(name="acme"))
    store.delete_tenant("acme")
    assert store.list_tenants() == []
    with pytest.raises(InvalidUserInputError, match="never given again"):
        store.create_tenant(Tenant(name="acme"))


def test_a_deleted_tenant_is_not_there(store, acme):
    store.delete_tenant("acme")
    for call in (
        lambda: store.get_tenant("acme"),
        lambda: store.update_tenant("acme", {"disabled": False}),
        lambda: store.delete_tenant("acme"),
        lambda: store.create_key("acme"),
        lambda: store.list_keys("acme"),
    ):
        with pytest.raises(NotFoundError) as refused:
            call()
        assert refused.value.param == "tenant"


def test_deleting_takes_keys_and_adapters_along(store, acme):
    store.create_tenant(Tenant(name="globex"))
    mine, _ = store.create_key("acme")
    others, _ = store.create_key("globex")
    for tenant in ("", "acme", "globex"):
        store.put_adapter(StoredAdapter(tenant=tenant, name="sql", path="/p"))
    store.delete_tenant("acme")
    assert store.get_key(mine.id).revoked_at is not None
    assert store.get_key(others.id).revoked_at is None
    assert [adapter.tenant for adapter in store.list_adapters()] == ["", "globex"]


# --- limits ---


def test_limits_survive_json():
    assert merge_limits(limit_fields(ALL_LIMITS)) == ALL_LIMITS
    assert limit_fields(Limits()) == {}
    assert merge_limits({"allowed_adapters": []}).allowed_adapters == ()
    assert merge_limits({"allowed_adapters": ["b", "a", "b"]}).allowed_adapters == ("b", "a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests_per_minute", 0), ("requests_per_minute", -1), ("requests_per_minute", 1.5), ("token_budget", -1),
        ("requests_per_minute", True), ("requests_per_minute", "5"), ("tokens_per_minute", 10**15 + 1),
        ("allowed_adapters", "sql"), ("allowed_adapters", [1]), ("allowed_adapters", [""]),
        ("allowed_adapters", ["x"] * 10_001), ("budget_period", "year"), ("nonsense", 1),
    ],
)  # fmt: skip
def test_limits_that_are_none(field, value):
    with pytest.raises(InvalidRequestError) as refused:
        merge_limits({field: value})
    assert refused.value.param == f"limits.{field}"
    assert refused.value.message.startswith(f"limits.{field}: ")


# --- keys ---


def test_a_key_is_stored_as_its_hash(store, acme, database):
    key, secret = store.create_key("acme", name="ci", scopes=("admin", "inference", "admin"), limits=ALL_LIMITS)
    assert store.get_key(key.id) == key
    assert key.scopes == ("admin", "inference")
    with database.read() as connection:
        row = connection.execute(select(api_keys)).one()
    assert bytes(row.digest) == hash_key(secret)
    assert secret not in str(row)
    assert secret[:12] == row.prefix


def test_lists_of_keys(store, acme):
    store.create_tenant(Tenant(name="globex"))
    first, second, others = (store.create_key(name)[0] for name in ("acme", "acme", "globex"))
    store.revoke_key(first.id)
    assert [key.id for key in store.list_keys()] == [second.id, others.id]
    assert [key.id for key in store.list_keys("acme")] == [second.id]
    assert {key.id for key in store.list_keys("acme", revoked=True)} == {first.id, second.id}
    with pytest.raises(NotFoundError):
        store.list_keys("nobody")


def test_states(store, acme):
    key, _ = store.create_key("acme", expires_at=4e9)
    assert (key.state(1e9), key.state(4e9)) == ("active", "expired")
    revoked = store.revoke_key(key.id)
    assert revoked.state(1e9) == "revoked"
    assert store.revoke_key(key.id) == revoked == store.get_key(key.id)
    with pytest.raises(InvalidUserInputError, match="has been revoked"):
        store.update_key(key.id, {"expires_at": None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "x" * 65), ("name", "a\nb"), ("scopes", ()), ("scopes", ("root",)), ("expires_at", 1.0),
        ("expires_at", 1e12), ("expires_at", float("nan")),
    ],
)  # fmt: skip
def test_keys_that_cannot_be(store, acme, field, value):
    with pytest.raises(InvalidRequestError) as refused:
        store.create_key("acme", **{field: value})
    assert refused.value.param == field
    assert store.list_keys() == []


def test_updating_a_key(store, acme):
    key, _ = store.create_key("acme", limits=ALL_LIMITS)
    changed = store.update_key(key.id, {"name": "new", "expires_at": 4e9, "limits": {"token_budget": None}})
    assert store.get_key(key.id) == changed
    assert (changed.name, changed.expires_at, changed.limits.token_budget) == ("new", 4e9, None)
    assert changed.limits.requests_per_minute == 1
    for call in (store.get_key, store.revoke_key, lambda key_id: store.update_key(key_id, {})):
        with pytest.raises(NotFoundError):
            call("key-0")


# --- prefixes ---


def test_prefixes(store):
    added = store.add_prefix("hello", [1, 2, 3])
    assert store.list_prefixes() == [added]
    with pytest.raises(InvalidUserInputError, match="already"):
        store.add_prefix("hello", [4])
    store.remove_prefix("hello")
    assert store.list_prefixes() == []
    with pytest.raises(NotFoundError):
        store.remove_prefix("hello")


@pytest.mark.parametrize("tokens", [[], [-1], [1 << 31]])
def test_invalid_prefix_token_ids_are_refused(store, tokens):
    with pytest.raises(InvalidRequestError) as refused:
        store.add_prefix("x", tokens)
    assert refused.value.param == "token_ids"


# --- revisions ---


def test_every_change_counts_and_nothing_else_does(store, acme, database):
    adapter = StoredAdapter(tenant="acme", name="sql", path="/p")
    key, _ = store.create_key("acme")
    changes = [
        lambda: store.create_tenant(Tenant(name="globex")),
        lambda: store.update_tenant("globex", {"weight": 3.0}),
        lambda: store.create_key("acme"),
        lambda: store.update_key(key.id, {"name": "x"}),
        lambda: store.revoke_key(key.id),
        lambda: store.add_prefix("p", [1]),
        lambda: store.remove_prefix("p"),
        lambda: store.put_adapter(adapter),
        lambda: store.set_adapter_pinned("acme", "sql", True),
        lambda: store.remove_adapter("acme", "sql"),
        lambda: store.delete_tenant("globex"),
    ]
    for change in changes:
        before = revision(database)
        change()
        assert revision(database) == before + 1
    before = revision(database)
    store.list_tenants(), store.list_keys(), store.list_prefixes(), store.list_adapters(), store.get_key(key.id)
    with pytest.raises(NotFoundError):
        store.delete_tenant("nobody")
    assert not store.remove_adapter("acme", "sql"), "a tenant may ask for any name, as often as it likes"
    assert revision(database) == before


def test_changes_at_once_all_count(database, store, acme):
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                Store(database).create_tenant(Tenant(name=f"t{number}-{i}"))
        except Exception as error:
            errors.append(error)

    before = revision(database)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert revision(database) == before + 20
    assert len(store.list_tenants()) == 21
