"""What drafts are worth where answers are short."""

import math

import pytest

from outrider.spec_decode.controller import Controller, DrafterTraits
from outrider.spec_decode.goodput import best_plan
from outrider.spec_decode.lanes import Modes
from outrider.spec_decode.pricing import AMORTISED_OVER, Pricing
from outrider.spec_decode.probing import NOISE
from outrider.spec_decode.step_costs import DraftSize
from outrider.spec_decode.workload import FEW, Workload


def told(pricing_or_none, length, count=100):
    workload = pricing_or_none or Workload()
    for _ in range(count):
        workload.computed(20, 1, 1)
        workload.computed(0, length - 1, 0)
    return workload


def test_how_long_answers_are_is_known_once_there_were_some():
    assert Workload().answer_length == math.inf
    assert told(None, 25, count=2).answer_length == math.inf
    assert told(None, 25).answer_length == pytest.approx(25, rel=0.05)
    assert told(told(None, 25), 400).answer_length == pytest.approx(400, rel=0.15), "lately"


@pytest.mark.parametrize("length", [1, 5, 25])
def test_drafts_beyond_the_end_of_an_answer_are_worth_nothing(length):
    pricing = Pricing([True], has_layers=False)
    row = Controller([DrafterTraits("draft_model", True)], 4).new_row((b"", True))
    row.limit = 4
    before = pricing.offer(row).cumulative
    told(pricing.workload, length, count=300)
    goes_on = 1.0 - 1.0 / length
    wanted = [chance * goes_on**position for position, chance in enumerate(before, 1)]
    assert pricing.offer(row).cumulative == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("drafting", [True, False])
def test_what_a_drafter_lags_is_paid_by_the_rest_of_the_answer(drafting):
    """Where such batches are drafted for and still it lags; where none is, it lags once, which is no price of each."""
    pricing = Pricing([True], has_layers=True)
    row = Controller([DrafterTraits("draft_model", True)], 4).new_row((b"", True))
    for _ in range(4):
        pricing.costs.add_step(1, 1, 0.001)
        pricing.costs.add_draft(0, DraftSize(1, 1), 0.001)
        pricing.costs.add_draft(0, DraftSize(1, 1, lag=10), 0.003)

    def extra(lag, num_outputs, num_rows=1):
        row.lag, row.num_outputs = lag, num_outputs
        found = pricing.prices([row], (num_rows, 0), drafting=drafting)
        row.lag = 0
        nothing = pricing.prices([row], (num_rows, 0), drafting=drafting)
        return found.extra - nothing.extra, found.token_extra - nothing.token_extra

    each = pricing.costs.catch_up(0, 1)
    assert each == pytest.approx(2e-4, rel=0.1)
    if not drafting:
        assert extra(20, 30) == extra(50, 30) == (0.0, 0.0)
        return
    assert extra(20, 30) == pytest.approx((20 * each / AMORTISED_OVER, 0.0))
    assert extra(50, 30) == pytest.approx((30 * each / AMORTISED_OVER, 0.0))
    told(pricing.workload, 20)
    assert extra(50, 30) == pytest.approx((30 * each / AMORTISED_OVER, 30 * each / 10), rel=0.05)
    assert extra(50, 30, num_rows=3)[1] == pytest.approx(30 * each / (3 * 10), rel=0.05), "the others pay for it too"


def test_few_rows_gain_together():
    """As often as there were so many: a batch of four that ends with one row is worth what both take and give."""
    pricing = Pricing([True], has_layers=False)
    row = Controller([DrafterTraits("draft_model", True)], 4).new_row((b"", True))
    row.limit = 4
    for rows in (1, 4):
        for _ in range(8):
            for size in (rows, 2 * rows, 5 * rows):
                pricing.costs.add_step(rows, size, 0.0006 + 0.0002 * size)
            for passes in (1, 4):
                pricing.costs.add_draft(0, DraftSize(rows, passes), 0.0001 + 0.0001 * passes)

    def gain(num_rows, drafting):
        row.limit = 4
        pricing.limit_to_known([row] * num_rows, 0)
        prices = pricing.prices([row] * num_rows, (num_rows, 0), drafting=drafting)
        plan = best_plan([pricing.offer(row)] * num_rows, prices)
        return pricing.gain_of_few([row] * num_rows, plan, prices, drafting=drafting), plan.gain

    for drafting in (True, False):
        assert gain(4, drafting)[0] == pytest.approx(gain(4, drafting)[1]), "nothing else was met"
    (_, one), (_, four) = gain(1, True), gain(4, True)
    assert one > four + 0.1
    for rows, steps in ((1, 60), (4, 10), (9, 1000)):
        pricing.workload.had([(rows, steps)])
    for drafting in (True, False):
        together = gain(4, drafting)[0]
        assert four < together < one
        assert together == pytest.approx(gain(1, drafting)[0], abs=0.02), "whoever asks"
    pricing.workload.had([(4, 500)])
    assert gain(4, False)[0] < together - 0.02
    for _ in range(20):
        pricing.workload.had([(1, 100)])
    assert pricing.workload.steps_by_rows.get(4, 0.0) < 1.0
    assert gain(4, False)[0] < gain(1, False)[0] - 0.005, "the present number counts, even if it is the first time"


def test_what_few_rows_gain_does_not_depend_on_their_order():
    pricing = Pricing([True, False], has_layers=False)
    controller = Controller([DrafterTraits("draft_model", True), DrafterTraits("ngram", False)], 4)
    good, bad = (controller.new_row((name, True)) for name in (b"good", b"bad"))
    for row, share in ((good, 4), (bad, 0)):
        row.limit, row.proposed_by = 4, 0
        for _ in range(60):
            row.proposed_by = 0
            controller.verified({row: [(4, share)]})
    for rows in (1, 2):
        for _ in range(8):
            for size in (rows, 5 * rows):
                pricing.costs.add_step(rows, size, 0.001 + 0.0001 * size)
            pricing.costs.add_draft(0, DraftSize(rows, 4), 0.0003)
    pricing.workload.had([(1, 50), (2, 20)])
    found = []
    for rows in ([good, bad], [bad, good]):
        pricing.limit_to_known(rows, 0)
        prices = pricing.prices(rows, (2, 0), drafting=True)
        plan = best_plan([pricing.offer(row) for row in rows], prices)
        found.append(pricing.gain_of_few(rows, plan, prices, drafting=True))
    assert found[0] == pytest.approx(found[1])
    good.limit = bad.limit = 1
    prices = pricing.prices([good, bad], (2, 0), drafting=True)
    plan = best_plan([pricing.offer(row) for row in (good, bad)], prices)
    for _ in range(4):
        pricing.limit_to_known([good, bad], 0)
    capped = pricing.gain_of_few([good, bad], plan, prices, drafting=True)
    assert capped < found[0] - 0.1, "no more than they may have"


def two_rows():
    """Prices of one row and of two, where drafting gains clearly, and a request."""
    pricing = Pricing([True], has_layers=False)
    row = Controller([DrafterTraits("draft_model", True)], 4).new_row((b"", True))
    for rows in (1, 2):
        for _ in range(8):
            for size in (rows, 5 * rows):
                pricing.costs.add_step(rows, size, 0.001 + 0.0001 * size)
            pricing.costs.add_draft(0, DraftSize(rows, 4), 0.0006)

    def gain(limit, num_rows=2):
        row.limit = limit
        rows = [row] * num_rows
        pricing.limit_to_known(rows, 0)
        prices = pricing.prices(rows, (num_rows, 0), drafting=True)
        return pricing.gain_of_few(rows, best_plan([pricing.offer(row)] * num_rows, prices), prices, drafting=True)

    return pricing, gain


@pytest.mark.parametrize("met", [[(2, 70)], [(1, 20), (2, 50)]])
def test_that_requests_are_at_their_ends_says_nothing_of_others(met):
    """A decision that falls on the last tokens of all does not find that drafting loses; a lasting cap is learned."""
    pricing, gain = two_rows()
    pricing.workload.had(met)
    usual = gain(4)
    assert usual > 0.1
    assert gain(1) == pytest.approx(usual, abs=0.01)
    assert gain(4) == pytest.approx(usual)
    assert [gain(1) for _ in range(4)][-1] < usual - 0.05


def test_what_requests_may_have_is_learned_with_any_number_of_rows():
    """A batch of many that drains meets its first decision for few rows at their ends."""
    pricing, gain = two_rows()
    pricing.workload.had([(2, 70)])
    gain(4, num_rows=16)
    at_ends = gain(1)
    assert at_ends == pytest.approx(gain(4), abs=0.01)


def test_a_limit_to_what_was_measured_is_no_end():
    """Eight rows may have two drafts each where ten tokens are the most that a step had."""
    pricing, _ = two_rows()
    row = Controller([DrafterTraits("draft_model", True)], 4).new_row((b"", True))
    row.limit = 4
    pricing.limit_to_known([row] * 8, 0)
    assert (row.limit, row.lane.usual_limit, pricing._are_at_ends) == (2, 4, False)
    row.limit = 3
    pricing.limit_to_known([row] * 8, 0)
    assert (row.lane.usual_limit, pricing._are_at_ends) == (3, False), "nor is one less a decision"


def test_a_batch_that_drains_costs_more_than_its_steps_tell():
    """Microseconds a step, which a large model does not feel; one step among many of others is no draining."""
    pricing, gain = two_rows()
    gain(4)
    pricing.workload.had([(2, 60), (1, 0)])
    assert not pricing.drains
    pricing.workload.had([(1, 1)])
    assert not pricing.drains
    alike = gain(4)
    pricing.workload.had([(1, 12)])
    assert pricing.drains
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.spec_decode.pricing.UNTOLD", 0.0)
        told = gain(4)
    assert gain(4) < told - 0.01
    assert alike == pytest.approx(told, abs=0.05)


def test_a_mean_over_a_batch_that_drains_is_less_noisy():
    modes = Modes()
    modes.enter(FEW, 0)
    assert modes.noise(0, drains=True) < NOISE / 2 < modes.noise(0)
    modes.enter(16, 0)
    assert modes.noise(0, drains=True) == NOISE, "of many rows each number has its own"


def test_older_numbers_of_rows_are_forgotten():
    workload = Workload()
    workload.had([(1, 1000)])
    for _ in range(40):
        workload.had([(3, 60), (2, 40), (0, 7)])
    steps = workload.steps_by_rows
    assert set(steps) == {2, 3}
    assert steps[2] == pytest.approx(steps[3] * 2 / 3, rel=0.2)
    assert sum(steps.values()) <= 128


@pytest.mark.parametrize("present", [0, 1])
def test_another_drafter_must_promise_clearly_more(present):
    """Two drafters that are right alike, in steps of 1.5 ms: by 2% of it a lane keeps what it has, whichever it is."""

    def chosen(saved):
        pricing = Pricing([False, False], has_layers=False)
        row = Controller([DrafterTraits("suffix", False), DrafterTraits("ngram", False)], 4).new_row((b"", True))
        row.limit, row.lane.drafter = 4, present
        row.lane.rates[1] = row.lane.rates[0]
        for _ in range(8):
            for size in (1, 5):
                pricing.costs.add_step(1, size, 0.001)
            for drafter in (0, 1):
                for count in (1, 4):
                    seconds = 0.0005 - (saved * 0.0015 if drafter != present else 0.0)
                    pricing.costs.add_draft(drafter, DraftSize(1, count), seconds)
        changes = pricing.choose_drafters([row], (1, 0), keeps=False)
        assert row.drafter == row.lane.drafter
        assert changes is (row.drafter != present)
        return row.drafter

    assert [chosen(saved) for saved in (-0.02, 0.0, 0.01, 0.02)] == [present] * 4
    assert [chosen(saved) for saved in (0.04, 0.1)] == [1 - present] * 2
