"""Requests of many tenants for many adapters."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Request(NamedTuple):
    """One request; its prompt begins with one of the prefixes of its adapter."""

    number: int
    at: float
    """Arrival, in seconds from the start."""
    tenant: int
    adapter: int
    prefix: int
    """Number of the prefix among those of the adapter."""
    prefix_tokens: int
    prompt_tokens: int
    """Tokens after the prefix."""
    output_tokens: int


@dataclass(frozen=True)
class Load:
    """Description of a load."""

    count: int
    """Requests."""
    rate: float
    """Requests a second, as a Poisson process; inf: all are there at the start."""
    adapters: int
    tenants: int
    """Tenant 0 owns the most popular adapters, and the last tenant the least popular ones, equally many each."""
    exponent: float = 1.0
    """Zipf: adapter i has a share proportional to (i + 1) ** -exponent."""
    prefixes: int = 2
    """Prefixes of each adapter, equally likely."""
    prefix_tokens: int = 64
    prompt_tokens: int = 64
    """Mean; from half of it to half more. The same holds for the output."""
    output_tokens: int = 32

    def requests(self, seed: int) -> list[Request]:
        """Draw the requests, in order of arrival."""
        source = random.Random(seed)
        shares = list(accumulate((i + 1) ** -self.exponent for i in range(self.adapters)))
        found, at = [], 0.0
        for number in range(self.count):
            at += source.expovariate(self.rate)
            lengths = [source.randint(mean // 2, mean * 3 // 2) for mean in (self.prompt_tokens, self.output_tokens)]
            (adapter,) = source.choices(range(self.adapters), cum_weights=shares)
            prefix = source.randrange(self.prefixes)
            tenant = adapter * self.tenants // self.adapters
            found.append(Request(number, at, tenant, adapter, prefix, self.prefix_tokens, *lengths))
        return found
