"""Sums of usage from the ledger. Blocking calls, as in `store`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Select, func, select

from ...core.errors import InvalidRequestError
from ..database.connection import Database
from ..database.schema import usage

Group = Literal["tenant", "key", "adapter", "model", "endpoint", "status", "hour", "day", "month"]
"""Groups that usage can be summed up by; the last three are of the time at which requests ended, in UTC."""
GROUPS: tuple[Group, ...] = get_args(Group)

COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "drafted_tokens", "accepted_tokens")
"""Columns that are added up."""

MAX_ROWS = 100_000
"""Largest number of rows in one answer."""
MAX_REQUESTS = 1000
"""Single requests in one answer."""

_COLUMNS = {
    "tenant": usage.c.tenant,
    "key": usage.c.key_id,
    "adapter": usage.c.adapter,
    "model": usage.c.model,
    "endpoint": usage.c.endpoint,
    "status": usage.c.status,
}
_SQLITE_FORMATS = {"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}
_POSTGRESQL_FORMATS = {"hour": 'YYYY-MM-DD"T"HH24:00"Z"', "day": "YYYY-MM-DD", "month": "YYYY-MM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Filter of requests; None: all."""

    tenant: str | None = None
    key: str | None = None
    adapter: str | None = None
    """"" is the base model."""
    start: float | None = None
    """Seconds since the epoch: requests that ended then or later."""
    end: float | None = None
    """Seconds since the epoch: requests that ended before."""


def parse_groups(text: str, field: str) -> tuple[Group, ...]:
    """ "tenant,adapter" as groups; "" is none: one sum over everything.

    Raises:
        InvalidRequestError: of `field`: it names something else.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    groups = [group for name in names for group in GROUPS if group == name]
    if len(groups) != len(names):
        raise InvalidRequestError(
            f"{field}: must be some of {', '.join(GROUPS)}, with commas between them", param=field
        )
    return tuple(dict.fromkeys(groups))


def sum_usage(database: Database, groups: Sequence[Group], which: UsageFilter) -> list[dict[str, Any]]:
    """A row for each combination of the groups' values, in their order: those values, the number of `requests`, and
    the sums of `COUNTS`.

    Raises:
        InvalidRequestError: there are more than `MAX_ROWS`.
    """
    keys = [_group(database, group).label(group) for group in groups]
    sums = [func.coalesce(func.sum(usage.c[name]), 0).label(name) for name in COUNTS]
    query = _filtered(select(*keys, func.count().label("requests"), *sums).select_from(usage), which)
    if keys:
        query = query.group_by(*keys).order_by(*keys)
    with database.read() as connection:
        rows = connection.execute(query.limit(MAX_ROWS + 1)).mappings().all()
    if len(rows) > MAX_ROWS:
        raise InvalidRequestError(f"these are more than {MAX_ROWS} rows; narrow them down", param="group_by")
    # PostgreSQL's sums of integers are decimals.
    return [{name: int(value) if name in COUNTS else value for name, value in row.items()} for row in rows]


def list_requests(database: Database, which: UsageFilter, limit: int = 100) -> list[dict[str, Any]]:
    """The last requests of the ledger, newest first, each with all of its columns.

    Raises:
        InvalidRequestError: `limit` is not in its range.
    """
    if not 1 <= limit <= MAX_REQUESTS:
        raise InvalidRequestError(f"requests: must be from 1 to {MAX_REQUESTS}", param="requests")
    query = _filtered(select(usage), which).order_by(usage.c.finished_at.desc(), usage.c.request_id.desc())
    with database.read() as connection:
        return [dict(row) for row in connection.execute(query.limit(limit)).mappings()]


def _group(database: Database, group: Group) -> ColumnElement[Any]:
    if group in _COLUMNS:
        return _COLUMNS[group]
    if database.is_sqlite:
        return func.strftime(_SQLITE_FORMATS[group], usage.c.finished_at, "unixepoch")
    return func.to_char(func.timezone("UTC", func.to_timestamp(usage.c.finished_at)), _POSTGRESQL_FORMATS[group])


def _filtered(query: Select[Any], which: UsageFilter) -> Select[Any]:
    for column, value in (
        (usage.c.tenant, which.tenant),
        (usage.c.key_id, which.key),
        (usage.c.adapter, which.adapter),
    ):
        if value is not None:
            query = query.where(column == value)
    if which.start is not None:
        query = query.where(usage.c.finished_at >= which.start)
    if which.end is not None:
        query = query.where(usage.c.finished_at < which.end)
    return query
