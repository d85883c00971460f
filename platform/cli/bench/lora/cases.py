"""Cases of the measurement: number of adapters, their popularity among the requests, and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..popularity import IDENTICAL


class Case(NamedTuple):
    """One combination of batch size, adapters and popularity."""

    batch_size: int
    """Number of requests at once."""
    num_adapters: int | None
    """Number of adapters that requests may ask for. 0: they ask for the base model, in the engine with adapters. None:
    they run in the engine without adapters, with which all is compared."""
    popularity: str = ""
    """Distribution of the requests over the adapters; "" without a choice."""


def make_cases(batch_sizes: Sequence[int], num_adapters: Sequence[int], popularities: Sequence[str]) -> list[Case]:
    """Combinations by batch size, without the engine that takes no adapters."""
    cases = []
    for batch_size in dict.fromkeys(batch_sizes):
        for number in dict.fromkeys(num_adapters):
            chosen = ("",) if number == 0 else (IDENTICAL,) if number == 1 else dict.fromkeys(popularities)
            cases += [Case(batch_size, number, name) for name in chosen]
    return cases
