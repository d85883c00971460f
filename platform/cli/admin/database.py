"""`outrider admin database`, and the database of every command."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidRequestError
from ..options.database_option import DATABASE_VARIABLE, given_database

if TYPE_CHECKING:
    from ...tenancy.database.connection import Database
    from ...tenancy.database.store import Store
    from .admin_command import Commands


def add_commands(admin: Commands) -> None:
    """Add the commands."""
    group = admin.group("database", "the database's tables")
    text = "make the tables, or bring them to this version; servers do so when they start"
    group.add("upgrade", _upgrade, text, opens=partial(open_any_database, create=True))
    group.add("current", _current, "show how far the tables are", opens=open_any_database)


def _upgrade(database: Database, namespace: argparse.Namespace) -> dict[str, Any]:
    from ...tenancy.database.migrations.upgrade import revisions, upgrade

    before = upgrade(database).current
    return {"database": database.shown, "revision": revisions(database).current, "previous_revision": before}


def _current(database: Database, namespace: argparse.Namespace) -> dict[str, Any]:
    from ...tenancy.database.migrations.upgrade import revisions

    found = revisions(database)
    return {"database": database.shown, "revision": found.current, "newest_revision": found.newest}


@contextlib.contextmanager
def open_any_database(namespace: argparse.Namespace, *, create: bool = False) -> Iterator[Database]:
    """Open the database, whatever tables it has."""
    address = given_database(namespace)
    if address is None:
        raise InvalidRequestError(f"give the database: --database URL, or the variable {DATABASE_VARIABLE}")
    from ...tenancy.database.connection import Database, parse_url

    database = Database(parse_url(address), create=create)
    try:
        yield database
    finally:
        database.close()


@contextlib.contextmanager
def open_database(namespace: argparse.Namespace) -> Iterator[Database]:
    """Open the database and check that it has the tables of this version."""
    from ...tenancy.database.migrations.upgrade import check_up_to_date

    with open_any_database(namespace) as database:
        check_up_to_date(database)
        yield database


@contextlib.contextmanager
def open_store(namespace: argparse.Namespace) -> Iterator[Store]:
    """Open the store of tenants and keys in the database."""
    from ...tenancy.database.audit import Actor
    from ...tenancy.database.store import Store

    with open_database(namespace) as database:
        yield Store(database, actor=Actor(via="cli", client=_user()))


def _user() -> str:
    """Name of the operating system's user; the number of a user without a name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):
        name = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{name}@{socket.gethostname()}"
