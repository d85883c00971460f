"""Times as people write them, in UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from ..core.errors import InvalidRequestError

MAX_TIME = 253402300799.0
"""The end of the year 9999, in seconds since 1970."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = re.compile(r"\d+(\.\d*)?", re.ASCII)
_DURATION = re.compile(r"(\d{1,9})([smhdw])", re.ASCII)


def parse_time(text: str, field: str) -> float:
    """Seconds since 1970 of "1767225600", "2026-01-01", "2026-01-01T12:00" or "2026-01-01T12:00+01:00".

    Raises:
        InvalidRequestError: of `field`: it is none of them, or not in the years 1970 to 9999.
    """
    if re.fullmatch(r"\d{4}", text):
        raise _refused(field, f"{text} could be a year or seconds; write {text}-01-01")
    try:
        seconds = float(text) if _NUMBER.fullmatch(text) else _from_iso(text)
    except ValueError:
        raise _refused(field, "must be seconds since 1970 or a date such as 2026-01-31 or 2026-01-31T12:00Z") from None
    if not 0.0 <= seconds <= MAX_TIME:
        raise _refused(field, "must be in the years 1970 to 9999")
    return seconds


def parse_duration(text: str) -> float | None:
    """Seconds of "90s", "15m", "12h", "30d" or "2w"; None when it is no such text."""
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def format_time(seconds: float | None) -> str:
    """2026-01-31T12:00:00Z; "" for None."""
    return "" if seconds is None else datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _from_iso(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _refused(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}", param=field)
