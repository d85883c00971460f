"""Numbers of bytes and of tokens as users write them."""

from __future__ import annotations

import re
from fractions import Fraction

from .errors import InvalidRequestError, invalid

_UNITS = {
    prefix + suffix: base**power
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
    for suffix, base in (("b", 1000), ("ib", 1024))
    if prefix or suffix == "b"
} | {"": 1}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)", re.ASCII)


def parse_bytes(name: str, value: object) -> int:
    """Bytes of an option's value: a positive integer, or text such as "512MiB" or "2GB" (2 * 1000**3).

    Raises:
        InvalidRequestError: it is neither; `name` is the option.
    """
    size = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value.strip().lower())
        if match is not None and match["unit"] in _UNITS:
            size = int(float(match["number"]) * _UNITS[match["unit"]])
    if size < 1:
        raise invalid(name, f'must be a number of bytes, such as 1000000, "512MiB" or "2GB"; got {value!r:.100}')
    return size


_COUNT_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_COUNT = re.compile(r"(?P<number>-?\d{1,20}(?:\.\d{1,20})?)(?P<unit>[kmgKMG]?)", re.ASCII)


def parse_count(name: str, value: object) -> int:
    """A number that may be text with a unit, as vLLM takes it: "4k" and "4.0k" are 4000, "4K" is 4096.

    Raises:
        InvalidRequestError: it is none, or no whole one; `name` is the option.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _COUNT.fullmatch(value.strip().replace("_", "")) if isinstance(value, str) else None
    count = Fraction(match["number"]) * _COUNT_UNITS.get(match["unit"], 1) if match is not None else None
    if count is None or count.denominator != 1:
        raise invalid(name, f'must be an integer, such as 4000, "4k" (4000) or "4K" (4096); got {value!r:.100}')
    return count.numerator


def parse_memory(name: str, value: object) -> int:
    """Bytes as `parse_count` or `parse_bytes` takes them."""
    try:
        return parse_count(name, value)
    except InvalidRequestError:
        return parse_bytes(name, value)


def parse_length(name: str, value: object) -> int | None:
    """A number of tokens; None for "auto", -1 and None, which leave it to the model. Errors: see `parse_count`."""
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    count = parse_count(name, value)
    return None if count == -1 else count


def format_bytes(size: int) -> str:
    """A size for people, exact: 1536 -> "1536 bytes (1.5 KiB)"."""
    number, unit = float(size), ""
    for unit in ("", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{size} bytes ({number:.1f} {unit})" if unit else f"{size} bytes"
