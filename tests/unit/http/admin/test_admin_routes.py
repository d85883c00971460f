"""`/admin/v1`: rights, answers and audit entries."""

import asyncio
import csv
import io
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from outrider.platform.http.app import create_app
from outrider.platform.http.server_config import ServerConfig
from outrider.platform.tenancy.accounts.records import Tenant
from outrider.platform.tenancy.database.connection import Database, DatabaseUnavailableError, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
from outrider.platform.tenancy.database.schema import usage
from outrider.platform.tenancy.service import Tenancy

OPERATOR = "operator-key"
ROUTES = [
    ("GET", "/tenants"), ("POST", "/tenants"), ("GET", "/tenants/acme"), ("PATCH", "/tenants/acme"),
    ("DELETE", "/tenants/acme"), ("GET", "/keys"), ("POST", "/keys"), ("GET", "/keys/key-0"), ("PATCH", "/keys/key-0"),
    ("DELETE", "/keys/key-0"), ("GET", "/usage"), ("GET", "/usage/requests"), ("GET", "/audit"), ("GET", "/prefixes"),
    ("POST", "/prefixes"), ("DELETE", "/prefixes/x"),
]  # fmt: skip


class Server:
    """The application with tenants, in one event loop."""

    def __init__(self, llm: Any, url: str, runner: asyncio.Runner, **options: Any) -> None:
        self._runner = runner
        self.tenancy = runner.run(Tenancy.open(url, admin_api_keys=(OPERATOR,)))
        config = ServerConfig(served_model_names=("base",), database=url, admin_api_keys=(OPERATOR,), **options)
        self.app = create_app(llm, config, tenancy=self.tenancy)
        self.key: str | None = OPERATOR

    def close(self) -> None:
        self._runner.run(self.tenancy.close())

    def __call__(self, method: str, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.call(method, f"/admin/v1{path}", json, **options)

    def call(self, method: str, path: str, json: Any = None, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
                return await client.request(method, path, json=json, headers=headers, **options)

        return self._runner.run(send())

    def ok(self, method: str, path: str, json: Any = None, status: int = 200, **options: Any) -> Any:
        response = self(method, path, json, **options)
        assert response.status_code == status, response.text
        return response.json()

    def fails(self, method: str, path: str, json: Any = None, status: int = 400, **options: Any) -> dict:
        response = self(method, path, json, **options)
        assert response.status_code == status, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return response.json()["error"]


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    """A database with its tables."""
    database = Database(parse_url(f"sqlite:///{tmp_path_factory.mktemp('empty') / 'empty.db'}"))
    upgrade(database)
    database.close()
    assert database.file is not None
    return database.file


@pytest.fixture
def server(llm, empty, tmp_path) -> Iterator[Server]:
    with asyncio.Runner() as runner:
        server = Server(llm, f"sqlite:///{shutil.copy(empty, tmp_path / 'outrider.db')}", runner)
        yield server
        server.close()


@pytest.fixture
def acme(server) -> dict:
    limits = {"requests_per_minute": 5, "allowed_adapters": ["sql"]}
    return server.ok("POST", "/tenants", {"name": "acme", "weight": 2, "limits": limits, "max_adapters": 3}, 201)


# --- rights ---


def test_only_admins(server, acme):
    key = server.ok("POST", "/keys", {"tenant": "acme"}, 201)["key"]
    for method, path in ROUTES:
        for sent, status in ((None, 401), ("wrong", 401), (key, 403)):
            server.key = sent
            server.fails(method, path, status=status)


def test_every_route_is_in_that_test(server):
    paths = server.app.openapi()["paths"]
    documented = {
        (method.upper(), path)
        for path, item in paths.items()
        for method in item
        if path.startswith("/admin/v1/") and path != "/admin/v1/stats"
    }
    known = {
        (m, "/admin/v1" + p.replace("acme", "{name}").replace("key-0", "{key_id}").replace("/x", "/{name}"))
        for m, p in ROUTES
    }
    assert documented == known


def test_an_admin_key_of_the_database(server, acme):
    server.key = server.ok("POST", "/keys", {"tenant": "acme", "scopes": ["admin"]}, 201)["key"]
    assert server.ok("GET", "/tenants")["data"] == [acme]


def test_without_a_database_there_is_nothing(http):
    for method, path in ROUTES:
        response = http.request(method, f"/admin/v1{path}")
        assert response.status_code == 404
        assert "--database" in response.json()["error"]["message"]


def test_without_a_database_admin_routes_need_a_key_too(make_http):
    http = make_http(api_keys=("user",), admin_api_keys=("admin",))
    for key, status in (("", 401), ("user", 403), ("admin", 404)):
        assert http.get("/admin/v1/tenants", headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_rights_come_before_the_body(server):
    server.key = None
    assert server("POST", "/tenants", content=b"{").status_code == 401


# --- tenants ---


def test_life_of_a_tenant(server, acme):
    assert acme["limits"]["requests_per_minute"] == 5
    assert acme["limits"]["token_budget"] is None
    assert (acme["weight"], acme["max_adapters"], acme["disabled"]) == (2.0, 3, False)
    assert server.ok("GET", "/tenants") == {"object": "list", "data": [acme]}
    changes = {"disabled": True, "limits": {"requests_per_minute": None, "token_budget": 0, "budget_period": "day"}}
    changed = server.ok("PATCH", "/tenants/acme", changes)
    expected = acme["limits"] | changes["limits"]
    assert changed == acme | {"disabled": True, "limits": expected}
    assert server.ok("GET", "/tenants/acme") == changed
    assert server.ok("PATCH", "/tenants/acme", {}) == changed
    assert server.ok("DELETE", "/tenants/acme") == {"name": "acme", "deleted": True}
    assert server.fails("GET", "/tenants/acme", status=404)["param"] == "tenant"
    assert server.fails("POST", "/tenants", {"name": "acme"})["type"] == "InvalidUserInput"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"), ({"name": "A"}, "name"), ({"name": 5}, "name"), ({"name": "a", "weight": 0}, "weight"),
        ({"name": "a", "nonsense": 1}, "nonsense"), ({"name": "a", "limits": {"nonsense": 1}}, "limits.nonsense"),
        ({"name": "a", "limits": {"token_budget": -1}}, "limits.token_budget"),
        ({"name": "a", "weight": None}, "weight"),
        ({"name": "a", "limits": {"requests_per_minute": 2**70}}, "limits.requests_per_minute"),
        ({"name": "a", "limits": {"budget_period": "year"}}, "limits.budget_period"), ({"name": "a\n"}, "name"),
        ({"name": "a", "limits": {"allowed_adapters": [""]}}, "limits.allowed_adapters[0]"),
    ],
)  # fmt: skip
def test_bad_tenants(server, body, param):
    assert server.fails("POST", "/tenants", body)["param"] == param
    assert server.ok("GET", "/tenants")["data"] == []


# --- keys ---


def test_life_of_a_key(server, acme):
    response = server("POST", "/keys", {"tenant": "acme", "name": "ci", "limits": {"max_output_tokens": 9}})
    assert response.status_code == 201
    assert response.headers["cache-control"] == "no-store"
    made = response.json()
    secret = made.pop("key")
    assert made["prefix"] == secret[:12]
    assert (made["state"], made["scopes"], made["expires_at"]) == ("active", ["inference"], None)
    assert server.tenancy.directory.authenticate(secret).key_id == made["id"]  # at once, without waiting for a look
    assert server.ok("GET", "/keys")["data"] == server.ok("GET", "/keys?tenant=acme")["data"] == [made]
    assert server.ok("GET", f"/keys/{made['id']}") == made
    changed = server.ok("PATCH", f"/keys/{made['id']}", {"expires_at": 4e9})
    assert changed == made | {"expires_at": 4e9}
    revoked = server.ok("DELETE", f"/keys/{made['id']}")
    assert revoked["state"] == "revoked"
    assert server.tenancy.directory.authenticate(secret) is None
    assert server.ok("GET", "/keys")["data"] == []
    assert server.ok("GET", "/keys?revoked=true")["data"] == [revoked]
    assert secret not in server("GET", "/keys?revoked=true").text


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"tenant": "acme", "scopes": []}, "scopes", 400), ({"tenant": "acme", "scopes": ["root"]}, "scopes[0]", 400),
        ({"tenant": "acme", "expires_at": 5}, "expires_at", 400), ({"tenant": "nobody"}, "tenant", 404),
        ({"tenant": "acme", "name": "a\x00"}, "name", 400), ({}, "tenant", 400),
    ],
)  # fmt: skip
def test_bad_keys(server, acme, body, param, status):
    assert server.fails("POST", "/keys", body, status)["param"] == param


# --- usage ---


@pytest.fixture
def ledger(server) -> None:
    row = {
        "tenant": "acme", "key_id": "key-1", "endpoint": "/v1/completions", "adapter": "", "prompt_tokens": 10,
        "cached_tokens": 4, "output_tokens": 3, "drafted_tokens": 2, "accepted_tokens": 1, "received_at": 1767225600.0,
        "status": "stop",
    }  # fmt: skip
    rows = [
        row | {"request_id": "r1", "finished_at": 1767225600.0, "client_request_id": "=1+1"},
        row | {"request_id": "r2", "finished_at": 1767225601.0, "adapter": "sql"},
        row | {"request_id": "r3", "finished_at": 1767312000.0, "tenant": "other"},
    ]
    with server.tenancy.database.write() as connection:
        for values in rows:
            connection.execute(insert(usage).values(values))


def test_usage(server, ledger):
    rows = server.ok("GET", "/usage?group_by=tenant,adapter")["data"]
    assert [(r["tenant"], r["adapter"], r["requests"]) for r in rows] == [
        ("acme", "", 1),
        ("acme", "sql", 1),
        ("other", "", 1),
    ]
    assert "key" not in rows[0]
    total = server.ok("GET", "/usage?group_by=&tenant=acme&from=2026-01-01&to=1767225601")["data"]
    assert total == [
        {
            "requests": 1,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "output_tokens": 3,
            "drafted_tokens": 2,
            "accepted_tokens": 1,
        }
    ]
    assert server.ok("GET", "/usage?adapter=&key=key-1&group_by=day")["data"][1]["day"] == "2026-01-02"


def test_usage_as_csv(server, ledger):
    response = server("GET", "/usage?group_by=tenant&format=csv")
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert [(row["tenant"], row["output_tokens"]) for row in rows] == [("acme", "6"), ("other", "3")]


def test_requests(server, ledger):
    rows = server.ok("GET", "/usage/requests?limit=2")["data"]
    assert [row["request_id"] for row in rows] == ["r3", "r2"]
    (first,) = csv.DictReader(io.StringIO(server("GET", "/usage/requests?format=csv&to=1767225601").text))
    assert first["client_request_id"] == "'=1+1"  # no formula for a spreadsheet


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("group_by=name", "group_by"), ("from=soon", "from"), ("to=1e400", "to"), ("format=xml", "format"),
    ],
)  # fmt: skip
def test_bad_usage_queries(server, query, param):
    assert server.fails("GET", f"/usage?{query}")["param"] == param


@pytest.mark.parametrize("limit", ["0", "1001", "x", ""])
def test_bad_numbers_of_requests(server, limit):
    assert server.fails("GET", f"/usage/requests?limit={limit}")["param"] == "limit"


# --- prefixes ---


def test_life_of_a_prefix(server):
    made = server.ok("POST", "/prefixes", {"name": "hello", "text": "Hi!"}, 201)
    assert (made["name"], made["num_tokens"]) == ("hello", 4)
    assert server.tenancy.store.list_prefixes()[0].token_ids == (1, 72, 105, 33)
    messages = [{"role": "system", "content": "x"}]
    server.ok("POST", "/prefixes", {"name": "chat", "messages": messages}, 201)
    server.ok("POST", "/prefixes", {"name": "ids", "token_ids": [1, 2, 3]}, 201)
    assert [p["name"] for p in server.ok("GET", "/prefixes")["data"]] == ["chat", "hello", "ids"]
    assert server.tenancy.store.list_prefixes()[0].token_ids == (115, 58, 120, 124)  # "s:x|"
    server.ok("DELETE", "/prefixes/hello")
    assert server.fails("DELETE", "/prefixes/hello", status=404)["param"] == "name"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x"}, "text"), ({"name": "x", "text": "a", "token_ids": [1]}, "text"),
        ({"name": "x", "token_ids": [256]}, "token_ids[0]"), ({"name": "x", "token_ids": []}, "token_ids"),
        ({"name": "X", "text": "a"}, "name"), ({"name": "x", "text": ""}, "text"),
    ],
)  # fmt: skip
def test_bad_prefixes(server, body, param):
    assert server.fails("POST", "/prefixes", body)["param"] == param


# --- what is written down ---


def test_every_change_is_in_the_audit_log(server, caplog):
    with caplog.at_level(logging.INFO, "outrider.audit"):
        server.ok("POST", "/tenants", {"name": "acme"}, 201)
        server.ok("PATCH", "/tenants/acme", {"weight": 2})
        key = server.ok("POST", "/keys", {"tenant": "acme", "scopes": ["admin"]}, 201)
        server.key = key["key"]
        server.ok("POST", "/prefixes", {"name": "p", "text": "Secret text"}, 201)
        server.ok("GET", "/tenants")
        server.fails("POST", "/tenants", {"name": "acme"})
        server.key = OPERATOR
        server.ok("DELETE", f"/keys/{key['id']}")
        server.ok("DELETE", "/tenants/acme")
    lines = [record.getMessage() for record in caplog.records if record.name == "outrider.audit"]
    whole = "the server's own admin key, from 127.0.0.1, "
    assert lines == [
        whole + "created tenant acme",
        whole + "updated tenant acme: weight=2.0",
        whole + f"created key {key['id']} of tenant acme with the scopes admin",
        f"{key['id']} (acme), from 127.0.0.1, declared the shared prefix p of 12 tokens",
        whole + f"revoked key {key['id']}",
        whole + "deleted tenant acme",
    ]
    assert key["key"] not in caplog.text
    assert "Secret" not in caplog.text


def test_the_audit_log_is_written_at_every_log_level():
    assert logging.getLogger("outrider.audit").isEnabledFor(logging.INFO)


# --- when the database is away ---


def test_a_database_that_is_away(server, acme, monkeypatch):
    def fail(database: Database) -> None:
        raise DatabaseUnavailableError("The database failed")

    key = server.ok("POST", "/keys", {"tenant": "acme", "scopes": ["admin"]}, 201)["key"]
    monkeypatch.setattr(Database, "read", fail)
    monkeypatch.setattr(Database, "write", fail)
    server.key = key  # is known still
    for method, path, body in (("GET", "/tenants", None), ("POST", "/tenants", {"name": "x"})):
        response = server(method, path, body)
        assert response.status_code == 503
        assert "retry-after" in response.headers


def test_a_change_is_kept_if_reading_it_back_fails(server, monkeypatch):
    async def fail() -> None:
        raise DatabaseUnavailableError("The database failed")

    monkeypatch.setattr(server.tenancy.directory, "refresh", fail)
    server.ok("POST", "/tenants", {"name": "acme"}, 201)
    assert server.tenancy.store.list_tenants()[0].name == "acme"


def test_keys_that_are_too_old_to_be_trusted(server, monkeypatch):
    def fail(key: str) -> None:
        raise DatabaseUnavailableError("API keys cannot be checked")

    monkeypatch.setattr(server.tenancy.directory, "authenticate", fail)
    assert server.fails("GET", "/tenants", status=503)["type"] == "ServiceUnavailableError"


def test_open_routes_need_no_key(server, monkeypatch):
    server.tenancy.store.create_tenant(Tenant(name="acme"))
    server.key = "wrong"
    assert server("GET", "/../../health").status_code == 200


def test_the_document_describes_answers(server):
    paths = server.app.openapi()["paths"]
    post = paths["/admin/v1/keys"]["post"]
    assert post["responses"]["201"]["content"]["application/json"]["schema"]["$ref"].endswith("/NewKeyView")
    assert post["requestBody"]["content"]["application/json"]["schema"]["required"] == ["tenant"]
    for path, item in paths.items():
        for method, operation in item.items():
            if path.startswith("/admin/v1/") and path != "/admin/v1/stats":
                assert {"400", "401", "403", "404", "503"} <= set(operation["responses"]), (method, path)
                assert "422" not in operation["responses"], (method, path)
