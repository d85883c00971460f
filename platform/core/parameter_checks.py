"""Checks of values that users give: numbers, texts and lists, each refused with the name of its field."""

from __future__ import annotations

import contextlib
import numbers
import reprlib
from collections.abc import Sequence, Sized
from typing import Any

from .errors import invalid

MAX_SEED = 2**63 - 1
"""Largest integer of a parameter without a limit of its own."""


def quote_for_error(value: object) -> str:
    """Return `value` as short text for an error message."""
    if isinstance(value, str | bytes):
        value = value[:100]
    try:
        text = repr(value) if isinstance(value, str | bytes) else reprlib.repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"an overlong {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."


def plain_number(value: Any) -> Any:
    """A number of numpy, or of another library, as Python's own; everything else as it is."""
    if type(value) in (int, float, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):  # a fraction too large for a float
            return float(value)
    return value


def check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse `value` unless it is a finite number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(name, f"must be a number, got {quote_for_error(value)}")
    if not low <= value <= high or (low_open and value == low):  # nan is refused
        opening = "(" if low_open else "["
        raise invalid(name, f"must be in {opening}{low}, {high}], got {quote_for_error(value)}")


def check_integer(name: str, value: object, low: int, high: int = MAX_SEED) -> None:
    """Refuse `value` unless it is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"must be an integer, got {quote_for_error(value)}")
    if not low <= value <= high:
        limit = f"at least {low}" if value < low and high == MAX_SEED else f"in [{low}, {high}]"
        raise invalid(name, f"must be {limit}, got {quote_for_error(value)}")


def check_text(name: str, value: object, most: int | None = None) -> None:
    """Refuse `value` unless it is a string that UTF-8 can hold, one without lone surrogates, of at most `most`
    characters."""
    if not isinstance(value, str):
        raise invalid(name, f"must be a string, got {quote_for_error(value)}")
    if most is not None and len(value) > most:
        raise invalid(name, f"has {len(value)} characters; at most {most} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"is not valid Unicode text: {error.reason}") from error


def check_length(name: str, value: Sized, most: int) -> None:
    """Refuse `value` if it has more than `most` entries."""
    if len(value) > most:
        raise invalid(name, f"has {len(value)} entries; at most {most} are allowed")


def check_ids(name: str, value: object, most: int | None = None) -> None:
    """Refuse `value` unless it is a list of at most `most` token ids, of whatever vocabulary."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise invalid(name, f"must be a list of token ids, got {quote_for_error(value)}")
    if most is not None:
        check_length(name, value, most)
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) <= MAX_SEED:
        return
    for item in value:
        check_integer(name, item, 0)


def check_strings(name: str, value: object, most: int, most_chars: int) -> None:
    """Refuse `value` unless it is a list of at most `most` texts, of `most_chars` characters together."""
    if not isinstance(value, list | tuple):
        raise invalid(name, f"must be a list of non-empty strings, got {quote_for_error(value)}")
    check_length(name, value, most)
    chars = 0
    for item in value:
        if item == "":
            raise invalid(name, "must be a list of non-empty strings, got an empty one")
        check_text(name, item, most_chars)
        chars += len(item)
    if chars > most_chars:
        raise invalid(name, f"has {chars} characters in all; at most {most_chars} are allowed")
