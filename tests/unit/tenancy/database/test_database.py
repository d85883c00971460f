"""Addresses, connections, transactions, errors."""

import contextlib
import os
import stat
import threading

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.exc import IntegrityError

from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.tenancy.database.connection import Database, DatabaseUnavailableError, parse_url, shown_url
from outrider.platform.tenancy.database.schema import api_keys, revisions, tenants
from outrider.platform.tenancy.service import default_journal

ACME = {"name": "acme", "weight": 1.0, "limits": {}, "max_adapters": 0, "disabled": False, "created_at": 1.0}


def number(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(select(revisions.c.number)).scalar_one()


@pytest.mark.parametrize(
    ("address", "driver"),
    [
        ("sqlite:////tmp/x.db", "sqlite"),
        ("postgres://u@h/d", "postgresql+psycopg"),
        ("postgresql://u:p@h:5433/d", "postgresql+psycopg"),
        ("postgresql+psycopg://u@/d?host=/run/postgresql", "postgresql+psycopg"),
    ],
)
def test_addresses(address, driver):
    assert parse_url(address).drivername == driver


def test_a_sqlite_file_stays_the_same_wherever_the_process_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_url("sqlite:///x.db").database == str(tmp_path / "x.db")


@pytest.mark.parametrize(
    "address",
    [
        "secret", "", "://secret@", "mysql://u:secret@h/d", "postgresql+asyncpg://u:secret@h/d", "sqlite://", "sqlite:///",
        "sqlite:///:memory:", "sqlite:///x?mode=secret", "sqlite://secret@h/x", "postgresql://u:secret@h:port/d",
        "postgresql://u:secret@h:99999999999999999999/d/[",
    ],
)  # fmt: skip
def test_addresses_that_are_refused_are_not_repeated(address):
    with pytest.raises(InvalidRequestError) as refused:
        Database(parse_url(address))
    assert refused.value.param == "database"
    assert "secret" not in refused.value.message
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "address", ["postgresql://u:secret@h/d", "postgresql://u@h/d?password=secret&sslpassword=secret"]
)
def test_passwords_are_not_shown(address):
    url = parse_url(address)
    database = Database(url)
    try:
        for shown in (shown_url(url), database.shown):
            assert "secret" not in shown
            assert "***" in shown
    finally:
        database.close()


def test_a_server_that_is_not_there(tmp_path):
    database = Database(parse_url(f"postgresql://u:secret@/d?host={tmp_path}"))
    with pytest.raises(DatabaseUnavailableError, match=r"\*\*\*.*failed: connection") as refused, database.read():
        pass
    assert "secret" not in refused.value.message
    assert refused.value.status == 503
    database.close()


def test_sqlite_files(tmp_path):
    with pytest.raises(InvalidRequestError, match="there is no folder"):
        Database(parse_url(f"sqlite:///{tmp_path}/no/x.db"))
    with pytest.raises(InvalidRequestError, match="there is no file"):
        Database(parse_url(f"sqlite:///{tmp_path}/x.db"), create=False)
    assert list(tmp_path.iterdir()) == []
    Database(parse_url(f"sqlite:///{tmp_path}/x.db")).close()
    assert stat.S_IMODE(os.stat(tmp_path / "x.db").st_mode) == 0o600


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "x.db").write_text("something else, and long enough to be looked at " * 100)
    database = Database(parse_url(f"sqlite:///{tmp_path}/x.db"))
    with pytest.raises(DatabaseUnavailableError, match="not a database"), database.read():
        pass
    database.close()


def test_sqlite_commits_survive_power_cuts_and_rows_refer_to_something(sqlite):
    with sqlite.read() as connection:
        values = [
            connection.execute(text(f"PRAGMA {p}")).scalar() for p in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert values == ["wal", 2, 1]
    key = {"id": "k", "tenant": "nobody", "name": "", "prefix": "", "digest": b"d", "scopes": [], "created_at": 1.0}
    with pytest.raises(IntegrityError), sqlite.write() as connection:
        connection.execute(insert(api_keys).values(key))


def test_an_error_rolls_back(database):
    with contextlib.suppress(ZeroDivisionError), database.write() as connection:
        connection.execute(insert(tenants).values(ACME))
        raise ZeroDivisionError
    with database.read() as connection:
        assert connection.execute(select(tenants)).all() == []


def test_reads_in_a_write_are_consistent(sqlite):
    """Read, then write, from several threads: no update is lost, and no thread finds the database locked."""

    def count() -> None:
        for _ in range(10):
            with sqlite.write() as connection:
                seen = connection.execute(select(revisions.c.number)).scalar_one()
                connection.execute(update(revisions).values(number=seen + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number(sqlite) == 40


def test_readers_do_not_wait_for_a_writer(database):
    with database.write() as connection:
        connection.execute(update(revisions).values(number=7))
        assert number(database) == 0
    assert number(database) == 7


def test_a_second_writer_that_waits_too_long_gets_a_typed_error(sqlite, monkeypatch):
    monkeypatch.setattr("outrider.platform.tenancy.database.connection.SQLITE_BUSY_SECONDS", 0.01)
    other = Database(sqlite.url)
    with sqlite.write(), pytest.raises(DatabaseUnavailableError, match="locked"), other.write():
        pass
    other.close()


@pytest.mark.parametrize("value", ["a\0b", "a\udc00b"])
def test_texts_that_no_database_holds_are_the_senders_fault(database, value):
    query = select(tenants).where(tenants.c.name == value)
    if database.is_sqlite and value == "a\0b":  # which it does hold
        with database.read() as connection:
            assert connection.execute(query).all() == []
        return
    with pytest.raises(InvalidRequestError, match="characters"), database.read() as connection:
        connection.execute(query)


def test_errors_do_not_quote_values(sqlite):
    with pytest.raises(DatabaseUnavailableError) as refused, sqlite.write() as connection:
        connection.execute(text("INSERT INTO nothing VALUES (:value)"), {"value": "secret"})
    assert "secret" not in f"{refused.value.message} {refused.value.__cause__}"


@pytest.mark.slow
def test_a_server_that_was_restarted_is_found_again(make_postgresql):
    server = make_postgresql()
    database = Database(parse_url(server.new_database()))
    with database.read() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    server.stop()
    with pytest.raises(DatabaseUnavailableError), database.read():
        pass
    server.start()
    with database.read() as connection:
        assert connection.scalar(text("SELECT 2")) == 2
    database.close()


def test_every_database_has_a_journal_of_its_own(tmp_path, monkeypatch):
    """Rows that could not be written to one database are not replayed into another."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def journal(address):
        database = Database(parse_url(address))
        database.close()
        return default_journal(database)

    assert journal(f"sqlite:///{tmp_path}/x.db") == tmp_path / "x.db.ledger"
    first = journal("postgresql://a:secret@host/one")
    assert first.parent == tmp_path / "outrider" / "ledger"
    assert first == journal("postgresql://b:other@host/one?sslmode=require")
    others = ("host/two", "elsewhere/one", "host:5433/one", "/one?host=/run/a", "/one?host=/run/b")
    assert len({first, *(journal(f"postgresql://{rest}") for rest in others)}) == 6
