"""Audit of changes: a row in the database, in the same transaction as the change, and a line of the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, delete, insert, or_, select

from ...core.errors import InvalidRequestError
from .connection import Database
from .schema import MAX_ACTION, MAX_CLIENT, audit

logger = logging.getLogger("outrider.audit")
logger.setLevel(logging.INFO)  # whatever --log-level says: who changed what must be found later

COLUMNS = tuple(audit.c.keys())
MAX_ROWS = 1000
"""Largest number of rows in one answer."""
MAX_NOTES = 10_000
"""Rows about adapters that are kept of one tenant."""
_NOTED = ("loaded", "unloaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Author of a change."""

    via: Literal["http", "cli"] = "http"
    key_id: str = ""
    """Id of the key; "" for the server's own admin key, or the command line."""
    tenant: str = ""
    """Tenant of the key."""
    client: str = ""
    """Address of the client, or user@machine of the command line."""

    @property
    def description(self) -> str:
        """Text for the log."""
        who = f"{self.key_id} ({self.tenant})" if self.key_id else "the server's own admin key"
        return f"{who if self.via == 'http' else 'outrider admin'}, from {self.client or 'unknown'}"


def write_row(connection: Connection, at: float, actor: Actor, action: str) -> None:
    """Write the row of a change, in its transaction; `at` in seconds since the epoch."""
    values = {"changed_at": at, "via": actor.via, "key_id": actor.key_id, "tenant": actor.tenant}
    values |= {"client": actor.client[:MAX_CLIENT], "action": action[:MAX_ACTION]}
    connection.execute(insert(audit).values(values))


def forget_old_notes(connection: Connection, tenant: str) -> None:
    """Delete a tenant's rows about adapters but the last `MAX_NOTES`: it may write some all day."""
    its = (audit.c.tenant == tenant) & or_(*(audit.c.action.startswith(f"{verb} adapter ") for verb in _NOTED))
    last = select(audit.c.id).where(its).order_by(audit.c.id.desc()).offset(MAX_NOTES).limit(1)
    found = connection.execute(last).scalar()
    if found is not None:
        connection.execute(delete(audit).where(its & (audit.c.id <= found)))


def write_line(actor: Actor, action: str) -> None:
    """Write the line of the log, when the change has been made."""
    extra = {"key_id": actor.key_id, "tenant": actor.tenant, "client": actor.client}
    action = action[:MAX_ACTION]
    logger.info("%s, %s", actor.description, action, extra=extra | {"action": action})


def list_audit(database: Database, limit: int = 100, before: int | None = None) -> list[dict[str, Any]]:
    """The last changes, newest first, by column; blocks, as in `store`.

    Args:
        before: The `id` of a row: those older than that one.

    Raises:
        InvalidRequestError: `limit` is not in its range.
    """
    if not 1 <= limit <= MAX_ROWS:
        raise InvalidRequestError(f"limit: must be from 1 to {MAX_ROWS}", param="limit")
    query = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.id < before)
    with database.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]
