"""Changes made with `outrider admin` are in the same record as those over HTTP."""

import getpass
import json
import socket

import pytest

from outrider.platform.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_DATABASE", f"sqlite:///{tmp_path / 'x.db'}")

    def run(*arguments: str) -> str:
        assert main(["admin", *arguments]) == 0
        return capsys.readouterr().out

    run("database", "upgrade")
    return run


def test_changes_of_the_command_line(run, monkeypatch, capsys):
    run("tenant", "create", "acme")
    run("tenant", "update", "acme", "--weight", "2", "--token-budget", "7")
    secret = run("key", "create", "--tenant", "acme").strip()
    run("tenant", "list")
    assert main(["admin", "tenant", "create", "acme"]) == 1

    def nameless():
        raise KeyError("no such user")

    monkeypatch.setattr(getpass, "getuser", nameless)
    run("tenant", "delete", "acme", "--yes")
    capsys.readouterr()
    rows = json.loads(run("audit", "--format", "json"))
    assert [row["action"].split(" with")[0] for row in rows][::-1] == [
        "created tenant acme",
        "updated tenant acme: weight=2.0, limits.token_budget=7",
        f"created key {json.loads(run('key', 'list', '--all', '--format', 'json'))[0]['id']} of tenant acme",
        "deleted tenant acme",
    ]
    assert {(row["via"], row["key_id"], row["tenant"]) for row in rows} == {("cli", "", "")}
    assert all(row["client"].endswith(f"@{socket.gethostname()}") for row in rows)
    table = run("audit", "--limit", "1")
    assert "deleted tenant acme" in table
    assert "created" not in table
    assert secret not in run("audit")
    assert main(["admin", "audit", "--limit", "0"]) == 1
    assert "limit: must be from 1 to 1000" in capsys.readouterr().err
