"""From nothing to a bill, as somebody new would do it: a real server, the printed commands, the `openai` client."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest

from outrider.platform.cli.main import main

LONG = {"model": "outrider-demo", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}


class Tenant(NamedTuple):
    """Output of the printed commands."""

    user: str
    admin: str


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('admin') / 'outrider.db'}"


@pytest.fixture(scope="module")
def tenant_server(start_server, fixed_drafts, address):
    options = "--log-level debug --access-log --database".split()
    return start_server(*options, address, *fixed_drafts)


def shell(script: str) -> str:
    """Run commands as a person would; returns their output."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euc", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def keys(tenant_server) -> Tenant:
    """Runs the commands that the server has printed."""
    commands = re.findall(r"^  ((?:export|outrider admin) .+)$", tenant_server.output, re.MULTILINE)
    assert len(commands) == 5, tenant_server.output
    user, admin = re.findall(r"^sk-or-\S+$", shell("\n".join(commands)), re.MULTILINE)
    return Tenant(user, admin)


@pytest.fixture(scope="module")
def admin(tenant_server, keys):
    with tenant_server.http(headers={"Authorization": f"Bearer {keys.admin}"}) as http:
        tenant_server.wait_for(lambda: http.get("/admin/v1/tenants").status_code == 200)
        yield http


def new_key(admin: httpx.Client, **fields) -> dict:
    response = admin.post("/admin/v1/keys", json={"tenant": "my-team", **fields})
    assert response.status_code == 201, response.text
    return response.json()


def test_from_nothing(tenant_server, keys, admin, address, capsys):
    assert "Traceback" not in tenant_server.output
    client = tenant_server.client(keys.user)
    tenant_server.wait_for(lambda: tenant_server.http().get("/v1/models", headers=bearer(keys.user)).status_code == 200)
    answer = client.chat.completions.create(
        model="sql", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0
    )
    used = {"tenant": "my-team", "adapter": "sql", "requests": 1, "output_tokens": answer.usage.completion_tokens}
    rows = admin.get("/admin/v1/usage", params={"group_by": "tenant,adapter"}).json()["data"]
    assert [{name: row[name] for name in used} for row in rows] == [used]
    capsys.readouterr()
    assert main(["admin", "usage", "--by", "tenant,adapter", "--format", "json", "--database", address]) == 0
    assert json.loads(capsys.readouterr().out) == rows


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_users_key_is_no_admins(tenant_server, keys, admin):
    for path in ("/admin/v1/tenants", "/admin/v1/usage"):
        assert tenant_server.http().get(path, headers=bearer(keys.user)).status_code == 403
    with pytest.raises(openai.AuthenticationError):
        tenant_server.client("sk-or-wrong").models.list()


def test_revoked_here_a_key_is_refused_at_once(tenant_server, admin):
    made = new_key(admin)
    client = tenant_server.client(made["key"])
    assert client.models.list().data
    assert admin.delete(f"/admin/v1/keys/{made['id']}").json()["state"] == "revoked"
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_revoked_elsewhere_a_key_is_refused_soon(tenant_server, admin, address):
    made = new_key(admin)
    with tenant_server.http(headers=bearer(made["key"])) as http:
        assert http.get("/v1/models").status_code == 200
        assert main(["admin", "key", "revoke", made["id"], "--database", address]) == 0
        tenant_server.wait_for(lambda: http.get("/v1/models").status_code == 401)


def test_requests_that_run_outlive_their_key(tenant_server, admin):
    made = new_key(admin)
    with (
        tenant_server.http(headers=bearer(made["key"])) as http,
        http.stream("POST", "/v1/completions", json=LONG) as run,
    ):
        lines = run.iter_lines()
        assert next(lines).startswith("data: ")
        admin.delete(f"/admin/v1/keys/{made['id']}")
        assert http.get("/v1/models").status_code == 401
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_disabled_tenant(tenant_server, keys, admin):
    for disabled, status in ((True, 401), (False, 200)):
        assert admin.patch("/admin/v1/tenants/my-team", json={"disabled": disabled}).status_code == 200
        assert tenant_server.http().get("/v1/models", headers=bearer(keys.user)).status_code == status


def test_keys_are_never_logged(tenant_server, keys, admin):
    made = new_key(admin)
    tenant_server.http().get("/v1/models", headers=bearer(made["key"]))
    tenant_server.http().get("/v1/models", headers=bearer("sk-or-wrong-but-secret"))
    log = tenant_server.output
    assert "revoked key" in log
    assert "GET /v1/models" in log  # the server does log
    for secret in (keys.user, keys.admin, made["key"], "wrong-but-secret"):
        assert secret not in log
