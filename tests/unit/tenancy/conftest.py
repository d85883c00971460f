"""Databases with tables and nothing in them. Migrations run once a kind: their tests have databases of their own."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from outrider.platform.tenancy.database.connection import Database, parse_url
from outrider.platform.tenancy.database.migrations.upgrade import upgrade
from outrider.platform.tenancy.database.schema import metadata
from outrider.platform.tenancy.database.store import Store

sys.path.insert(0, str(Path(__file__).parent))


def migrated(url: str) -> Database:
    database = Database(parse_url(url))
    upgrade(database)
    return database


@pytest.fixture(scope="session")
def empty_file(tmp_path_factory) -> Path:
    database = migrated(f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'empty.db'}")
    database.close()
    assert database.file is not None
    return database.file


@pytest.fixture(scope="session")
def shared_postgresql(postgresql) -> str:
    url = postgresql.new_database()
    migrated(url).close()
    return url


@pytest.fixture
def sqlite(tmp_path, empty_file) -> Iterator[Database]:
    """For tests that do not depend on the kind."""
    database = Database(parse_url(f"sqlite:///{shutil.copy(empty_file, tmp_path / 'outrider.db')}"))
    yield database
    database.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request) -> Iterator[Database]:
    """Database of each kind in turn."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite")
        return
    database = Database(parse_url(request.getfixturevalue("shared_postgresql")))
    with database.write() as connection:
        connection.execute(text(f"TRUNCATE {', '.join(metadata.tables)}"))
        connection.execute(text("INSERT INTO revisions VALUES ('directory', 0)"))
    yield database
    database.close()


@pytest.fixture
def store(database) -> Store:
    return Store(database)
