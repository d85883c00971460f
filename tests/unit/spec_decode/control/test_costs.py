"""Measured times of steps and of drafting."""

import pytest

from outrider.models.pass_grid import PassLimits, make_grid
from outrider.spec_decode.control.costs import DraftCosts, StepCosts, size_class
from outrider.spec_decode.control.goodput import Offer, StepPrices, best_plan


def test_classes_of_sizes_grow_by_steps_of_a_half_at_most():
    classes = [size_class(size) for size in range(200)]
    assert classes == sorted(classes)
    assert [size for size in range(1, 40) if size_class(size) != size_class(size - 1)] == [
        1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33
    ]  # fmt: skip


def test_nothing_is_known_before_a_step_was_measured():
    costs = StepCosts()
    assert costs.seconds(4, 0) == 0.0
    assert costs.curve(4) is None
    assert DraftCosts(StepCosts()).seconds(0, 4, 2) == 0.0


def test_times_lie_on_a_line_between_measured_sizes_and_beyond_them():
    costs = StepCosts()
    for _ in range(4):
        costs.add(1, 0, 0.010)
        costs.add(1, 8, 0.018)
    assert costs.seconds(1, 4) == pytest.approx(0.014)
    assert costs.seconds(1, 16) == pytest.approx(0.026)
    assert costs.seconds(3, 0) == pytest.approx(0.010), "the nearest number of rows"


def test_a_predicted_step_time_is_positive():
    costs = StepCosts()
    for _ in range(4):
        costs.add(6, 12, 0.010)
        costs.add(6, 24, 0.030)
    assert costs.seconds(6, 0) == pytest.approx(0.005)


def test_an_unmeasured_number_of_drafts_is_tried_if_predicted_cheap():
    costs = StepCosts()
    for _ in range(4):
        costs.add(1, 0, 0.010)
    assert 0.010 < costs.seconds(1, 8) < 0.011


def test_more_drafts_never_seem_cheaper():
    costs = StepCosts()
    for _ in range(6):
        costs.add(1, 0, 0.012)
        costs.add(1, 2, 0.010)
        costs.add(1, 8, 0.020)
    times = [costs.seconds(1, count) for count in range(12)]
    assert times == sorted(times)


@pytest.mark.parametrize("share", [3, 4])
def test_steps_that_other_programs_made_longer_do_not_count(share):
    """One in three or four takes twenty times as long."""
    costs = StepCosts()
    for number in range(40):
        costs.add(2, 0, 0.2 if number % share == 0 else 0.01)
    assert costs.seconds(2, 0) == pytest.approx(0.01, rel=0.05)


def test_the_first_step_of_a_size_is_left_out():
    costs = StepCosts()
    costs.add(1, 4, 5.0)
    costs.add(1, 4, 0.01)
    assert costs.seconds(1, 4) == pytest.approx(0.01)


def test_a_slower_machine_makes_all_sizes_slower():
    """Even those not measured since: else the ones in use look worse than they are."""
    costs = StepCosts()
    for _ in range(10):
        costs.add(1, 0, 0.010)
        costs.add(1, 8, 0.020)
    for _ in range(300):
        costs.add(1, 0, 0.014)
    assert costs.seconds(1, 0) == pytest.approx(0.014, rel=0.05)
    assert costs.seconds(1, 8) == pytest.approx(0.028, rel=0.15)


def test_a_round_without_drafts_has_its_own_time():
    costs = DraftCosts(StepCosts())
    for _ in range(4):
        costs.add(0, 2, 0, 0.0003)
        costs.add(0, 2, 4, 0.004)
        costs.add(1, 2, 4, 0.0005)
    assert costs.seconds(0, 2, 0) == costs.seconds(1, 2, 0) == pytest.approx(0.0003)
    assert costs.seconds(0, 2, 4) == pytest.approx(0.004)
    assert costs.seconds(1, 2, 4) == pytest.approx(0.0005)


def test_slow_first_rounds_of_other_sizes_are_forgotten():
    costs = DraftCosts(StepCosts())
    for _ in range(5):
        for count in (1, 4, 8):
            costs.add(0, 2, count, 0.010 + 0.01 * count)
    for _ in range(24):
        costs.add(0, 2, 4, 0.004)
    assert costs.seconds(0, 2, 4) < 0.006
    assert costs.seconds(0, 2, 1) < 0.006, "no more than the cost of more drafts"
    for _ in range(260):
        costs.add(0, 2, 4, 0.004)
    assert costs.seconds(0, 2, 8) < 0.01


def test_two_old_sizes_whose_times_fall_are_pooled_for_ever():
    costs = StepCosts()
    for drafts, seconds in ((0, 0.010), (4, 0.014), (1, 0.013), (2, 0.012)):
        for _ in range(3):
            costs.add(1, drafts, seconds)
    for _ in range(10_000):
        costs.add(1, 4, 0.014)
    assert 0.0 < costs.seconds(1, 2) <= costs.seconds(1, 4)


@pytest.mark.parametrize("slow", [1.0, 100.0])
def test_more_drafts_do_not_look_free_when_one_is_made_for_long(slow):
    """However old, the time of the next size counts, at most in proportion to that of one draft."""
    costs = DraftCosts(StepCosts())
    for _ in range(4):
        for drafts in (1, 4, 7):
            costs.add(0, 1, drafts, slow * 0.001 * drafts)
    for _ in range(400):
        costs.add(0, 1, 1, 0.001)
    assert costs.seconds(0, 1, 1) == pytest.approx(0.001)
    assert costs.seconds(0, 1, 4) == pytest.approx(0.004, rel=0.1)
    assert costs.seconds(0, 1, 7) == pytest.approx(0.007, rel=0.1)


def test_catching_up_has_a_price_for_each_token():
    costs = DraftCosts(StepCosts())
    assert costs.catch_up_seconds(100) == 0.0
    for _ in range(4):
        costs.add(0, 1, 4, 0.004)
        costs.add(0, 1, 4, 0.024, lag=200)
    assert costs.seconds(0, 1, 4) == pytest.approx(0.004)
    assert costs.catch_up_seconds(100) == pytest.approx(0.010)


def test_draft_costs_carry_over_to_unmeasured_batches():
    costs = StepCosts()
    for _ in range(5):
        costs.add(16, 0, 0.012)
        costs.add(16, 32, 0.044)
        costs.add(32, 0, 0.026)
    assert costs.seconds(32, 0) == pytest.approx(0.026)
    assert costs.seconds(32, 32) == pytest.approx(0.058)


def test_drafting_becomes_slower_and_faster_with_the_steps():
    """Another program takes half of the machine, while nothing is drafted."""
    steps = StepCosts()
    costs = DraftCosts(steps)
    for _ in range(5):
        steps.add(1, 0, 0.010)
        costs.add(0, 1, 4, 0.004)
    for _ in range(50):
        steps.add(1, 0, 0.015)
    assert costs.seconds(0, 1, 4) > 0.005


def test_drafts_within_a_shape_cost_nothing_more():
    """Eight rows are computed with 1, 2 or 5 tokens a row: the price rises from shape to shape alone."""
    costs = StepCosts(make_grid(PassLimits(8, 64, max_drafts=4)).padded)
    for _ in range(5):
        costs.add(8, 0, 0.010)
        costs.add(8, 3, 0.011)
        costs.add(8, 30, 0.020)
    assert costs.seconds(8, 0) == pytest.approx(0.010)
    assert {round(costs.seconds(8, count), 6) for count in range(1, 9)} == {0.011}
    assert {round(costs.seconds(8, count), 6) for count in range(9, 33)} == {0.020}
    sure = [Offer(0, [0.99**at for at in range(1, 5)]) for _ in range(8)]
    doubtful = [Offer(0, [0.5**at for at in range(1, 5)]) for _ in range(8)]
    prices = StepPrices(lambda drafts: costs.seconds(8, drafts), lambda drafter, count: 0.0)
    assert best_plan(sure, prices, 8, fair=False).num_drafts == [4] * 8
    assert best_plan(doubtful, prices, 8, fair=False).num_drafts == [1] * 8
