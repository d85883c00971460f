"""`outrider admin database`."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from .database_access import open_any_database

if TYPE_CHECKING:
    from ...tenancy.database.connection import Database
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
