"""Drafters that learn from a tenant's traffic, as users configure them: `learn` in a `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidRequestError
from .text import did_you_mean

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnConfig:
    """Which tenants' drafts learn, and the bounds of it."""

    tenants: tuple[str, ...]
    """Tenants that opted in."""
    rank: int = 8
    """Rank of the learnt draft LoRA; adapters with draft weights of a larger rank do not learn."""
    share: float = 0.05
    """Most of the engine's time that training takes."""
    buffer_bytes: int = 16 * _MIB
    """Most bytes of recorded states for each tenant and adapter."""
    max_learners: int = 4
    """Pairs of a tenant and an adapter that learn at once; the least recently used pair is dropped."""
    max_running: int = 1
    """Most running requests alongside which it trains."""
    learning_rate: float = 1e-3
    """AdamW's."""


_RANGES: dict[str, tuple[float, float]] = {
    "rank": (1, 64),
    "share": (0.001, 1.0),
    "buffer_bytes": (1, 1 << 34),
    "max_learners": (1, 64),
    "max_running": (0, 1024),
    "learning_rate": (1e-6, 1.0),
}
"""Least and largest values; fields with integers here take integers alone."""


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"speculative_config: learn: {message}", param="speculative_config")


def parse_learn(given: Any) -> LearnConfig | None:
    """Check `learn` as users write it; None: no tenant opted in.

    Raises:
        InvalidRequestError: something is wrong with it; the message names the field and the limit.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _wrong(f"it must be an object with tenants, got {given!r}")
    known = [field.name for field in fields(LearnConfig)]
    unknown = [name for name in given if name not in known]
    if unknown:
        hint = did_you_mean(str(unknown[0]), known)
        raise _wrong(f"unknown field {unknown[0]!r}{hint}; known are {', '.join(known)}")
    tenants = given.get("tenants")
    if not isinstance(tenants, (list, tuple)) or not tenants or not all(isinstance(name, str) for name in tenants):
        raise _wrong(f"tenants must be a list of names, got {tenants!r}")
    for name, (low, high) in _RANGES.items():
        value, integer = given.get(name, low), isinstance(low, int)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (integer and not isinstance(value, int)):
            raise _wrong(f"{name} must be {'an integer' if integer else 'a number'}, got {value!r}")
        if not low <= value <= high:
            raise _wrong(f"{name} must be in [{low}, {high}], got {value!r}")
    return LearnConfig(**{**given, "tenants": tuple(tenants)})
