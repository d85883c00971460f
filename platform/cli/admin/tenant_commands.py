"""`outrider admin tenant`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidRequestError
from ...tenancy.accounts.principal import limit_fields, merge_limits
from ...tenancy.accounts.records import Tenant
from .limit_options import add_limit_options, given_limits

if TYPE_CHECKING:
    from ...tenancy.database.store import Store
    from .admin_command import Commands

_COLUMNS = ("name", "weight", "max_adapters", "disabled", "created_at", "limits")


def add_commands(admin: Commands) -> None:
    """Add the commands."""
    group = admin.group("tenant", "tenants: who uses the server")
    create = group.add("create", _create, "add a tenant")
    create.add_argument(
        "name", metavar="NAME", help="a-z 0-9 . _ -; never given again, also when the tenant is deleted"
    )
    _add_fields(create, change=False)
    group.add("list", _list, "list the tenants", _COLUMNS)
    show = group.add("show", _show, "show a tenant")
    show.add_argument("name", metavar="NAME")
    change = group.add("update", _update, "change a tenant; what is not given stays")
    change.add_argument("name", metavar="NAME")
    _add_fields(change, change=True)
    for verb, text in (
        ("disable", "refuse a tenant's keys until it is enabled"),
        ("enable", "take a tenant's keys again"),
    ):
        command = group.add(verb, _set_disabled, text)
        command.add_argument("name", metavar="NAME")
        command.set_defaults(disabled=verb == "disable")
    delete = group.add("delete", _delete, "revoke a tenant's keys and forget its adapters; its usage stays")
    delete.add_argument("name", metavar="NAME")
    delete.add_argument("--yes", action="store_true", help="do not ask")


def _add_fields(parser: argparse.ArgumentParser, *, change: bool) -> None:
    for flag, kind, metavar, text, default in (
        ("--weight", float, "X", "share under --scheduling-policy fair, relative to others'", 1),
        ("--max-adapters", int, "N", "adapters that the tenant may load itself", 0),
    ):
        note = "" if change else f" (default: {default})"
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text + note)
    add_limit_options(parser, change=change)


def _row(tenant: Tenant) -> dict[str, Any]:
    return dataclasses.asdict(tenant) | {"limits": limit_fields(tenant.limits)}


def _given(namespace: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(namespace, name) for name in ("weight", "max_adapters") if hasattr(namespace, name)}


def _create(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    limits = merge_limits(given_limits(namespace))
    return _row(store.create_tenant(Tenant(name=namespace.name, limits=limits, **_given(namespace))))


def _list(store: Store, namespace: argparse.Namespace) -> list[dict[str, Any]]:
    return [_row(tenant) for tenant in store.list_tenants()]


def _show(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    return _row(store.get_tenant(namespace.name))


def _update(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    changes, limits = _given(namespace), given_limits(namespace)
    if not changes and not limits:
        raise InvalidRequestError("nothing to change: give at least one option")
    return _row(store.update_tenant(namespace.name, changes | {"limits": limits}))


def _set_disabled(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    return _row(store.update_tenant(namespace.name, {"disabled": namespace.disabled}))


def _delete(store: Store, namespace: argparse.Namespace) -> dict[str, Any]:
    tenant = store.get_tenant(namespace.name)
    if not namespace.yes and not _confirmed(tenant.name):
        raise InvalidRequestError("nothing was deleted")
    store.delete_tenant(tenant.name)
    return {"name": tenant.name, "deleted": True}


def _confirmed(name: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidRequestError("a tenant cannot be brought back: confirm with --yes")
    print(f"A deleted tenant cannot be brought back. Type {name} to delete it: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == name
