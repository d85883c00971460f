"""Types of options: each parses the text of a command line, and says what it must be."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from ...core.errors import InvalidRequestError
from ...core.sizes import parse_bytes, parse_count

T = TypeVar("T")


def integer(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """Type of integers from `least` to `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, got {text!r}")
        return value

    return parse


natural, positive = integer(0), integer(1)


def number(bounds: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Type of numbers for which `holds` is true; `bounds` says that in words. A text that is no number is nan."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be a number {bounds}, got {text!r}")
        return value

    return parse


not_negative = number("of at least 0", lambda value: 0 <= value < math.inf)
positive_number = number("greater than 0", lambda value: 0 < value < math.inf)


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Type of values with commas between them, at least one."""

    def split(text: str) -> list[Any]:
        try:
            values = [parse(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a list of values: {text!r}") from None
        if not values:
            raise argparse.ArgumentTypeError(f"there is no value in {text!r}")
        return values

    return split


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def not_empty(text: str) -> str:
    """A text with something in it."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def with_units(parse: Callable[[str, str], T]) -> Callable[[str], T]:
    """Type of values that `parse`, a function of an option's name and its text, reads."""

    def parse_text(text: str) -> T:
        try:
            return parse("it", text)
        except InvalidRequestError as error:
            raise argparse.ArgumentTypeError(error.message.removeprefix("it ")) from None

    return parse_text


count = with_units(parse_count)
"""An integer, also with a unit, such as 4k."""
size = with_units(parse_bytes)
"""A number of bytes, such as 4GiB."""
