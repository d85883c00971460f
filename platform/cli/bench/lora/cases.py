"""Cases of the measurement: number of adapters, their popularity among the requests, and batch size."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

IDENTICAL, UNIFORM, SKEWED, DISTINCT = POPULARITIES = ("identical", "uniform", "skewed", "distinct")
ZIPF_EXPONENT = 1.5
"""Exponent of `SKEWED`, as in Punica (Chen et al. 2023, arXiv:2310.18547, section 7)."""


class Case(NamedTuple):
    """One combination of batch size, adapters and popularity."""

    batch_size: int
    """Number of requests at once."""
    num_adapters: int | None
    """Number of adapters that requests may ask for. 0: they ask for the base model, in the engine with adapters. None:
    they run in the engine without adapters, with which all is compared."""
    popularity: str = ""
    """Distribution of the requests over the adapters; "" without a choice."""
    ranks: tuple[int, ...] = ()
    """Ranks that the adapters have in turn."""


def make_cases(
    batch_sizes: Sequence[int],
    num_adapters: Sequence[int],
    popularities: Sequence[str],
    mixes: Sequence[tuple[int, ...]],
) -> list[Case]:
    """Combinations by batch size, without the engine that takes no adapters."""
    cases = []
    for batch_size in dict.fromkeys(batch_sizes):
        for number in dict.fromkeys(num_adapters):
            if number == 0:
                cases.append(Case(batch_size, 0))
                continue
            chosen = [IDENTICAL] if number == 1 else list(dict.fromkeys(popularities))
            cases += [Case(batch_size, number, name, mix) for mix in dict.fromkeys(mixes) for name in chosen]
    return cases


def groups(cases: Sequence[Case], size: int) -> Iterator[list[Case]]:
    """Groups of at most `size` cases of one batch size. Each group is measured beside a run of the base engine."""
    for batch_size in dict.fromkeys(case.batch_size for case in cases):
        same = [case for case in cases if case.batch_size == batch_size]
        for start in range(0, len(same), size):
            yield same[start : start + size]


def choose(popularity: str, count: int, num_adapters: int, round_number: int, seed: int) -> list[int]:
    """Adapters, 0 to `num_adapters` - 1, of the `count` requests of a round.

    identical: all requests have one adapter, in each round the next. uniform: random. skewed: adapter i with a
    probability proportional to (i + 1) ** -ZIPF_EXPONENT. distinct: one after the other, continuing the last round.
    """
    generator = random.Random(f"{popularity} {count} {num_adapters} {round_number} {seed}")
    if popularity == IDENTICAL:
        return [round_number % num_adapters] * count
    if popularity == DISTINCT:
        return [(round_number * count + index) % num_adapters for index in range(count)]
    weights = [(i + 1) ** -ZIPF_EXPONENT if popularity == SKEWED else 1.0 for i in range(num_adapters)]
    return generator.choices(range(num_adapters), weights, k=count)
