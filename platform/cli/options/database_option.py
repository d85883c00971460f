"""The address of the tenants' database, which `outrider serve` and `outrider admin` take."""

from __future__ import annotations

import argparse
import os

from ...core.errors import InvalidRequestError

DATABASE_VARIABLE = "OUTRIDER_DATABASE"


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
