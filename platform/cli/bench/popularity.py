"""Popularity of adapters: which of them the requests of a measurement ask for."""

from __future__ import annotations

import random

IDENTICAL, UNIFORM, SKEWED, DISTINCT = POPULARITIES = ("identical", "uniform", "skewed", "distinct")
ZIPF_EXPONENT = 1.5
"""Exponent of `SKEWED`, as in Punica (Chen et al. 2023, arXiv:2310.18547, section 7)."""


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
