"""Parameters of `repetition_detection`; the names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequestError, invalid
from .parameter_checks import check_integer, quote_for_error
from .text import did_you_mean

MAX_PATTERN_SIZE = 1024
"""Most tokens of a pattern: each new token is compared with as many before it, in some microseconds."""
MAX_COUNT = 2**31 - 1
_FIELD = "repetition_detection"


@dataclass(slots=True)
class RepetitionDetectionParams:
    """A text ends, with the finish reason "repetition", as soon as its last tokens are a pattern of `min_pattern_size`
    to `max_pattern_size` tokens, `min_count` times in a row."""

    max_pattern_size: int = 0
    """At most 1,024. 0: nothing is detected."""
    min_pattern_size: int = 0
    """0 means 1."""
    min_count: int = 0
    """At least 2, unless nothing is detected."""

    def __post_init__(self) -> None:
        check_integer(f"{_FIELD}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        check_integer(f"{_FIELD}.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        check_integer(f"{_FIELD}.min_count", self.min_count, 2 if self.max_pattern_size else 0, MAX_COUNT)


def parse_repetition(value: Any) -> RepetitionDetectionParams | None:
    """Parameters of a mapping, or these themselves; None: nothing is detected.

    Raises:
        InvalidRequestError: a field is wrong or unknown.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        known = RepetitionDetectionParams.__dataclass_fields__.keys()
        for name in value:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise InvalidRequestError(f"{_FIELD} has no field {quote_for_error(name)}{hint}", param=_FIELD)
        value = RepetitionDetectionParams(**{name: item for name, item in value.items() if item is not None})
    if not isinstance(value, RepetitionDetectionParams):
        raise invalid(_FIELD, f"must be an object with max_pattern_size and min_count, got {quote_for_error(value)}")
    return value if value.max_pattern_size else None
