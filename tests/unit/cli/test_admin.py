"""`outrider admin`, on a database of its own."""

import csv
import io
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from sqlalchemy import insert, text

from outrider.models.checkpoint import tokenizer
from outrider.platform.cli.admin.output import table
from outrider.platform.cli.main import build_parser, main
from outrider.platform.tenancy.accounts.authenticator import hash_key
from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.schema import api_keys, usage


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("empty") / "empty.db"
    assert main(["admin", "database", "upgrade", "--database", f"sqlite:///{file}"]) == 0
    return file


@pytest.fixture
def address(empty, tmp_path, monkeypatch) -> str:
    """Address of a database with its tables, in the environment."""
    address = f"sqlite:///{shutil.copy(empty, tmp_path / 'outrider.db')}"
    monkeypatch.setenv("OUTRIDER_DATABASE", address)
    return address


@pytest.fixture
def run(address, capsys):
    """Runs a command that succeeds; its standard output."""
    capsys.readouterr()

    def run(*arguments: str) -> str:
        assert main(["admin", *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def fails(capsys):
    """Runs a command that fails; its one line."""

    def fails(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["admin", *arguments]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("outrider: error: ")

    return fails


@pytest.fixture
def refused(capsys):
    """Runs a command whose options are wrong; the last line."""

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            main(["admin", *arguments])
        assert exit_.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return refused


def as_json(text: str):
    return json.loads(text)


# --- the database ---


def test_upgrade_and_current(tmp_path, monkeypatch, capsys, fails):
    address = f"sqlite:///{tmp_path / 'x.db'}"
    monkeypatch.delenv("OUTRIDER_DATABASE", raising=False)
    assert "--database" in fails("tenant", "list")
    assert "there is no file" in fails("tenant", "list", "--database", address)
    assert list(tmp_path.iterdir()) == []
    for previous in (None, "0003"):
        assert main(["admin", "database", "upgrade", "--database", address, "--format", "json"]) == 0
        row = as_json(capsys.readouterr().out)
        assert row == {"database": address, "revision": "0003", "previous_revision": previous}
    assert main(["admin", "database", "current", "--database", address]) == 0
    assert re.search(r"^revision +0003$", capsys.readouterr().out, re.MULTILINE)


def test_commands_do_not_make_tables(tmp_path, monkeypatch, fails):
    Database(parse_url(f"sqlite:///{tmp_path / 'x.db'}")).close()  # a file without tables
    message = fails("tenant", "list", "--database", f"sqlite:///{tmp_path / 'x.db'}")
    assert "has no tables yet; run `outrider admin database upgrade`" in message


def test_a_newer_database(address, fails):
    database = Database(parse_url(address))
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    for command in (("tenant", "list"), ("database", "upgrade"), ("database", "current")):
        assert "9999, which a newer Outrider made" in fails(*command)


@pytest.mark.parametrize("address", ["postgresql://u:secret@127.0.0.1:1/d", "mysql://u:secret@h/d", "secret"])
def test_passwords_stay_hidden(address, fails, monkeypatch):
    assert "secret" not in fails("tenant", "list", "--database", address)
    monkeypatch.setenv("OUTRIDER_DATABASE", address)
    assert "secret" not in fails("tenant", "list")


# --- tenants ---


@pytest.mark.slow
def test_tenants(run, fails):
    made = as_json(
        run(
            "tenant", "create", "acme", "--weight", "2", "--max-adapters", "3", "--requests-per-minute", "60",
            "--token-budget", "0", "--budget-period", "day", "--allowed-adapters", "sql", "json", "--format", "json",
        )
    )  # fmt: skip
    limits = {
        "requests_per_minute": 60, "token_budget": 0, "budget_period": "day", "allowed_adapters": ["sql", "json"],
    }  # fmt: skip
    assert made["limits"] == limits
    assert (made["name"], made["weight"], made["max_adapters"]) == ("acme", 2.0, 3)
    assert as_json(run("tenant", "show", "acme", "--format", "json")) == made
    run("tenant", "update", "acme", "--requests-per-minute", "none", "--any-adapter", "--weight", "0.5")
    changed = as_json(run("tenant", "list", "--format", "json"))
    assert changed == [made | {"weight": 0.5, "limits": {"token_budget": 0, "budget_period": "day"}}]
    run("tenant", "update", "acme", "--allowed-adapters")
    assert "allowed_adapters=" in run("tenant", "show", "acme")
    run("tenant", "disable", "acme")
    assert as_json(run("tenant", "show", "acme", "--format", "json"))["disabled"] is True
    run("tenant", "enable", "acme")
    assert as_json(run("tenant", "show", "acme", "--format", "json"))["disabled"] is False
    assert "never given again" in fails("tenant", "create", "acme")


@pytest.mark.slow
def test_deleting_asks(run, fails, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    run("tenant", "create", "acme")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "--yes" in fails("tenant", "delete", "acme")
    monkeypatch.setattr("sys.stdin", Terminal("yes\n"))
    assert main(["admin", "tenant", "delete", "acme"]) == 1
    assert "acme" in run("tenant", "list")
    monkeypatch.setattr("sys.stdin", Terminal("acme\n"))
    run("tenant", "delete", "acme")
    assert "acme" not in run("tenant", "list")
    run("tenant", "create", "globex")
    run("tenant", "delete", "globex", "--yes")
    assert "There is no tenant 'globex'" in fails("tenant", "show", "globex")


def test_errors_name_the_field(address, fails, refused):
    assert fails("tenant", "create", "Acme").startswith("name: must be 1 to 64 of")
    assert fails("tenant", "create", "a", "--weight", "0").startswith("weight: must be from")
    assert fails("tenant", "create", "a", "--requests-per-minute", "0").startswith(
        "limits.requests_per_minute: must be"
    )
    assert "nothing to change" in fails("tenant", "update", "a")
    assert "--requests-per-minute: must be a whole number" in refused(
        "tenant", "create", "a", "--requests-per-minute", "-1"
    )
    assert "COMMAND" in refused("tenant")
    assert "--tenant" in refused("key", "create")


def test_arguments_that_no_database_holds(address, fails):
    assert "characters" in fails("tenant", "show", "a\udcff")


# --- keys ---


def test_keys(run, address, capsys):
    run("tenant", "create", "acme")
    assert main(["admin", "key", "create", "--tenant", "acme", "--expires", "30d", "--name", "ci"]) == 0
    output = capsys.readouterr()
    secret = output.out.strip()  # alone, for $(...)
    assert re.fullmatch(r"sk-or-[\w-]{43}", secret)
    assert "shown only now" in output.err
    assert secret not in output.err
    (row,) = as_json(run("key", "list", "--format", "json"))
    assert (row["name"], row["prefix"], row["scopes"], row["state"]) == ("ci", secret[:12], ["inference"], "active")
    assert abs(row["expires_at"] - time.time() - 30 * 86400) < 60
    database = Database(parse_url(address))
    with database.read() as connection:
        assert bytes(connection.execute(api_keys.select()).one().digest) == hash_key(secret)
    database.close()
    revoked = as_json(run("key", "revoke", row["id"], "--format", "json"))
    assert revoked["state"] == "revoked"
    assert as_json(run("key", "list", "--format", "json")) == []
    assert as_json(run("key", "list", "--all", "--tenant", "acme", "--format", "json")) == [revoked]


def test_an_admins_key_as_json(run):
    run("tenant", "create", "ops")
    arguments = (
        "key create --tenant ops --scope admin --scope inference --token-budget 5 --expires 2100-01-01 --format json"
    )
    row = as_json(run(*arguments.split()))
    assert row["key"].startswith("sk-or-")
    assert (row["scopes"], row["limits"], row["expires_at"]) == (
        ["admin", "inference"],
        {"token_budget": 5},
        4102444800.0,
    )


def test_keys_that_cannot_be(run, fails, refused):
    assert "There is no tenant 'nobody'" in fails("key", "create", "--tenant", "nobody")
    run("tenant", "create", "acme")
    assert fails("key", "create", "--tenant", "acme", "--expires", "soon").startswith("expires: must be")
    assert fails("key", "create", "--tenant", "acme", "--expires", "2001-01-01").startswith(
        "expires_at: must be in the future"
    )
    assert "There is no key 'key-0'" in fails("key", "revoke", "key-0")
    assert "--scope" in refused("key", "create", "--tenant", "acme", "--scope", "root")


# --- usage ---


@pytest.fixture
def ledger(address) -> None:
    row = {
        "tenant": "acme", "key_id": "key-1", "endpoint": "/v1/completions", "prompt_tokens": 1000, "cached_tokens": 4,
        "output_tokens": 3, "drafted_tokens": 2, "accepted_tokens": 1, "received_at": 1767225600.0, "status": "stop",
    }  # fmt: skip
    rows = [
        row | {"request_id": "r1", "adapter": "", "finished_at": 1767225600.0},
        row | {"request_id": "r2", "adapter": "sql", "finished_at": time.time()},
    ]
    database = Database(parse_url(address))
    with database.write() as connection:
        connection.execute(insert(usage), rows)
    database.close()


def test_usage(run, ledger):
    lines = run("usage", "--by", "tenant,adapter").splitlines()
    assert lines[0].split() == [
        "TENANT", "ADAPTER", "REQUESTS", "PROMPT_TOKENS", "CACHED_TOKENS", "OUTPUT_TOKENS", "DRAFTED_TOKENS",
        "ACCEPTED_TOKENS",
    ]  # fmt: skip
    assert [line.split()[:4] for line in lines[1:]] == [["acme", "-", "1", "1,000"], ["acme", "sql", "1", "1,000"]]
    (row,) = csv.DictReader(io.StringIO(run("usage", "--format", "csv")))
    assert row["prompt_tokens"] == "2000"
    assert as_json(run("usage", "--by", "", "--format", "json"))[0]["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "requests"),
    [
        ("--from 1h", 1), ("--from 2026-01-01 --to 2026-01-02", 1), ("--tenant nobody", 0), ("--adapter sql", 1),
        ("--adapter=", 1), ("--key key-1", 2),
    ],
)  # fmt: skip
def test_filters(run, ledger, arguments, requests):
    assert as_json(run("usage", "--by", "", *arguments.split(), "--format", "json"))[0]["requests"] == requests


def test_requests(run, ledger, fails):
    assert [row["request_id"] for row in as_json(run("usage", "--requests", "5", "--format", "json"))] == ["r2", "r1"]
    (row,) = csv.DictReader(io.StringIO(run("usage", "--requests", "5", "--to", "2026-01-02", "--format", "csv")))
    assert (row["request_id"], row["finished_at"]) == ("r1", "2026-01-01T00:00:00Z")
    assert fails("usage", "--requests", "0").startswith("requests: must be")
    assert fails("usage", "--by", "name").startswith("by: must be some of")
    assert fails("usage", "--from", "soon").startswith("from: must be")


# --- prefixes ---


class CharTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def test_prefixes(run, fails, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda folder: CharTokenizer() if folder == "/model" else None)
    (tmp_path / "text").write_text("You are")
    (tmp_path / "ids").write_text("[1, 2, 3]")
    by_text = as_json(
        run("prefix", "add", "hello", "--text", str(tmp_path / "text"), "--tokenizer", "/model", "--format", "json")
    )
    assert by_text["num_tokens"] == 7
    run("prefix", "add", "ids", "--token-ids", str(tmp_path / "ids"))
    monkeypatch.setattr("sys.stdin", io.StringIO("[4]"))
    run("prefix", "add", "stdin", "--token-ids", "-")
    rows = as_json(run("prefix", "list", "--format", "json"))
    assert [(row["name"], row["num_tokens"]) for row in rows][1:] == [("ids", 3), ("stdin", 1)]
    run("prefix", "remove", "ids")
    assert "There is no shared prefix 'ids'" in fails("prefix", "remove", "ids")


@pytest.mark.parametrize(("content", "problem"), [("{", "not JSON"), ("[1.5]", "list of integers"), ("[]", "1 to")])
def test_bad_token_ids(address, fails, tmp_path, content, problem):
    (tmp_path / "ids").write_text(content)
    assert problem in fails("prefix", "add", "x", "--token-ids", str(tmp_path / "ids"))
    assert "cannot read" in fails("prefix", "add", "x", "--text", str(tmp_path / "nothing"))


# --- output ---


def test_tables_line_up():
    rows = [{"name": "a", "count": 1234, "share": 0.5}, {"name": "longer", "count": 5, "share": 2.0}]
    assert table(["name", "count", "share"], rows) == (
        "NAME    COUNT  SHARE\n"
        "a       1,234    0.5\n"
        "longer      5      2\n"
    )  # fmt: skip
    assert table(["name"], []) == "NAME\n"


@pytest.mark.slow
def test_every_command_has_help(capsys):
    commands = ("tenant create|list|show|update|disable|enable|delete", "key create|list|revoke", "usage ")
    for group in (*commands, "prefix add|list|remove", "database upgrade|current"):
        name, _, subcommands = group.partition(" ")
        for subcommand in subcommands.split("|"):
            with pytest.raises(SystemExit) as exit_:
                build_parser().parse_args(["admin", name, *([subcommand] if subcommand else []), "--help"])
            assert exit_.value.code == 0
            text = capsys.readouterr().out
            assert "--database" in text
            assert "--format" in text
