"""How many drafts each row of a step should get: the choice with the largest predicted goodput, ragged over the rows
(SmartSpec and TurboSpec: Liu et al. 2024, arXiv 2406.14066).

    goodput = E[tokens emitted] / E[seconds]
    E[tokens emitted] = R + sum over drafts (i, j) of a_ij c_ij
    E[seconds] = host + target(B + sum over drafts of a_ij) + sum over drafters d of draft_d(rows served, K_d)

with c_ij the probability that drafts 0 .. j of row i are all accepted, a_ij that there is a draft j, R the rows that
sample, B the tokens computed without drafts, and K_d the most drafts that drafter d makes for a row.

For given K the drafts differ in nothing but c_ij, and c_ij falls with j: the best set of any size takes the largest.
So the drafts are sorted once, and for each K a sweep over the sorted list prices every prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .step_costs import Curve

_PASSES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32)
STAY = 1.01
"""Another number of passes must promise this much more than the present one."""


class Offer(NamedTuple):
    """What one row could get. Both lists are as long as the row's limit, at least 1."""

    drafter: int
    cumulative: Sequence[float]
    """c_j: falls with j."""
    available: Sequence[float]
    """a_j: never rises."""


class Prices(NamedTuple):
    """What it would cost."""

    base_rows: int
    """R."""
    base_tokens: int
    """B."""
    host: float
    target: Curve
    drafts: Sequence[tuple[Curve, Curve, int]]
    """For each drafter: its seconds by passes when it serves one row, when it serves all rows offered, and how many
    these are."""
    has_passes: Sequence[bool]
    """Drafters without passes take as long for many drafts as for one: their K is not limited."""
    extra: float = 0.0
    """Seconds a step that speculation costs on top: what it takes a drafter to catch up, spread over some steps."""

    @property
    def idle_seconds(self) -> float:
        """A step without drafts."""
        return self.host + self.target(self.base_tokens) + sum(few.seconds[0] for few, _, _ in self.drafts)


class Plan(NamedTuple):
    """The best choice that drafts anything, and what it is to be compared with."""

    num_drafts: list[int]
    """For each offer."""
    goodput: float
    """Tokens a second."""
    seconds: float
    """Of the step."""
    off_goodput: float
    """Without any draft."""
    passes: int
    """K of the drafters that have passes."""

    @property
    def gain(self) -> float:
        """What drafting promises over not drafting, as a share."""
        return self.goodput / self.off_goodput - 1.0


def best_plan(offers: Sequence[Offer], prices: Prices, passes: int = 0) -> Plan:
    """The best choice among those with at least one draft; `passes` is the present K, left only for `STAY` more."""
    off = prices.base_rows / prices.idle_seconds
    if len(offers) == 1:
        return _best_for_one(offers[0], prices, off, passes)
    drafts = _sorted_drafts(offers)
    longest = max(len(offer.cumulative) for offer in offers)
    some_have_passes = any(prices.has_passes[offer.drafter] for offer in offers)
    best, best_score = Plan([0] * len(offers), 0.0, 1.0, off, 0), -1.0
    for limit in [0, *(k for k in _PASSES if k < longest), longest] if some_have_passes else [0]:
        found = _sweep(drafts, prices, limit)
        if found is None:
            continue
        goodput, seconds, chosen = found
        score = goodput * (STAY if limit == passes else 1.0)
        if score > best_score:
            best_score = score
            counts = np.bincount(drafts.rows[chosen], minlength=len(offers)).tolist()
            best = Plan(counts, goodput, seconds, off, limit)
    return best


def _best_for_one(offer: Offer, prices: Prices, off: float, passes: int) -> Plan:
    tokens, size, best_score = float(prices.base_rows), float(prices.base_tokens), -1.0
    idle = sum(few.seconds[0] for few, _, _ in prices.drafts)
    draft = prices.drafts[offer.drafter][0]
    fixed = prices.host + prices.extra + idle - draft.seconds[0]
    best = Plan([0], 0.0, 1.0, off, 0)
    for k, (accepted, available) in enumerate(zip(offer.cumulative, offer.available, strict=True), 1):
        tokens += available * accepted
        size += available
        seconds = fixed + prices.target(size) + draft(k)
        score = tokens / seconds * (STAY if k == passes else 1.0)
        if score > best_score:
            best_score, best = score, Plan([k], tokens / seconds, seconds, off, k)
    return best


class _Drafts(NamedTuple):
    """All drafts that could be made, the most promising first; [N] each."""

    rows: np.ndarray
    positions: np.ndarray
    drafters: np.ndarray
    gains: np.ndarray
    sizes: np.ndarray


def _sorted_drafts(offers: Sequence[Offer]) -> _Drafts:
    lengths = [len(offer.cumulative) for offer in offers]
    rows = np.repeat(np.arange(len(offers)), lengths)
    drafters = np.repeat(np.array([offer.drafter for offer in offers]), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    chances = np.array([c for offer in offers for c in offer.cumulative])
    sizes = np.array([a for offer in offers for a in offer.available])
    order = np.argsort(-chances, kind="stable")
    return _Drafts(rows[order], positions[order], drafters[order], (chances * sizes)[order], sizes[order])


def _sweep(drafts: _Drafts, prices: Prices, limit: int) -> tuple[float, float, np.ndarray] | None:
    """(goodput, seconds, indices of the drafts) of the best prefix; drafters with passes make at most `limit`."""
    limits = np.array([limit if passes else 1 << 30 for passes in prices.has_passes])
    chosen = np.flatnonzero(drafts.positions < limits[drafts.drafters])
    if not chosen.size:
        return None
    tokens = prices.base_rows + np.cumsum(drafts.gains[chosen])
    seconds = prices.target.at(prices.base_tokens + np.cumsum(drafts.sizes[chosen])) + prices.host + prices.extra
    first = drafts.positions[chosen] == 0
    owner = drafts.drafters[chosen]
    for drafter, (few, many, rows) in enumerate(prices.drafts):
        served = np.cumsum(first & (owner == drafter))
        depth = limit if prices.has_passes[drafter] else int(drafts.positions.max()) + 1
        low, high = few(depth), many(depth)
        slope = (high - low) / max(rows - 1, 1)
        seconds += np.where(served > 0, low + slope * np.maximum(served - 1, 0), few.seconds[0])
    goodput = tokens / seconds
    best = int(goodput.argmax())
    return float(goodput[best]), float(seconds[best]), chosen[: best + 1]
