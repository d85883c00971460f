"""`outrider admin`: its commands, each a function of the tenants' store."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ..options.database_option import DATABASE_VARIABLE
from . import database, key_commands, prefix_commands, tenant_commands, usage_commands
from .database import open_store
from .output import FORMATS, print_row, print_rows

_EPILOG = """\
The commands work on the database itself, whether a server runs or not; running servers follow within a second.

examples:
  export OUTRIDER_DATABASE=sqlite:///outrider.db
  outrider admin database upgrade
  outrider admin tenant create acme --requests-per-minute 60 --token-budget 1000000
  outrider admin key create --tenant acme
  outrider admin usage --by tenant,adapter --from 2026-01-01 --format csv
"""

Opener = Callable[[argparse.Namespace], contextlib.AbstractContextManager[Any]]
Work = Callable[[Any, argparse.Namespace], Any]
"""A command: with what was opened it returns the row or the rows to print, or None when it has printed them."""


class Commands:
    """Adder of commands that all take `--database` and `--format`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        self, name: str, work: Work, text: str, columns: Sequence[str] = (), opens: Opener = open_store
    ) -> argparse.ArgumentParser:
        """Add a command and return its parser. `columns` are those of its rows; `opens` opens what it works on."""

        def run(namespace: argparse.Namespace) -> int:
            with opens(namespace) as opened:
                found = work(opened, namespace)
            if isinstance(found, list):
                print_rows(found, columns, namespace.format)
            elif found is not None:
                print_row(found, namespace.format)
            return 0

        parser = self._commands.add_parser(name, help=text, description=_sentence(text), allow_abbrev=False)
        parser.add_argument(
            "--database",
            metavar="URL",
            help=f"sqlite:///outrider.db or postgresql://user@host/name (default: the variable {DATABASE_VARIABLE})",
        )
        parser.add_argument("--format", choices=FORMATS, default="table", help="of the output (default: %(default)s)")
        parser.set_defaults(run=run, parser=parser)
        return parser

    def group(self, name: str, text: str) -> Commands:
        """Add a group of commands, such as those for keys, and return the adder for it."""
        return Commands(self._commands.add_parser(name, help=text, description=_sentence(text)))


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and those below it."""
    text = "administer tenants, keys and usage"
    parser = commands.add_parser(
        "admin",
        help=text,
        description=_sentence(text),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    admin = Commands(parser)
    for module in (tenant_commands, key_commands, usage_commands, prefix_commands, database):
        module.add_commands(admin)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
