"""`outrider admin`: its commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from . import audit, database, keys, prefixes, tenants, usage
from .connection import add_database
from .output import add_format

_EPILOG = """\
The commands work on the database itself, whether a server runs or not; running servers follow within a second.

examples:
  export OUTRIDER_DATABASE=sqlite:///outrider.db
  outrider admin database upgrade
  outrider admin tenant create acme --requests-per-minute 60 --token-budget 1000000
  outrider admin key create --tenant acme
  outrider admin usage --by tenant,adapter --from 2026-01-01 --format csv
"""

Runner = Callable[[argparse.Namespace], int]


class Commands:
    """Adder of commands that all take `--database` and `--format`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(self, name: str, run: Runner, text: str) -> argparse.ArgumentParser:
        """Add a command and return its parser."""
        parser = self._commands.add_parser(name, help=text, description=_sentence(text), allow_abbrev=False)
        add_database(parser)
        add_format(parser)
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
    for module in (tenants, keys, usage, audit, prefixes, database):
        module.add_commands(admin)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
