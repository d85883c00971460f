"""What drafts are worth where answers are short."""

import math

import pytest

from outrider.spec_decode.controller import Controller, DrafterTraits
from outrider.spec_decode.pricing import AMORTISED_OVER, Pricing
from outrider.spec_decode.step_costs import DraftSize
from outrider.spec_decode.workload import Workload


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
    """Its prompt, too, where nobody was drafted for and it is not paid token by token."""
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
    assert extra(20, 30) == pytest.approx((20 * each / AMORTISED_OVER, 0.0))
    assert extra(50, 30) == pytest.approx(((30 if drafting else 50) * each / AMORTISED_OVER, 0.0))
    told(pricing.workload, 20)
    assert extra(50, 30) == pytest.approx((30 * each / AMORTISED_OVER, 30 * each / 10), rel=0.05)
    assert extra(50, 30, num_rows=3)[1] == pytest.approx(30 * each / (3 * 10), rel=0.05), "the others pay for it too"
