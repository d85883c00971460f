"""Acceptance: probability that a requested draft at each position is made and right, given that those before it were.

Positions are pooled (1, 2, 3, 4-5, 6-8, 9 and more), because acceptance changes little from one late position to the
next and long runs of drafts are rare. Counts are forgotten exponentially. The estimate of a request is the mean of a
Beta distribution whose prior is its adapter's estimate; the prior of a later pool moves with the request's results in
the earlier ones, since copied text tends to continue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FIRST_POSITIONS = (0, 1, 2, 3, 5, 8)
"""First position of each pool."""
NUM_POOLS = len(_FIRST_POSITIONS)
"""Number of pools."""
_POOLS = (0, 1, 2, 3, 3, 4, 4, 4, 5)
"""Pool of each position from 0; later positions belong to the last pool."""
REQUEST_MEMORY = 12.0
"""Rounds after which a request's counts have faded to 1/e: text changes between free and copied within a paragraph."""
ADAPTER_MEMORY = 100.0
"""Rounds after which an adapter's counts have faded to 1/e: a second of one request of the demo model, one round of
which in four counts."""
_PRIOR_ROUNDS = 3.0
"""Weight of a request's prior, in rounds: after three rounds of its own a request's counts weigh as much as its
adapter's."""
_FIRST_ROUNDS = 4.0
"""Weight, in rounds, of the prior of an adapter without requests."""
_FIRST_FADES = 10.0
"""Rounds of an adapter after which that prior weighs one round less, down to one: a good drafter is trusted."""
_CARRIED = 0.7
"""Share of a pool's surprise, in log odds, that moves the prior of the next pool."""
_LEAST, _MOST = 0.02, 0.98
"""Bounds of a prior, which is never certain."""


def pool_of(position: int) -> int:
    """Pool of a draft's position, counted from 0."""
    return _POOLS[position] if position < len(_POOLS) else NUM_POOLS - 1


class AcceptanceRate:
    """Counts of right and wrong drafts by pool, of one request or of one adapter, for one drafter."""

    __slots__ = ("_asked", "_fade", "_made", "known_rates", "right", "tried")

    def __init__(self, memory: float) -> None:
        """Start without counts. `memory`: rounds after which they have faded to 1/e."""
        self._fade = 1.0 - 1.0 / memory
        self.right = [0.0] * NUM_POOLS
        self.tried = [0.0] * NUM_POOLS
        self._asked = [0.0] * NUM_POOLS
        self._made = [0.0] * NUM_POOLS
        self.known_rates: list[float] | None = None
        """`adapter_rates` of these counts, once computed: rows read them more often than they change."""

    def add_round(self, num_asked: int, num_drafts: int, num_accepted: int) -> None:
        """Count one round: `num_asked` drafts were requested, the first `num_drafts` of them were made, and the first
        `num_accepted` of these were right. The next one was wrong, or not made, which counts as wrong."""
        self.known_rates = None
        fade, asked, made = self._fade, self._asked, self._made
        self.right = right = [count * fade for count in self.right]
        self.tried = tried = [count * fade for count in self.tried]
        for pool, first in enumerate(_FIRST_POSITIONS):
            if first >= num_asked:
                break
            last = _FIRST_POSITIONS[pool + 1] if pool + 1 < NUM_POOLS else num_asked
            asked[pool] = fade * asked[pool] + min(num_asked, last) - first
            made[pool] = fade * made[pool] + max(0, min(num_drafts, last) - first)
        for position in range(min(num_accepted + 1, num_asked)):
            pool = pool_of(position)
            tried[pool] += 1.0
            if position < num_accepted:
                right[pool] += 1.0

    def made_shares(self, prior: Sequence[float]) -> list[float]:
        """[NUM_POOLS] share of the requested drafts that are made. Prompt lookup needs a long match for many.

        Args:
            prior: [NUM_POOLS] the same of the adapter, or its first estimate; it counts for one draft.
        """
        return [(made + one) / (asked + 1.0) for made, asked, one in zip(self._made, self._asked, prior, strict=True)]

    def rates(self, prior: Sequence[float], strength: float = _PRIOR_ROUNDS) -> list[float]:
        """[NUM_POOLS] acceptance by pool, given that all earlier drafts were right.

        Args:
            prior: [NUM_POOLS] the same of the adapter, or its first estimate.
            strength: Weight of the prior, in rounds.
        """
        rates = []
        shift = 0.0
        for mean, right, tried in zip(prior, self.right, self.tried, strict=True):
            expected = mean if shift == 0.0 else _expit(_logit(mean) + shift)
            rate = (right + strength * expected) / (tried + strength)
            rates.append(rate)
            shift = 0.0 if rate == mean else _CARRIED * (_logit(rate) - _logit(mean))
        return rates


def adapter_rates(counts: AcceptanceRate, first: float) -> Sequence[float]:
    """[NUM_POOLS] acceptance of an adapter's requests; `first`: estimate before any draft was verified, the same in all
    calls for these counts."""
    if counts.known_rates is None:
        strength = max(1.0, _FIRST_ROUNDS - counts.tried[0] / _FIRST_FADES)
        counts.known_rates = counts.rates([first] * NUM_POOLS, strength)
    return counts.known_rates


def survival(rates: Sequence[float], count: int) -> list[float]:
    """[count] probability that the draft at each position and all before it are right.

    Args:
        rates: [NUM_POOLS] acceptance by pool.
    """
    product = 1.0
    chances = []
    for position in range(count):
        product *= rates[pool_of(position)]
        chances.append(product)
    return chances


def expected_drafts(shares: Sequence[float], count: int) -> list[float]:
    """[count] expected number of drafts at each requested position.

    Args:
        shares: [NUM_POOLS] see `AcceptanceRate.made_shares`.
    """
    return [shares[pool_of(position)] for position in range(count)]


def _logit(p: float) -> float:
    p = min(max(p, _LEAST), _MOST)
    return math.log(p / (1.0 - p))


def _expit(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
