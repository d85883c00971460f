"""Numbers of bytes as users write them."""

from __future__ import annotations

import re

from .errors import InvalidRequestError

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
        raise InvalidRequestError(
            f'{name} must be a number of bytes, such as 1000000, "512MiB" or "2GB"; got {value!r:.100}', param=name
        )
    return size


def shown_bytes(size: int) -> str:
    """A size for people, exact: 1536 -> "1536 bytes (1.5 KiB)"."""
    number, unit = float(size), ""
    for unit in ("", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{size} bytes ({number:.1f} {unit})" if unit else f"{size} bytes"
