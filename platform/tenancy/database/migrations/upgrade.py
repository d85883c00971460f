"""Upgrades of a database's tables to those of this version."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, inspect

from ....core.errors import InvalidRequestError
from ..connection import Database
from ..schema import metadata

logger = logging.getLogger(__name__)
logging.getLogger("alembic").setLevel(logging.WARNING)  # one line of ours says what its lines for each revision do


class Revisions(NamedTuple):
    """Revision of a database, and the newest one."""

    current: str | None
    """None: there are no tables yet."""
    newest: str
    """Newest revision that this version knows."""


def upgrade(database: Database) -> Revisions:
    """Make or change the tables, all in one transaction; servers that start at once wait for each other. Returns the
    revisions as they were found.

    Raises:
        InvalidRequestError: the database belongs to a newer version, or to another program.
        DatabaseUnavailableError: it failed.
    """
    config = _config()
    with database.change_tables() as connection:
        found = _revisions(connection, config)
        if found.current is None:
            _check_empty(connection)
        if found.current != found.newest:
            config.attributes.update(connection=connection, metadata=metadata)
            command.upgrade(config, "head")
            logger.info("the database's tables went from revision %s to %s", found.current or "none", found.newest)
    return found


def revisions(database: Database) -> Revisions:
    """The database's revisions.

    Raises:
        InvalidRequestError: further than this version knows.
    """
    with database.read() as connection:
        return _revisions(connection, _config())


def check_up_to_date(database: Database) -> None:
    """Check, for commands that work on a database in use, that its tables are those of this version.

    Raises:
        InvalidRequestError: its tables are not those of this version.
    """
    current, newest = revisions(database)
    if current != newest:
        state = (
            "has no tables yet" if current is None else f"is at revision {current}, this version works with {newest}"
        )
        raise InvalidRequestError(
            f"{database.shown} {state}; run `outrider admin database upgrade` first", param="database"
        )


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def _revisions(connection: Connection, config: Config) -> Revisions:
    script = ScriptDirectory.from_config(config)
    newest = script.get_current_head()
    assert newest is not None
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None:
        try:
            script.get_revision(current)
        except CommandError:
            raise InvalidRequestError(
                f"its tables are at revision {current}, which a newer Outrider made; this one knows revision {newest}",
                param="database",
            ) from None
    return Revisions(current, newest)


def _check_empty(connection: Connection) -> None:
    """Tables of ours without a revision were not made here, and are left alone."""
    clash = sorted(set(inspect(connection).get_table_names()) & set(metadata.tables))
    if clash:
        raise InvalidRequestError(
            f"it has tables that Outrider did not make ({', '.join(clash)}); give it a database of its own",
            param="database",
        )
