"""`outrider admin audit`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .connection import open_database
from .output import print_rows

if TYPE_CHECKING:
    from .admin_command import Commands


def add_commands(admin: Commands) -> None:
    """Add the command."""
    parser = admin.add("audit", _show, "list who changed what, newest first")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="changes to show (default: %(default)s)")


def _show(namespace: argparse.Namespace) -> int:
    from ...tenancy.database.audit import COLUMNS, list_audit

    with open_database(namespace) as database:
        print_rows(list_audit(database, namespace.limit), COLUMNS, namespace.format)
    return 0
