"""Goodput: the numbers of drafts that maximise expected tokens per expected second.

    tokens(k) = sum over rows of 1 + (s_1 + ... + s_k)        s_j: chance that the first j drafts are all right
    seconds(k) = step(rows, all drafts) + draft(drafter, most drafts of a row)

A drafter may find nothing to draft. The first draft of a step costs more than each further one, so `step` is the mean,
weighted by probability, of a step without drafts and of one with the expected number if there are any.

Drafts of all rows compete: the most likely one is added first, while it raises goodput. While requests wait, the
sum of tokens counts, since each finished request lets another start. While none waits, the sum of the logarithms of the
rows' tokens counts (proportional fairness): the slowest request decides when a batch is done, and drafts of others that
make its steps longer are worth less.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_CHANCE = 0.01
"""Drafts with a lower probability are never made: one more token costs more than that share of a row's step."""
PRICED_DRAFTS = 4
"""Drafts of a row from which the price of one is taken: the first of a step costs more than each further one."""


class Offer(NamedTuple):
    """Drafts that one row may get."""

    drafter: int
    survival: Sequence[float]
    """[limit] chance that the first j drafts are made and all right."""
    made: Sequence[float] = ()
    """[limit] chance that the draft at each position is made; empty if all are."""
    rows: int = 1
    """Rows that share this offer and get the same number."""


class Plan(NamedTuple):
    """Numbers of drafts for a batch."""

    num_drafts: list[int]
    """Number for each offer."""
    gain: float
    """Goodput over that without drafts, 1.0 for no gain; under proportional fairness that of the geometric mean."""
    seconds: float
    """Expected, of a step and its drafting."""


class StepPrices(NamedTuple):
    """Prices of steps for one batch."""

    step: Callable[[float], float]
    """Seconds of the target's step by number of drafts."""
    draft: Callable[[int, int], float]
    """Seconds of (drafter, drafts a row); (drafter, 0) is a round without drafts."""


class DraftPrice(NamedTuple):
    """Price of verifying one more draft, in expected tokens."""

    least: float
    """Least survival of a draft that is worth it, for a row whose drafts before it add nothing."""
    is_fair: bool
    """True if that is multiplied by the row's expected tokens so far, as under proportional fairness."""
    first: float = 0.0
    """Price of the first draft of a row if the confidence of all its drafts is known before: with the whole jump from a
    step without drafts."""
    further: float = 0.0
    """Price of each draft after it."""


def draft_price(plan: Plan, prices: StepPrices, num_rows: int, num_offers: int, *, is_fair: bool) -> DraftPrice:
    """Price at which a draft raises goodput, for a batch of `num_rows` with `plan`, of which `num_offers` may draft.

    For `least` the time that `PRICED_DRAFTS` drafts of each of them add to the step is shared by these drafts.
    """
    step_without = prices.step(0)
    if step_without <= 0.0:  # nothing was measured
        return DraftPrice(0.0, is_fair)
    one, some = (max(0.0, prices.step(count * num_offers) - step_without) for count in (1, PRICED_DRAFTS))
    seconds = some / PRICED_DRAFTS, one, max(0.0, some - one) / (PRICED_DRAFTS - 1)
    shares = [value / num_offers / plan.seconds for value in seconds]
    if is_fair:
        least, first, further = (math.expm1(num_rows * share) for share in shares)
    else:
        tokens = num_rows * plan.gain * plan.seconds / (step_without + prices.draft(0, 0))
        least, first, further = (tokens * share for share in shares)
    return DraftPrice(least, is_fair, first, further)


def best_plan(offers: Sequence[Offer], prices: StepPrices, num_rows: int, *, fair: bool) -> Plan:
    """The best numbers of drafts for the rows of `offers`, out of a batch of `num_rows`.

    Args:
        fair: True to maximise the sum of the rows' log tokens, not of their tokens.
    """
    drafters = sorted({offer.drafter for offer in offers if offer.survival})
    base = prices.step(0) + prices.draft(0, 0)
    best = Plan([0] * len(offers), 1.0, base)
    if base <= 0.0 or not drafters:
        return best
    for most in _passes(offers):
        found = _greedy(offers, prices, num_rows, most, base, fair=fair)
        if found.gain > best.gain:
            best = found
    return best


def _passes(offers: Sequence[Offer]) -> list[int]:
    """Most drafts of a row that are tried, since the row with most determines the drafting time; a single offer passes
    all numbers on the way to the limit."""
    limit = max((len(offer.survival) for offer in offers), default=0)
    if len(offers) == 1:
        return [limit]
    return sorted({limit, *(count for count in (1, 2, 3, 4, 6, 8, 12) if count < limit)}, reverse=True) if limit else []


def _greedy(offers: Sequence[Offer], prices: StepPrices, num_rows: int, most: int, base: float, *, fair: bool) -> Plan:
    """The best plan that gives no row more than `most` drafts."""
    counts, tokens = [0] * len(offers), [1.0] * len(offers)
    heap: list[tuple[float, int]] = []  # (-worth of the next draft, index of its offer)

    def push(index: int) -> None:
        survival, count = offers[index].survival, counts[index]
        if count < min(most, len(survival)) and survival[count] >= LEAST_CHANCE:
            heapq.heappush(heap, (-survival[count] / (tokens[index] if fair else 1.0), index))

    for index in range(len(offers)):
        push(index)
    total, logs, added, drafting = float(num_rows), 0.0, 0.0, 0.0
    without = prices.step(0)
    none_made = 1.0  # probability that the step has no drafts
    reached: dict[int, int] = {}  # most drafts of a row, by drafter
    best = Plan(list(counts), 1.0, base)
    while heap:
        index = heapq.heappop(heap)[1]
        offer = offers[index]
        gained = offer.survival[counts[index]]
        made = offer.made[counts[index]] if offer.made else 1.0
        added += offer.rows * made
        if counts[index] == 0:
            none_made *= (1.0 - made) ** offer.rows
        counts[index] += 1
        if counts[index] > reached.get(offer.drafter, 0):
            reached[offer.drafter] = counts[index]
            drafting = sum(prices.draft(drafter, count) for drafter, count in reached.items())
        logs += offer.rows * math.log1p(gained / tokens[index])
        tokens[index] += gained
        total += gained * offer.rows
        seconds = _expected_step(prices.step, without, added, none_made) + drafting
        grown = math.exp(logs / num_rows) if fair else total / num_rows
        if grown * base / seconds > best.gain:
            best = Plan(list(counts), grown * base / seconds, seconds)
        push(index)
    return best


def _expected_step(step: Callable[[float], float], without: float, num_drafts: float, none_made: float) -> float:
    """Expected seconds of a step with `num_drafts` drafts on average, and none, which takes `without`, with probability
    `none_made`."""
    if none_made == 0.0:
        return step(num_drafts)
    if none_made == 1.0:
        return without
    return none_made * without + (1.0 - none_made) * step(num_drafts / (1.0 - none_made))
