"""Tables come from the migrations alone, once, even if several servers migrate at once."""

import logging
import subprocess
import sys

import pytest
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import check_up_to_date, revisions, upgrade
from outrider.platform.tenancy.database.schema import metadata

NEWEST = "0003"

UPGRADE = """
import sys, time, pathlib
from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
database = Database(parse_url(sys.argv[1]))
print("ready", flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.001)
print(upgrade(database).current)
"""


@pytest.fixture
def empty(database_url):
    database = Database(parse_url(database_url))
    yield database
    database.close()


def table_names(database: Database) -> set[str]:
    with database.read() as connection:
        return set(inspect(connection).get_table_names())


def test_the_migrations_make_the_schema(empty):
    assert upgrade(empty) == (None, NEWEST)
    with empty.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_an_upgrade_is_one_line_of_the_log(empty, caplog):
    with caplog.at_level(logging.INFO):
        upgrade(empty)
        upgrade(empty)
    [message] = caplog.messages
    assert message == f"the database's tables went from revision none to {NEWEST}"


def test_a_second_upgrade_changes_nothing(empty):
    assert revisions(empty) == (None, NEWEST)
    upgrade(empty)
    assert upgrade(empty) == revisions(empty) == (NEWEST, NEWEST)
    check_up_to_date(empty)


def test_all_or_nothing(empty, monkeypatch):
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(op, "create_index", fail)
        with pytest.raises(ZeroDivisionError):
            upgrade(empty)
    assert table_names(empty) == set()
    upgrade(empty)
    assert table_names(empty) == {*metadata.tables, "alembic_version"}


def test_a_database_of_a_newer_version_is_refused(empty):
    upgrade(empty)
    with empty.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for call in (upgrade, revisions, check_up_to_date):
        with pytest.raises(InvalidRequestError, match=f"9999.*newer.*{NEWEST}") as refused:
            call(empty)
        assert refused.value.param == "database"


def test_tables_of_another_program_are_left_alone(empty):
    with empty.write() as connection:
        connection.execute(text("CREATE TABLE tenants (mine INTEGER)"))
    with pytest.raises(InvalidRequestError, match=r"did not make \(tenants\)"):
        upgrade(empty)
    assert table_names(empty) == {"tenants"}


def test_messages_name_the_command_to_run(empty):
    with pytest.raises(InvalidRequestError, match="has no tables yet; run `outrider admin database upgrade`"):
        check_up_to_date(empty)


def test_sqlite_checks_references_again_afterwards(sqlite):
    upgrade(sqlite)
    for open_ in (sqlite.read, sqlite.write):
        with open_() as connection:
            assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1


@pytest.mark.slow
def test_servers_that_start_at_once(database_url, tmp_path):
    """One makes the tables, the other waits for it and finds them."""
    start = tmp_path / "start"
    command = [sys.executable, "-c", UPGRADE, database_url, str(start)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    start.touch()
    found = sorted(process.communicate(timeout=60)[0].strip() for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert found == [NEWEST, "None"]
