"""`outrider admin key`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from ...tenancy.accounts.principal import SCOPES, limit_fields, limits_of
from ...tenancy.accounts.records import Key
from ...tenancy.times import format_time, parse_duration, parse_time
from .connection import open_store
from .limits import add_limit_options, given_limits
from .output import print_row, print_rows

if TYPE_CHECKING:
    from .admin_command import Commands

COLUMNS = ("id", "tenant", "name", "prefix", "scopes", "state", "created_at", "expires_at", "limits")


def add_commands(admin: Commands) -> None:
    """Add the commands."""
    group = admin.group("key", "API keys of tenants")
    create = group.add("create", _create, "make a key; it is printed once and stored nowhere")
    create.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    create.add_argument("--name", default="", metavar="TEXT", help="what it is for")
    create.add_argument(
        "--scope",
        choices=SCOPES,
        action="append",
        help="inference: to generate; admin: to run the server, too; may be repeated (default: inference)",
    )
    create.add_argument(
        "--expires", metavar="WHEN", help="a time from now such as 12h or 90d, or a date (default: never)"
    )
    add_limit_options(create)
    keys = group.add("list", _list, "list keys")
    keys.add_argument("--tenant", metavar="NAME", help="only its keys")
    keys.add_argument("--all", action="store_true", help="those that have been revoked, too")
    revoke = group.add("revoke", _revoke, "let a key in no more; servers follow within a second")
    revoke.add_argument("id", metavar="ID", help="as in the list: key-...")


def row_of(key: Key) -> dict[str, Any]:
    """The printed fields of a key."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "prefix": key.prefix,
        "scopes": list(key.scopes),
        "state": key.state(time.time()),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "limits": limit_fields(key.limits),
    }


def _create(namespace: argparse.Namespace) -> int:
    with open_store(namespace) as store:
        key, secret = store.create_key(
            namespace.tenant,
            name=namespace.name,
            scopes=namespace.scope or ("inference",),
            limits=limits_of(given_limits(namespace)),
            expires_at=None if namespace.expires is None else _expiry(namespace.expires),
        )
    if namespace.format != "table":
        print_row({"key": secret, **row_of(key)}, namespace.format)
        return 0
    print(secret, flush=True)  # alone, so that $(...) takes it
    until = format_time(key.expires_at) or "it is revoked"
    print(
        f"This is {key.id} of {key.tenant}, for {' and '.join(key.scopes)}, valid until {until}. "
        "The key is shown only now: keep it.",
        file=sys.stderr,
    )
    return 0


def _expiry(text: str) -> float:
    seconds = parse_duration(text)
    return parse_time(text, "expires") if seconds is None else time.time() + seconds


def _list(namespace: argparse.Namespace) -> int:
    with open_store(namespace) as store:
        rows = [row_of(key) for key in store.list_keys(namespace.tenant, revoked=namespace.all)]
    print_rows(rows, COLUMNS, namespace.format)
    return 0


def _revoke(namespace: argparse.Namespace) -> int:
    with open_store(namespace) as store:
        print_row(row_of(store.revoke_key(namespace.id)), namespace.format)
    return 0
