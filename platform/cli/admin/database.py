"""`outrider admin database`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .connection import open_any_database
from .output import print_row

if TYPE_CHECKING:
    from ...tenancy.database.connection import Database
    from .admin_command import Commands


def add_commands(admin: Commands) -> None:
    """Add the commands."""
    group = admin.group("database", "the database's tables")
    group.add("upgrade", _upgrade, "make the tables, or bring them to this version; servers do so when they start")
    group.add("current", _current, "show how far the tables are")


def _upgrade(namespace: argparse.Namespace) -> int:
    from ...tenancy.database.migrations.upgrade import revisions, upgrade

    with open_any_database(namespace, create=True) as database:
        before = upgrade(database).current
        print_row(_row(database, revision=revisions(database).current, previous_revision=before), namespace.format)
    return 0


def _current(namespace: argparse.Namespace) -> int:
    from ...tenancy.database.migrations.upgrade import revisions

    with open_any_database(namespace) as database:
        found = revisions(database)
        print_row(_row(database, revision=found.current, newest_revision=found.newest), namespace.format)
    return 0


def _row(database: Database, **facts: str | None) -> dict[str, Any]:
    return {"database": database.shown, **facts}
