"""`outrider admin usage` and `outrider admin audit`: what was used, and who changed what."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from ...tenancy.times import parse_duration, parse_time
from .database import open_database
from .output import print_rows

if TYPE_CHECKING:
    from ...tenancy.database.connection import Database
    from .admin_command import Commands

REQUEST_COLUMNS = (
    "finished_at", "request_id", "tenant", "key_id", "adapter", "prompt_tokens", "cached_tokens", "output_tokens",
    "drafted_tokens", "accepted_tokens", "status", "error_type",
)  # fmt: skip


def add_commands(admin: Commands) -> None:
    """Add the commands."""
    usage = admin.add("usage", _usage, "sum up the ledger, or list its last requests", opens=open_database)
    usage.add_argument(
        "--by",
        default="tenant",
        metavar="A,B",
        help="a row for each: some of tenant, key, adapter, model, endpoint, status, hour, day, month; "
        "'' for one sum (default: %(default)s)",
    )
    usage.add_argument("--tenant", metavar="NAME")
    usage.add_argument("--key", metavar="ID")
    usage.add_argument("--adapter", metavar="NAME", help="'' is the base model")
    usage.add_argument(
        "--from", dest="start", metavar="WHEN", help="requests that ended then or later: a date, or 24h or 7d ago"
    )
    usage.add_argument("--to", dest="end", metavar="WHEN", help="and before this")
    usage.add_argument("--requests", type=int, metavar="N", help="instead of sums, the last N requests")
    audit = admin.add("audit", _audit, "list who changed what, newest first", opens=open_database)
    audit.add_argument("--limit", type=int, default=100, metavar="N", help="changes to show (default: %(default)s)")


def _usage(database: Database, namespace: argparse.Namespace) -> None:
    from ...tenancy.ledger.reports import COUNTS, UsageFilter, list_requests, parse_groups, sum_usage

    which = UsageFilter(
        tenant=namespace.tenant,
        key=namespace.key,
        adapter=namespace.adapter,
        start=_time(namespace.start, "from"),
        end=_time(namespace.end, "to"),
    )
    if namespace.requests is not None:
        rows: list[Any] = list_requests(database, which, namespace.requests)
        print_rows(rows, REQUEST_COLUMNS, namespace.format)
        return
    groups = parse_groups(namespace.by, "by")
    print_rows(sum_usage(database, groups, which), [*groups, "requests", *COUNTS], namespace.format)


def _time(text: str | None, field: str) -> float | None:
    if text is None:
        return None
    seconds = parse_duration(text)
    return parse_time(text, field) if seconds is None else time.time() - seconds


def _audit(database: Database, namespace: argparse.Namespace) -> None:
    from ...tenancy.database.audit import COLUMNS, list_audit

    print_rows(list_audit(database, namespace.limit), COLUMNS, namespace.format)
