"""Values of a config.json, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..platform.core.errors import UnsupportedModelError
from ..platform.core.text import shorten

# Largest integer that a field may have: a larger one is a damaged file, and would take all memory, or all time.
MOST = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "max_position_embeddings": 1 << 40,
    "sliding_window": 1 << 40,
}
_MOST_ELSE = 1 << 24
_SMALLEST, _LARGEST = 1e-30, 1e18
_MOST_SHOWN = 80


def wrong(field: str, problem: str) -> UnsupportedModelError:
    """Error about a field of config.json."""
    return UnsupportedModelError(f"config.json: {field} {problem}", param=field)


def shown(value: object) -> str:
    """Text of `value` for an error, cut short: a file may hold a number of thousands of digits."""
    return shorten(repr(value), _MOST_SHOWN)


def positive(values: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The field as a positive integer that is not absurdly large."""
    value, most = values.get(field, default), MOST.get(field, _MOST_ELSE)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(field, f"must be a positive integer, got {shown(value)}")
    if value > most:
        raise wrong(field, f"must be at most {most}, got {shown(value)}")
    return value


def number(field: str, name: str, value: object) -> float:
    """`value` as a positive number, of which float32 holds powers too; in an error `field` is the object and `name` its
    key."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _SMALLEST <= value <= _LARGEST:
        said = f"{name} must be" if name else "must be"
        raise wrong(field, f"{said} a positive number, {_SMALLEST:g} to {_LARGEST:g}, got {shown(value)}")
    return float(value)
