"""`outrider admin key`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from ...tenancy.accounts.principal import SCOPES, limit_fields, merge_limits
from ...tenancy.accounts.records import Key
from ...tenancy.times import format_time, parse_duration, parse_time
from .limit_options import add_limit_options, given_limits
from .output import print_row

if TYPE_CHECKING:
    from ...tenancy.database.store import Store
    from .admin_command import Commands

_COLUMNS = ("id", "tenant", "name", "prefix", "scopes", "state", "created_at", "expires_at", "limits")


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
    keys = group.add("list", _list, "list keys", _COLUMNS)
    keys.add_argument("--tenant", metavar="NAME", help="only its keys")
    keys.add_argument("--all", action="store_true", help="those that have been revoked, too")
    revoke = group.add("revoke", _revoke, "let a key in no more; servers follow within a second")
    revoke.add_argument("id", metavar="ID", help="as in the list: key-...")


def _row(key: Key) -> dict[str, Any]:
    return dataclasses.asdict(key) | {"state": key.state(time.time()), "limits": limit_fields(key.limits)}


def _create(store: Store, namespace: argparse.Namespace) -> None:
    key, secret = store.create_key(
        namespace.tenant,
        name=namespace.name,
        scopes=namespace.scope or ("inference",),
        limits=merge_limits(given_limits(namespace)),
        expires_at=None if namespace.expires is None else _expiry(namespace.expires),
    )
    if namespace.format != "table":
        print_row({"key": secret, **_row(key)}, namespace.format)
        return
    print(secret, flush=True)  # alone, so that $(...) takes it
    until = format_time(key.expires_at) or "it is revoked"
    print(
        f"This is {key.id} of {key.tenant}, for {' and '.join(key.scopes)}, valid until {until}. "
        "The key is shown only now: keep it.",
        file=sys.stderr,
    )


def _expiry(text: str) -> float:
    seconds = parse_duration(text)
    return parse_time(text, "expires") if seconds is None else time.time() + seconds


def _list(store: Store, namespace: argparse.Namespace) -> list[dict[str, Any]]:
    return [_row(key) for key in store.list_keys(namespace.tenant, revoked=namespace.all)]


def _revoke(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    return _row(store.revoke_key(namespace.id))
