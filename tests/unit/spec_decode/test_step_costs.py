"""Tables of measured times: noise, outliers, drift, monotony, and what was never measured."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.spec_decode.step_costs import MIXED, Curve, DraftSize, StepCosts, TimeTable, row_class


def test_classes_of_rows_are_two_an_octave():
    assert [row_class(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 31, 32, 47, 48)] == [
        0, 1, 2, 3, 4, 4, 6, 6, 8, 8, 12, 24, 32, 32, 48,
    ]  # fmt: skip


def test_a_curve_is_linear_between_its_points_and_beyond():
    curve = Curve([1.0, 3.0], [10.0, 20.0], 2.0)
    assert [curve(x) for x in (0, 1, 2, 3, 5)] == [10.0, 10.0, 15.0, 20.0, 24.0]
    assert curve.at(np.array([0, 1, 2, 3, 5])).tolist() == [10.0, 10.0, 15.0, 20.0, 24.0]


def test_noise_and_rare_outliers_average_out():
    generator, table = random.Random(1), TimeTable()
    for _ in range(400):
        size = generator.choice((4, 8, 16))
        factor = generator.uniform(0.8, 1.2) * (10 if generator.random() < 0.02 else 1)
        table.add(4, size, (1.0 + 0.1 * size) * factor)
    curve = table.curve(4)
    assert [curve(x) for x in (4, 8, 16)] == pytest.approx([1.4, 1.8, 2.6], rel=0.06)
    assert curve(12) == pytest.approx((curve(8) + curve(16)) / 2)


def test_one_early_outlier_is_no_lasting_belief():
    table = TimeTable()
    table.add(1, 1, 10.0)
    for _ in range(3):
        table.add(1, 1, 1.0)
    assert table.curve(1)(1) == pytest.approx(1.0)


def test_common_drift_reaches_sizes_that_are_not_visited():
    table = TimeTable()
    for _ in range(50):
        table.add(8, 8, 1.0)
        table.add(8, 24, 1.5)
    for _ in range(200):
        table.add(8, 24, 3.0)
    curve = table.curve(8)
    assert curve(24) == pytest.approx(3.0, rel=0.03)
    assert curve(8) / curve(24) == pytest.approx(1.0 / 1.5, rel=0.25)


def test_another_class_of_rows_lends_its_shape():
    table = TimeTable()
    for size in (8, 16, 32):
        for _ in range(10):
            table.add(8, size, 1.0 + size / 16)
    for _ in range(10):
        table.add(12, 16, 4.0)
    curve = table.curve(12)
    assert curve(16) == pytest.approx(4.0)
    assert curve(32) == pytest.approx(4.0 * 3.0 / 2.0)
    assert curve(8) == pytest.approx(4.0 * 1.5 / 2.0)
    assert table.reach == pytest.approx(32)


def test_steps_with_prompts_stay_apart():
    table = TimeTable()
    for _ in range(2):
        table.add(MIXED, 500, 9.0)
    assert table.curve(4) is None
    for _ in range(2):
        table.add(4, 4, 1.0)
    assert table.curve(4)(4) == 1.0


def test_the_first_time_of_a_size_does_not_count():
    """Kernels are prepared for it: a drafter must not be given up for what only its first call takes."""
    table = TimeTable()
    table.add(1, 5, 1.0)
    assert table.curve(1) is None
    table.add(1, 5, 0.01)
    assert table.curve(1)(5) == pytest.approx(0.01)


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(1, 600), st.floats(1e-6, 10.0)), min_size=1, max_size=60),
    st.integers(1, 64),
)
def test_more_tokens_never_take_less(times, rows):
    costs = StepCosts([True])
    for at, size, seconds in times:
        costs.add_step(at, size, seconds)
        costs.add_draft(0, DraftSize(at, min(size, 32)), seconds)
    for curve in (costs.target_curve(rows), costs.draft_curve(0, rows)):
        values = [curve(size) for size in range(1, 700, 7)]
        assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(values))
        assert min(values) >= 0.0


def test_the_hosts_time_ignores_idle_gaps():
    costs = StepCosts([True])
    for index in range(40):
        costs.add_gap(4, 0.5 if index % 3 == 0 else 0.002)
    assert costs.host_seconds(4) == pytest.approx(0.002, rel=0.04)


def test_what_drafting_takes_beside_the_drafter_is_priced():
    costs = StepCosts([True])
    for index in range(40):
        costs.add_gap(4, 0.002)
        costs.add_drafting_gap(4, 0.5 if index % 3 == 0 else 0.003)
        costs.add_bookkeeping(0.5 if index % 3 == 0 else 0.0005)
    assert costs.host_seconds(4) == pytest.approx(0.002, rel=0.02)
    assert costs.drafting_seconds(4) == pytest.approx(0.0015, rel=0.05)


def test_counting_is_priced_by_the_steps_that_are_measured():
    """One of 32 is; a trial, all of whose steps are, does not change what the others cost."""
    costs = StepCosts([True])
    for _ in range(20):
        costs.add_bookkeeping(0.0005, 32)
        costs.add_bookkeeping(0.0005, 0)
    assert costs.measured_bookkeeping_seconds == pytest.approx(0.0005)
    assert costs.bookkeeping_seconds == pytest.approx(0.0005 * (0.1 + 0.9 / 32))
    for _ in range(20):
        costs.add_bookkeeping(0.0005, 1)
    assert costs.bookkeeping_seconds == pytest.approx(0.0005)


def test_who_joins_is_priced_by_how_often_somebody_does():
    """A batch that drains is taken over again and again: each time about what a measured step takes to count, twice."""
    costs = StepCosts([True])
    for _ in range(20):
        costs.add_bookkeeping(0.0005, 32)
    alone = costs.bookkeeping_seconds
    costs.add_joins(0, 200)
    assert costs.bookkeeping_seconds == pytest.approx(alone)
    for _ in range(40):
        costs.add_joins(8, 20)
    assert costs.bookkeeping_seconds - alone == pytest.approx(31 / 32 * 2 * 0.4 * 0.0005, rel=0.05)
    costs.add_joins(0, 5000)
    assert costs.bookkeeping_seconds == pytest.approx(alone, rel=0.01), "lately"


def test_catching_up_is_priced_by_the_token_and_kept_out_of_the_table():
    costs = StepCosts([True])
    costs.add_step(1, 1, 0.01)
    for _ in range(20):
        costs.add_draft(0, DraftSize(1, 2), 0.002)
    before = costs.draft_curve(0, 1)(2)
    for _ in range(20):
        costs.add_draft(0, DraftSize(1, 2, lag=100), 0.052)
    assert costs.draft_curve(0, 1)(2) == before
    assert costs.catch_up(0, 200) == pytest.approx(0.1, rel=0.05)


def test_before_anything_is_measured_drafting_looks_cheap():
    costs = StepCosts([True, False])
    costs.add_step(MIXED, 40, 0.02)
    assert costs.target_curve(1)(9) < 1.2 * costs.target_curve(1)(1)
    assert costs.draft_curve(0, 1)(4) < 0.2 * 0.02
    assert costs.draft_curve(1, 1)(4) < costs.draft_curve(0, 1)(4)


def test_prompt_lookup_says_nothing_of_the_machine():
    costs = StepCosts([True, False])
    for _ in range(40):
        costs.add_step(1, 1, 0.01)
        costs.add_draft(0, DraftSize(1, 4), 0.004)
        costs.add_draft(1, DraftSize(1, 4), 1e-4)
    before = costs.target_curve(1)(1)
    for _ in range(100):
        costs.add_draft(1, DraftSize(1, 4), 1e-5)  # its code is in the caches now
    assert costs.target_curve(1)(1) == before
    for _ in range(100):
        costs.add_draft(0, DraftSize(1, 4), 0.008)
    assert costs.target_curve(1)(1) > 1.3 * before, "a network's passes do"
