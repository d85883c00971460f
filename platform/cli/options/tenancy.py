"""Options of `outrider serve` for tenants, and their database's address, which `outrider admin` takes too."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ...core.errors import InvalidRequestError
from ...http.server_config import ServerConfig

DATABASE_VARIABLE = "OUTRIDER_DATABASE"
MIN_JOURNAL_BYTES = 1 << 20


def add_tenancy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `outrider serve`, in a group of their own."""
    group = parser.add_argument_group("tenants")
    group.add_argument(
        "--database",
        metavar="URL",
        help="where tenants, their keys and limits, and the ledger of usage are: sqlite:///outrider.db or "
        "postgresql://user@host/name; `outrider admin` fills it "
        f"(default: the variable {DATABASE_VARIABLE}, else none: no tenants)",
    )
    group.add_argument(
        "--journal",
        metavar="PATH",
        help="folder for the usage that the database does not have yet, one a server "
        "(default: beside a SQLite database, else below ~/.local/state/outrider/ledger)",
    )
    group.add_argument(
        "--journal-max-bytes",
        type=_journal_bytes,
        default=ServerConfig().journal_max_bytes,
        metavar="N",
        help="disk that it may take while the database is away; then new requests are answered with 503 "
        "(default: %(default)s)",
    )


def journal_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerConfig` that the journal's flags set."""
    return {"journal": namespace.journal or None, "journal_max_bytes": namespace.journal_max_bytes}


def _journal_bytes(text: str) -> int:
    if not text.isdigit() or not MIN_JOURNAL_BYTES <= int(text) < 1 << 40:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, at least {MIN_JOURNAL_BYTES}, got {text!r}")
    return int(text)


def given_database(namespace: argparse.Namespace) -> str | None:
    """The address from `--database`, else from the environment variable; None without both.

    Raises:
        InvalidRequestError: it is no address, or a package that it needs is not installed.
    """
    address: str | None = namespace.database or os.environ.get(DATABASE_VARIABLE, "").strip() or None
    if address is not None:
        try:
            from ...tenancy.database.connection import parse_url
        except ModuleNotFoundError as error:
            problem = f"{error.name} is not installed: pip install 'outrider[serve]'"
            raise InvalidRequestError(problem, param="database") from None
        parse_url(address)
    return address
