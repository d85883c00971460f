"""Each tenant has its own files and batches, and lines never have more rights than its key."""

import asyncio
from types import SimpleNamespace

from batch_helpers import Api, line

from outrider.platform.http.protect.acting import ACTING
from outrider.platform.tenancy.accounts.principal import Principal
from outrider.platform.tenancy.limits.limiter import Limiter

NAMES = ("acme", "../acme", "a/b", "")


def test_a_tenant_sees_its_own_alone(site):
    tenants = {name or "operator": Principal(tenant=name) for name in NAMES}
    site.people = {"authenticator": SimpleNamespace(authenticate=tenants.get)}

    async def main():
        async with site.server() as api:
            apis = {key: Api(api.app, key) for key in tenants}
            batches = {key: await one.begin(line("a")) for key, one in apis.items()}
            for key, one in apis.items():
                await one.end(batches[key]["id"])
                assert [b["id"] for b in (await one.call("GET", "/v1/batches")).json()["data"]] == [batches[key]["id"]]
                assert len((await one.call("GET", "/v1/files")).json()["data"]) == 2
                for other in set(tenants) - {key}:
                    theirs = batches[other]
                    for method, path in (
                        ("GET", f"/v1/files/{theirs['input_file_id']}"),
                        ("GET", f"/v1/files/{theirs['input_file_id']}/content"),
                        ("DELETE", f"/v1/files/{theirs['input_file_id']}"),
                        ("GET", f"/v1/batches/{theirs['id']}"),
                        ("POST", f"/v1/batches/{theirs['id']}/cancel"),
                    ):
                        assert (await one.call(method, path)).status_code == 404
                    body = {"input_file_id": theirs["input_file_id"], "endpoint": "/v1/completions"}
                    answer = await one.call("POST", "/v1/batches", json={**body, "completion_window": "24h"})
                    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input_file_id")
        assert len(list((site.folder / "owners").iterdir())) == len(NAMES)
        assert {path.name for path in site.folder.parent.iterdir()} == {site.folder.name}

    asyncio.run(main())


def test_routes_are_closed_without_a_key(site):
    async def work(api):
        for call in ("GET /v1/files", "POST /v1/files", "DELETE /v1/files/x", "GET /v1/batches", "POST /v1/batches"):
            assert (await api.call(*call.split(), headers={ACTING: "admin"})).status_code == 401

    site.run(work, api_keys=("key",))


def test_lines_of_a_server_with_keys_need_none_of_their_own(site):
    async def main():
        async with site.server(api_keys=("key",), admin_api_keys=("boss",)) as api:
            client = Api(api.app, "key")
            batch = await client.end((await client.begin(line("a")))["id"])
            assert batch["request_counts"]["completed"] == 1

    asyncio.run(main())


def test_a_revoked_key_ends_its_batch(site):
    async def work(api):
        people = SimpleNamespace(principal={}.get, is_valid=lambda principal: True)
        tenancy = SimpleNamespace(directory=people, limiter=Limiter(lambda *which: None))
        api.app.state.serving.tenancy = tenancy
        batch = await api.end((await api.begin(line("a")))["id"])
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "invalid_api_key")
        assert not site.llm.calls

    site.people = {"authenticator": SimpleNamespace(authenticate=lambda key: Principal(tenant="acme", key_id="k"))}
    site.run(work)


def test_a_server_without_tenants_leaves_their_batches(site):
    site.people = {"authenticator": SimpleNamespace(authenticate=lambda key: Principal(tenant="acme", key_id="k"))}

    async def work(api):
        batch = await api.begin(line("a"))
        await asyncio.sleep(0.3)
        assert (await api.batch(batch["id"]))["status"] == "validating"

    site.run(work)
