"""API keys on the command line: their form, which an HTTP header must be able to carry, and their sources."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ...core.errors import InvalidRequestError

API_KEY_VARIABLE = "OUTRIDER_API_KEY"
ADMIN_API_KEY_VARIABLE = "OUTRIDER_ADMIN_API_KEY"


def key_problem(key: str) -> str:
    """Reason why no client could send `key`; "" for a good one. The reason never repeats the key."""
    if not (key.isascii() and (key.isprintable() or not key)):
        return "a key must be printable ASCII: clients send it in an HTTP header"
    if key != key.strip():
        return "a key must not begin or end with a space"
    return ""


def key(text: str) -> str:
    """Parse an API key: an argparse type."""
    problem = key_problem(text) if text.strip() else "must not be empty"
    if problem:
        raise argparse.ArgumentTypeError(problem)
    return text


def given_keys(keys: Sequence[str], variable: str, option: str) -> tuple[str, ...]:
    """The keys of an option, else the key of an environment variable, else none.

    Raises:
        InvalidRequestError: no client could send the variable's key.
    """
    if keys:
        return tuple(keys)
    from_environment = os.environ.get(variable, "").strip()
    problem = key_problem(from_environment)
    if problem:
        raise InvalidRequestError(f"{problem} (it comes from {variable})", param=option)
    return (from_environment,) if from_environment else ()
