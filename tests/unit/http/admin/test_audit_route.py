"""`/admin/v1/audit`: changes over HTTP and their authors."""

import asyncio
import csv
import io

import pytest

from outrider.platform.core.adapter_files import files_digest
from outrider.platform.tenancy.database.connection import DatabaseUnavailableError
from outrider.platform.tenancy.database.store import Store

from .test_admin_routes import OPERATOR, Server


@pytest.fixture
def server(llm, tmp_path):
    with asyncio.Runner() as runner:
        server = Server(llm, f"sqlite:///{tmp_path / 'outrider.db'}", runner, lora_roots=("/",))
        yield server
        server.close()


def load(server, name):
    return server.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/"})


def test_changes_over_http(server):
    server.ok("POST", "/tenants", {"name": "ops"}, 201)
    key = server.ok("POST", "/keys", {"tenant": "ops", "scopes": ["admin"]}, 201)
    server.key = key["key"]
    server.ok("PATCH", "/tenants/ops", {"limits": {"token_budget": 9}})
    assert load(server, "sql").status_code == 200
    assert server.call("POST", "/v1/pin_lora_adapter", {"lora_name": "sql"}).status_code == 200
    assert server.call("POST", "/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 200
    rows = server.ok("GET", "/audit")["data"]
    who = [(row["key_id"], row["tenant"], row["client"], row["via"]) for row in rows]
    assert who == [(key["id"], "ops", "127.0.0.1", "http")] * 4 + [("", "", "127.0.0.1", "http")] * 2
    assert [row["action"] for row in rows][::-1] == [
        "created tenant ops",
        f"created key {key['id']} of tenant ops with the scopes admin",
        "updated tenant ops: limits.token_budget=9",
        "loaded adapter 'sql'",
        "pinned adapter 'sql'",
        "unloaded adapter 'sql'",
    ]
    assert server.ok("GET", "/audit?limit=1")["data"] == rows[:1]
    assert server.ok("GET", f"/audit?before={rows[4]['id']}")["data"] == rows[5:]
    text = server("GET", "/audit?format=csv").text
    assert [row["action"] for row in csv.DictReader(io.StringIO(text))] == [row["action"] for row in rows]
    for query in ("limit=0", "limit=1001", "before=0", "before=x", "format=xml"):
        server.fails("GET", f"/audit?{query}")


@pytest.mark.parametrize(("is_empty", "more"), [(True, ""), (False, ", but for what requests use")])
def test_an_emptied_cache(server, llm, is_empty, more):
    async def reset():
        return is_empty

    llm.reset_prefix_cache, server.key = reset, OPERATOR
    assert server.call("POST", "/reset_prefix_cache").json() == {"success": is_empty}
    assert [row["action"] for row in server.ok("GET", "/audit")["data"]] == [f"emptied the prefix cache{more}"]


def test_an_adapter_that_is_loaded_stays_so_when_the_record_fails(server, monkeypatch, caplog):
    def away(store, action):
        raise DatabaseUnavailableError("it is away")

    monkeypatch.setattr(Store, "note", away)
    server.key = OPERATOR
    assert load(server, "sql").status_code == 200
    assert "not in the database's audit: it is away" in caplog.text


def test_a_load_is_remembered_with_its_files(server, tmp_path):
    """By these, all servers of the database distinguish them from later ones, also after a restart."""
    folder = tmp_path / "x"
    folder.mkdir()
    digests = []
    for content in (b"one", b"two"):
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(content)
        serving = server.app.state.serving
        if serving.adapter_sync is None:
            server._runner.run(serving.follow_database())
        body = {"lora_name": "x", "lora_path": str(folder), "load_inplace": True}
        assert server.call("POST", "/v1/load_lora_adapter", body).status_code == 200
        [stored] = server.tenancy.store.list_adapters()
        digests.append(stored.digest)
        assert stored.digest == files_digest(str(folder))
    assert None not in digests
    assert digests[0] != digests[1]
    server._runner.run(serving.close())
