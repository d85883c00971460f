"""Drafts that are left out after they were made: the fit of their confidence, their price, and the text's
distribution."""

import math
import random

import pytest
import torch
from torch import Tensor

from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.spec_decode.control.confidence import ConfidenceFit
from outrider.spec_decode.control.goodput import DraftPrice, Offer, StepPrices, best_plan, draft_price
from outrider.spec_decode.drafters.base import DraftRow
from outrider.spec_decode.verify.draft_sampling import Drafting, draw
from outrider.spec_decode.verify.verification import Rule, VerifyRow, verify

VOCAB = 6


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_drafter_is_trusted_at_first():
    fit = ConfidenceFit()
    assert [fit.chance(p, 5) for p in (0.1, 0.5, 0.9)] == pytest.approx([0.1, 0.5, 0.9])


@pytest.mark.parametrize(("a", "b", "c"), [(-1.0, 0.6, -0.8), (1.0, 1.0, 0.0), (-3.0, 1.5, 1.0)])
def test_chances_follow_the_verified_drafts(a, b, c):
    """Drafts after a wrong one are not verified, so late positions are learnt from fewer."""
    generator, fit = random.Random(0), ConfidenceFit()

    def true(p: float, position: int) -> float:
        return 1 / (1 + math.exp(-a - b * log_odds(p) - c * position / 8))

    for _ in range(4000):
        confidence = [generator.uniform(0.05, 0.95) for _ in range(4)]
        accepted = 0
        while accepted < 4 and generator.random() < true(confidence[accepted], accepted):
            accepted += 1
        fit.add_round(confidence, accepted)
    for p in (0.2, 0.5, 0.8):
        assert fit.chance(p, 0) == pytest.approx(true(p, 0), abs=0.08)


@pytest.mark.parametrize("is_fair", [False, True])
def test_drafts_are_kept_by_the_rule_that_plans_them(is_fair):
    """If a plan knew the confidence of all drafts, and drafting were free, it would choose the same numbers."""
    generator = random.Random(1)
    for each in (0.02, 0.05, 0.1):
        rows = [[generator.uniform(0.3, 0.99) for _ in range(6)] for _ in range(5)]
        offers = [Offer(0, [math.prod(row[: j + 1]) for j in range(6)]) for row in rows]
        prices = StepPrices(lambda count, each=each: 1.0 + each * count, lambda drafter, count: 0.0)
        plan = best_plan(offers, prices, 5, fair=is_fair)
        price = draft_price(plan, prices, 5, 5, is_fair=is_fair)
        kept = [ConfidenceFit().num_worthwhile(row, price) for row in rows]
        assert kept == pytest.approx(plan.num_drafts, abs=1)
        assert abs(sum(kept) - sum(plan.num_drafts)) <= 1


@pytest.mark.parametrize("seconds", [1.0, 0.0], ids=["free", "not measured yet"])
def test_free_drafts_are_all_kept(seconds):
    prices = StepPrices(lambda count: seconds, lambda drafter, count: 0.0)
    price = draft_price(best_plan([], prices, 1, fair=True), prices, 1, 1, is_fair=True)
    assert ConfidenceFit().num_worthwhile([0.01] * 8, price) == 8


# --- a small world: the next token depends on the last one --------------------------------------------------------


def table(seed: int) -> Tensor:
    """[VOCAB, VOCAB] logits of the next token after each."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


TARGET = table(0)
DRAFTER = TARGET + 0.7 * table(1)


def drafts_after(tokens: list[list[int]], seeds: list[int], count: int) -> list[Drafts]:
    """Drafts for sequences of one engine, by its own code."""
    requests = [Request("r", row, 1, SamplingParams(), seed_key=s) for row, s in zip(tokens, seeds, strict=True)]
    rows = [DraftRow(r, r.tokens, 0, 0, count, [], True, is_rated=True) for r in requests]
    drafting = [Drafting(row, Rule.REJECTION, count) for row in rows]
    for _ in range(count):
        last = [(*sequence.row.tokens, *sequence.draft_ids)[-1] for sequence in drafting]
        draw(drafting, DRAFTER[last])
    return [sequence.drafts for sequence in drafting]


def sampled_pairs(choose, num: int) -> list[list[float]]:
    """Counts [VOCAB][VOCAB] of the two tokens after token 2; `choose(drafts)` is the number that is verified."""
    seeds = list(range(10**6, 10**6 + 7919 * num, 7919))
    tokens, active = [[0, 2] for _ in range(num)], list(range(num))
    while active:
        found = drafts_after([tokens[i] for i in active], [seeds[i] for i in active], 3)
        found = [drafts.truncated(choose(drafts)) for drafts in found]
        rows = [
            VerifyRow(seeds[i], len(tokens[i]), drafts.token_ids, drafts.probs, Rule.REJECTION)
            for i, drafts in zip(active, found, strict=True)
        ]
        last = [t for i, row in zip(active, rows, strict=True) for t in (tokens[i][-1], *row.draft_ids)]
        for i, got in zip(active, verify(TARGET[last], rows), strict=True):
            tokens[i] += got.token_ids
        active = [i for i in active if len(tokens[i]) < 4]
    counts = [[0.0] * VOCAB for _ in range(VOCAB)]
    for row in tokens:
        counts[row[2]][row[3]] += 1
    return counts


def chi_square_p(counts: list[list[float]]) -> float:
    """p-value of Pearson's test against the target's distribution of two tokens."""
    observed = torch.tensor(counts, dtype=torch.float64).flatten()
    p = TARGET.double().softmax(-1)
    expected = (p[2, :, None] * p).flatten() * observed.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((VOCAB**2 - 1) / 2, dtype=torch.float64), statistic / 2))


def test_leaving_drafts_out_does_not_change_the_distribution():
    fit, price, kept = ConfidenceFit(), DraftPrice(0.25, is_fair=False), set()

    def choose(drafts: Drafts) -> int:
        kept.add(count := fit.num_worthwhile(drafts.confidence, price))
        return count

    assert chi_square_p(sampled_pairs(choose, 10_000)) > 1e-4
    assert len(kept) > 1, "the number depends on the drafts"


def test_a_rule_that_reads_the_draft_itself_would():
    """Guards the test above, which can tell: leaves out a draft if its own probability is low."""

    def choose(drafts: Drafts) -> int:
        own = [float(q[token]) for q, token in zip(drafts.probs, drafts.token_ids, strict=True)]
        return next((place for place, p in enumerate(own) if p < 0.3), 3)

    assert chi_square_p(sampled_pairs(choose, 3_000)) < 1e-6


def test_a_confidence_is_known_before_its_draft():
    """Of two sequences with the same tokens and other noise, it is the same for the first draft, and then until the
    drafts differ."""
    several = drafts_after([[0, 2]] * 40, list(range(40)), 3)
    by_drafts: dict[tuple[int, ...], set[float]] = {}
    for drafts in several:
        for place, confidence in enumerate(drafts.confidence):
            by_drafts.setdefault(tuple(drafts.token_ids[:place]), set()).add(round(confidence, 5))
    assert len(by_drafts) > 5
    assert all(len(found) == 1 for found in by_drafts.values())


@pytest.mark.parametrize("is_fair", [False, True])
@pytest.mark.parametrize("jump", [0.0, 0.3, 2.0])
def test_certain_drafts_pay_the_jump_of_a_step_together(jump, is_fair):
    """Their number is that with the best goodput; a single draft alone is not worth the jump that many are."""
    generator = random.Random(3)
    prices = StepPrices(lambda count: 1.0 + (jump + 0.05 * count if count else 0.0), lambda drafter, count: 0.0)
    price = draft_price(best_plan([], prices, 1, fair=is_fair), prices, 1, 1, is_fair=is_fair)
    for _ in range(40):
        confidence = [generator.uniform(0.2, 0.95) for _ in range(6)]
        tokens = [sum(math.prod(confidence[:j]) for j in range(count + 1)) for count in range(7)]
        worth = [math.log(tokens[n]) - math.log1p(price.first) - (n - 1) * math.log1p(price.further) for n in range(7)]
        if not is_fair:
            worth = [tokens[n] - 1.0 - price.first - (n - 1) * price.further for n in range(7)]
        worth[0] = 0.0
        kept = ConfidenceFit().num_worthwhile(confidence, price, is_certain=True)
        assert kept == max(range(7), key=worth.__getitem__)
    single = ConfidenceFit().num_worthwhile([0.2], price, is_certain=True)
    assert single == (jump == 0.0)
