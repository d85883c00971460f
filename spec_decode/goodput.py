"""How many drafts each row of a step should get: the choice with the largest predicted goodput, ragged over the rows
(SmartSpec and TurboSpec: Liu et al. 2024, arXiv 2406.14066).

    goodput = E[tokens emitted] / E[seconds]
    E[tokens emitted] = R + sum over drafts (i, j) of a_ij c_ij
    E[seconds] = host + target(B + sum over drafts of a_ij) + sum over drafters d of draft_d(rows served, K_d)
                 + what the first drafter takes for the prompts that come with so many tokens, and what they have to
                   pay of its catching up, if it serves any row

with c_ij the probability that drafts 0 .. j of row i are all accepted, a_ij that there is a draft j, R the rows that
sample, B the tokens computed without drafts, and K_d the most drafts that drafter d makes for a row.

For given K the drafts differ in nothing but c_ij, and c_ij falls with j: the best set of any size takes the largest.
So the drafts are sorted once, and for all K together a sweep over the sorted list prices every prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .acceptance import Rates
from .step_costs import Curve

_PASSES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32)
STAY = 1.02
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
    token_extra: float = 0.0
    """Seconds more for each token that comes: what it takes the first drafter to compute the prompts, spread over what
    they are answered, and to catch up, spread over what is still to come."""

    @property
    def idle_seconds(self) -> float:
        """A step without drafts."""
        return self.host + self.target(self.base_tokens)


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
    with_passes = [prices.has_passes[offer.drafter] for offer in offers]
    limits = [0] if not all(with_passes) else []
    if any(with_passes):
        limits += [*(k for k in _PASSES if k < longest), longest]
    goodput, seconds, chosen = _sweep(drafts, prices, limits)
    rows, ends = goodput.argmax(axis=1), np.arange(len(limits))
    scores = goodput[ends, rows] * np.array([STAY if limit == passes else 1.0 for limit in limits])
    best = int(scores.argmax())
    end = int(rows[best])
    counts = np.bincount(drafts.rows[: end + 1][chosen[best, : end + 1]], minlength=len(offers)).tolist()
    return Plan(counts, float(goodput[best, end]), float(seconds[best, end]), off, limits[best])


def _best_for_one(offer: Offer, prices: Prices, off: float, passes: int) -> Plan:
    tokens, size, best_score = float(prices.base_rows), float(prices.base_tokens), -1.0
    draft = prices.drafts[offer.drafter][0]
    fixed = prices.host + prices.extra
    token_extra = prices.token_extra if offer.drafter == 0 else 0.0
    best = Plan([0], 0.0, 1.0, off, 0)
    for k, (accepted, available) in enumerate(zip(offer.cumulative, offer.available, strict=True), 1):
        tokens += available * accepted
        size += available
        seconds = fixed + tokens * token_extra + prices.target(size) + draft(k)
        score = tokens / seconds * (STAY if k == passes else 1.0)
        if score > best_score:
            best_score, best = score, Plan([k], tokens / seconds, seconds, off, k)
    return best


def mean_goodput(
    rates: Rates, batch: tuple[int, int], target: Curve, draft: Curve, extra: tuple[float, float]
) -> float:
    """The best goodput of mean requests of one lane, over the number of drafts: see `mean_plan`."""
    return mean_plan(rates, batch, target, draft, extra)[0]


def mean_plan(
    rates: Rates,
    batch: tuple[int, int],
    target: Curve,
    draft: Curve,
    extra: tuple[float, float],
    asks: tuple[float, int] = (1.0, 1 << 30),
) -> tuple[float, float]:
    """The best goodput of mean requests of one lane, over the number of drafts, and the seconds of such a step.

    Args:
        batch: number of rows, and prompt tokens beside them.
        extra: seconds for each step, and for each token.
        asks: chance that an answer does not end before its next token, and the most drafts of a row.
    """
    num_rows, prompt_tokens = batch
    tokens, size, product, best = float(num_rows), float(num_rows + prompt_tokens), 1.0, (0.0, 1.0)
    for k, (p, available) in enumerate(zip(rates.probabilities, rates.available, strict=True), 1):
        if k > asks[1]:
            break
        product *= p * asks[0]
        tokens += num_rows * available * product
        size += num_rows * available
        seconds = extra[0] + tokens * extra[1] + target(size) + draft(k)
        best = max(best, (tokens / seconds, seconds))
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


def _sweep(drafts: _Drafts, prices: Prices, limits: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of L limits to the drafts of drafters with passes, and each prefix of the N drafts: goodput [L, N] (0
    where the prefix ends with a draft that the limit leaves out), seconds [L, N], and which drafts are in [L, N]."""
    most = np.array(limits)[:, None]
    unlimited = ~np.array(prices.has_passes)[drafts.drafters]
    chosen = unlimited | (drafts.positions < most)
    tokens = prices.base_rows + np.cumsum(drafts.gains * chosen, axis=1)
    seconds = prices.target.at(prices.base_tokens + np.cumsum(drafts.sizes * chosen, axis=1))
    seconds += prices.host + prices.extra
    first = chosen & (drafts.positions == 0)
    deepest = int(drafts.positions.max()) + 1
    for drafter, (few, many, rows) in enumerate(prices.drafts):
        if rows == 0:
            continue
        served = np.cumsum(first & (drafts.drafters == drafter), axis=1)
        if drafter == 0 and prices.token_extra:
            seconds += np.where(served > 0, prices.token_extra * tokens, 0.0)
        depths = limits if prices.has_passes[drafter] else [deepest] * len(limits)
        low = np.array([few(depth) for depth in depths])[:, None]
        high = np.array([many(depth) for depth in depths])[:, None]
        slope = (high - low) / max(rows - 1, 1)
        seconds += np.where(served > 0, low + slope * np.maximum(served - 1, 0), 0.0)
    return np.where(chosen, tokens / seconds, 0.0), seconds, chosen
