"""`outrider admin usage`."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from ...tenancy.times import parse_duration, parse_time
from .connection import open_database
from .output import print_rows

if TYPE_CHECKING:
    from .admin_command import Commands

REQUEST_COLUMNS = (
    "finished_at", "request_id", "tenant", "key_id", "adapter", "prompt_tokens", "cached_tokens", "output_tokens",
    "drafted_tokens", "accepted_tokens", "status", "error_type",
)  # fmt: skip


def add_commands(admin: Commands) -> None:
    """Add the command."""
    parser = admin.add("usage", _show, "sum up the ledger, or list its last requests")
    parser.add_argument(
        "--by",
        default="tenant",
        metavar="A,B",
        help="a row for each: some of tenant, key, adapter, model, endpoint, status, hour, day, month; "
        "'' for one sum (default: %(default)s)",
    )
    parser.add_argument("--tenant", metavar="NAME")
    parser.add_argument("--key", metavar="ID")
    parser.add_argument("--adapter", metavar="NAME", help="'' is the base model")
    parser.add_argument(
        "--from", dest="start", metavar="WHEN", help="requests that ended then or later: a date, or 24h or 7d ago"
    )
    parser.add_argument("--to", dest="end", metavar="WHEN", help="and before this")
    parser.add_argument("--requests", type=int, metavar="N", help="instead of sums, the last N requests")


def _show(namespace: argparse.Namespace) -> int:
    from ...tenancy.ledger.reports import COUNTS, UsageFilter, list_requests, parse_groups, sum_usage

    which = UsageFilter(
        tenant=namespace.tenant,
        key=namespace.key,
        adapter=namespace.adapter,
        start=_time(namespace.start, "from"),
        end=_time(namespace.end, "to"),
    )
    with open_database(namespace) as database:
        if namespace.requests is not None:
            print_rows(list_requests(database, which, namespace.requests), REQUEST_COLUMNS, namespace.format)
            return 0
        groups = parse_groups(namespace.by, "by")
        print_rows(sum_usage(database, groups, which), [*groups, "requests", *COUNTS], namespace.format)
    return 0


def _time(text: str | None, field: str) -> float | None:
    if text is None:
        return None
    seconds = parse_duration(text)
    return parse_time(text, field) if seconds is None else time.time() - seconds
