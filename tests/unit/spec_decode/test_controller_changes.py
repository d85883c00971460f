"""When drafting begins and ends, and which trials come first."""

import pytest

from outrider.spec_decode.controller import Controller, DrafterTraits
from outrider.spec_decode.lanes import LASTING, LEAVE, MOST_STEPS, Mode, Modes, RowState
from outrider.spec_decode.pace import (
    DECIDING_SHARE,
    EARLY,
    EARLY_SHARE,
    IDLE_SECONDS,
    MOST_IDLE,
    MOST_PERIOD,
    URGENCY,
    Pace,
)
from outrider.spec_decode.probing import HEAD_START, NOISE, PROBE_ROWS, SURPRISED_ROWS
from outrider.spec_decode.step_costs import DraftSize
from outrider.spec_decode.workload import Workload

NEURAL, LOOKUP = DrafterTraits("eagle3", True), DrafterTraits("ngram", False)


def steps_until_off(seconds, good=0):
    """Of steps of so many seconds, after `good` of them in which all drafts were right; later drafts lose some 6%."""
    controller = Controller([NEURAL], 4)
    row = RowState(controller.lane((b"a", False)))
    for step in range(good + 3000):
        count = row.num_drafts
        if controller.due(1, False):
            row.limit = 1
            controller.decide([row], 0)
        controller.costs.add_step(1, 1 + count, seconds * (1.0 + 0.2 * count))
        if count:
            controller.proposed(0, [(row, 1, 1)])
            controller.costs.add_draft(0, DraftSize(1, 1), 0.4 * seconds)
            controller.verified({row: [(1, 1 if step < good else step % 2)]})
        controller.stepped(seconds)
        if not controller.drafting:
            return step - good
    return -1


def test_a_change_must_save_more_than_the_machines_noise():
    """Steps of a tenth of a second: drafts are given up once they are known to lose; of a millisecond: once they have
    cost 20 ms."""
    known = steps_until_off(0.1, good=200)
    assert 0 < known < 300
    assert steps_until_off(0.001, good=200) > known + 100


def test_drafting_that_nobody_decided_on_ends_as_soon_as_it_is_known_to_lose():
    assert 0 < steps_until_off(0.001) < 40


def test_trials_of_drafters_wait_for_that_of_no_drafts_which_costs_more():
    controller = Controller([NEURAL, LOOKUP], 4)
    rows = [RowState(controller.lane((b"a", False)))]
    for _ in range(400):
        count, drafter = rows[0].num_drafts, rows[0].drafter
        if controller.due(1, False):
            rows[0].limit = 4
            controller.decide(rows, 0)
        controller.costs.add_step(1, 1 + count, 0.1 + 0.001 * count)
        if count:
            controller.proposed(drafter, [(rows[0], count, count)])
            controller.costs.add_draft(drafter, DraftSize(1, count), 0.001 if drafter else 0.01 * count)
            controller.verified({rows[0]: [(count, count if drafter == 0 else 0)]})
        controller.stepped(0.1)
    assert controller.drafting
    controller._trial_ends = 0
    trial = rows[0].lane.trials[1]

    def decide(spare):
        """The budget can pay so many seconds; all trials are due."""
        controller._step += 2000
        controller._trial_ends = 0
        budget = controller._budget
        budget.passed(1e4)
        budget.spent = budget._earned + HEAD_START * 0.1 - spare
        controller.decide(rows, 0)
        return trial.last == controller._step

    assert not decide(0.2), "enough for prompt lookup's, which waits"
    assert controller._is_saving
    decide(1.0)
    assert not controller._is_saving
    assert not rows[0].num_drafts, "a trial of none"
    assert decide(0.2), "the first one after it does not wait"
    assert controller._is_saving, "and more would"
    assert not decide(0.2)


def test_a_prediction_counts_for_the_steps_of_its_class_of_rows():
    modes = Modes()
    for step in range(0, 400, 20):  # 15 steps of one class and 5 of another in turn
        modes.enter(1, step)
        modes.enter(2, step + 15)
    modes.enter(1, 400)
    one, two = modes.get(1), modes.get(2)
    one._is_new = two._is_new = False
    assert not one.is_outdone(-0.1, 1e9)
    assert not two.is_outdone(-0.1, 1e9)
    assert one._saved == pytest.approx(MOST_STEPS * (0.1 - LEAVE)), "no more than so many"
    assert two._saved == pytest.approx(MOST_STEPS * (0.1 - LEAVE))
    modes.enter(2, 415)
    modes.enter(1, 420)
    assert not one.is_outdone(-0.1, 1e9)
    assert one._saved == pytest.approx((MOST_STEPS + 15) * (0.1 - LEAVE))
    assert not two.is_outdone(-0.1, 1e9)
    assert two._saved == pytest.approx((MOST_STEPS + 5) * (0.1 - LEAVE))


def test_what_a_long_step_loses_counts_for_the_steps_that_it_takes_the_time_of():
    mode = Mode(True, 0)
    assert not mode.is_outdone(0.1, 1e9), "it gains"
    mode.passed(4)
    assert not mode.is_outdone(-0.1, 1e9, length=3.0)
    assert mode._saved == pytest.approx(12 * (0.1 - LEAVE))
    mode.passed(MOST_STEPS)
    assert not mode.is_outdone(-0.1, 1e9, length=3.0)
    assert mode._saved == pytest.approx((12 + MOST_STEPS) * (0.1 - LEAVE))


def test_the_first_prediction_ends_drafting_at_once_but_does_not_begin_it():
    assert Mode(True, 0).is_outdone(-0.1, 1e9)
    assert not Mode(True, 0).is_outdone(0.0, 1e9)
    assert not Mode(False, 0).is_outdone(0.5, 1e9)


def test_a_loss_is_looked_at_again_sooner():
    def steps(drafting, step, loss, step_seconds=1e-3, decision_seconds=1e-3):
        pace = Pace()
        pace.found(step_seconds, loss)
        return pace.steps(step, Mode(drafting, 0), decision_seconds)

    usual = steps(True, EARLY, 0.0)
    assert usual == pytest.approx(1.0 / DECIDING_SHARE, abs=1)
    assert steps(True, EARLY, 0.1) == pytest.approx(1.0 / (URGENCY * 0.1), abs=1)
    assert steps(True, EARLY, 0.001) == steps(True, EARLY, -0.1) == usual
    assert steps(True, EARLY - 1, 0.0) == pytest.approx(1.0 / EARLY_SHARE, abs=1)
    assert steps(False, EARLY, 0.0, decision_seconds=1e-4) == pytest.approx(IDLE_SECONDS / 1e-3, abs=1)
    assert steps(False, EARLY, 0.1, decision_seconds=1e-4) == steps(False, EARLY, 0.1, step_seconds=0.0)


def test_where_nothing_was_drafted_for_long_many_short_steps_pass_without_a_look():
    pace, mode = Pace(), Mode(True, 0)
    pace.found(1e-4, 0.0)
    assert pace.steps(EARLY, mode, 1.0) == MOST_PERIOD
    mode.change(EARLY)
    assert pace.steps(EARLY + LASTING - 1, mode, 1e-6) == MOST_PERIOD
    assert pace.steps(EARLY + LASTING, mode, 1e-6) == MOST_IDLE
    pace.found(1e-4, 0.1)
    assert pace.steps(EARLY + LASTING, mode, 1.0) == MOST_PERIOD, "a loss is looked at as ever"


def test_a_loss_of_long_ago_is_none_of_the_next_decisions():
    pace = Pace()
    pace.found(1e-3, 0.1)
    assert pace.is_worth_deciding(EARLY, 0.06, 1e-3)
    pace.decided(0.0)
    assert not pace.is_worth_deciding(EARLY, 0.06, 1e-3)


def test_after_a_decision_for_nobody_the_next_ones_follow_at_growing_intervals():
    """All requests may be at their ends; or none may ever have drafts."""
    controller = Controller([NEURAL], 4)
    row = RowState(controller.lane((b"a", False)))

    def wait(limit):
        row.limit = limit
        controller._step = max(controller._step, controller._next_decision, controller._trial_ends)
        controller.decide([row], 0)
        return controller._next_decision - controller._step

    controller._step = 2000
    assert [wait(0) for _ in range(6)] == [1, 2, 4, 8, 16, 16]
    wait(4)
    assert wait(0) == 1


def test_the_drafter_that_was_asked_for_is_tried_first_whatever_it_costs():
    controller = Controller([NEURAL, LOOKUP], 4)
    rows = [RowState(controller.lane((b"a", False)))]
    controller.costs.add_step(1, 1, 0.001)
    for _ in range(4):
        controller.costs.add_step(1, 1, 0.001)
        controller.costs.add_draft(0, DraftSize(1, 1), 0.01)
        controller.costs.add_draft(1, DraftSize(1, 4), 1e-6)
    rows[0].limit, rows[0].drafter = 4, 1  # as after a trial
    controller.decide(rows, 0)
    assert (rows[0].drafter, rows[0].num_drafts > 0) == (0, True)
    for _ in range(20):
        controller.proposed(0, [(rows[0], 1, 1)])
        controller.verified({rows[0]: [(1, 1)]})
    controller._step = 1
    controller.decide(rows, 0)
    assert rows[0].drafter == 1, "known, and too expensive"
    assert controller._modes.changed_at == 1, "which is a change"


def test_another_text_is_no_noise_of_the_machines():
    """Nothing is drafted, steps of a millisecond; a trial shows that all is right now, or requests are of another kind
    than the last."""

    def is_drafting(surprising=False, before=b"a"):
        controller = Controller([NEURAL], 4)
        row = RowState(controller.lane((b"a", False)))
        for _ in range(20):
            controller.proposed(0, [(row, 4, 4)])
            controller.verified({row: [(4, 4)]})
            for count in range(5):
                controller.costs.add_step(1, 1 + count, 0.001)
                controller.costs.add_draft(0, DraftSize(1, 1 + count), 2e-4 * (1 + count))
        controller._modes.enter(1, 2000)
        controller._mode.drafting = False
        controller._step, row.limit = 2000, 4
        row.lane.surprising = 0 if surprising else -1
        controller._planned_for = {controller.lane((before, False))}
        controller.decide([row], 0)
        return controller.drafting

    assert not is_drafting()
    assert is_drafting(surprising=True)
    assert is_drafting(before=b"b")


def test_what_is_sampled_may_not_be_drafted_for_and_what_is_greedy_is_between_two_decisions():
    """Requests of one adapter in turns, of one text that drafts suit and one that they do not: each is known."""
    controller = Controller([NEURAL], 4)
    greedy, sampled = (controller.new_row((b"a", is_greedy)) for is_greedy in (True, False))
    for _ in range(40):
        for row, accepted in ((greedy, 4), (sampled, 0)):
            controller.proposed(0, [(row, 4, 4)])
            controller.verified({row: [(4, accepted)]})
        for count in range(5):
            controller.costs.add_step(1, 1 + count, 0.001)
            controller.costs.add_draft(0, DraftSize(1, 1 + count), 2e-4 * (1 + count))
    controller._step = 2000
    found = []
    for row in (greedy, sampled, greedy, greedy, sampled, sampled, greedy):
        controller._step += 1
        row.limit = 4
        controller.decide([row], 0)
        found.append(controller.drafting)
    assert found == [True, False, True, True, False, False, True]


def test_what_was_no_noise_for_some_rows_is_none_for_others():
    modes = Modes()
    modes.enter(1, 0)
    assert modes.noise(0) == NOISE
    modes.change(10)
    assert modes.noise(10) == NOISE, "to change back"
    modes.enter(2, 20)
    modes.current.drafting = True
    assert (modes.noise(20), modes.noise(10 + LASTING)) == (0.0, NOISE)


def test_decisions_are_as_far_apart_as_makes_them_a_share_of_the_time():
    """Twenty milliseconds a step and a decision of one: as far as ever. Half a millisecond: as far as can be."""

    def steps_between(seconds):
        controller = Controller([NEURAL], 4)
        row = RowState(controller.lane((b"a", False)))
        for _ in range(16):
            controller.costs.add_step(1, 1, seconds)
            controller.costs.add_decision(1e-3)
        controller._step = 1000
        row.limit = 4
        controller.decide([row], 0)
        return controller._next_decision - controller._step

    assert (steps_between(0.02), steps_between(0.0005)) == (16, MOST_PERIOD)
    assert steps_between(0.004) == pytest.approx(1e-3 / DECIDING_SHARE / 0.004, abs=8)


def test_what_requests_are_like_does_not_depend_on_how_many_steps_are_told_at_once():
    found = []
    for at_once in (1, 16, 160):
        workload = Workload()
        for _ in range(20):
            for _ in range(160 // at_once):
                workload.computed(2048 * at_once // 160, 32 * at_once, 0)
        found.append(workload.prompts_per_token)
    assert min(found) > 0.25, "all that was before is not forgotten at once"
    assert max(found) < 0.5


def test_one_request_out_of_the_common_is_not_how_others_begin():
    """Decided once in many requests, a bad one would have all of them drafted for badly until the next time."""
    controller = Controller([NEURAL], 4)
    lane = controller.lane((b"a", False))

    def run(row, steps, is_right):
        for _ in range(steps):
            count = row.num_drafts
            if controller.due(1, False):
                row.limit = 4
                controller.decide([row], 0)
            controller.costs.add_step(1, 1 + count, 0.01 + 0.0005 * count)
            if count:
                controller.proposed(0, [(row, count, count)])
                controller.costs.add_draft(0, DraftSize(1, count), 0.002 * count)
                controller.verified({row: [(count, count if is_right else 0)]})
            controller.stepped(0.01)

    run(controller.new_row((b"a", False)), 300, is_right=True)
    most = lane.num_drafts
    assert most >= 3
    bad = controller.new_row((b"a", False))
    assert bad.num_drafts == most
    controller._next_decision = controller._step + 5
    run(bad, 5, is_right=False)
    run(bad, 1, is_right=False)
    assert not bad.is_usual
    assert bad.num_drafts < most, "what is left of it"
    assert controller.new_row((b"a", False)).num_drafts == most


def test_what_seems_new_is_repeated_with_more_rows_although_nothing_else_can_be_paid():
    controller = Controller([NEURAL], 4)
    rows = [RowState(controller.lane((b"a", False))) for _ in range(2 * SURPRISED_ROWS)]
    lane = rows[0].lane

    def decide():
        for row in rows:
            row.limit = 4
        controller.decide(rows, 0)
        return sum(row.num_drafts > 0 for row in rows)

    for _ in range(600):
        if controller.due(len(rows), False):
            decide()
        drafts = sum(row.num_drafts for row in rows)
        controller.costs.add_step(len(rows), len(rows) + drafts, 0.001 + 0.0001 * drafts)
        drafting = [row for row in rows if row.num_drafts]
        if drafting:
            controller.proposed(0, [(row, row.num_drafts, row.num_drafts) for row in drafting])
            controller.costs.add_draft(0, DraftSize(len(drafting), 1), 0.001)
            for row in drafting:
                controller.verified({row: [(row.num_drafts, 0)]})
        controller.stepped(0.001)
    assert not controller.drafting
    controller._budget.passed(1.0)
    controller._step += 3000
    controller._budget._enough = None
    found = decide()
    while controller._batch and not lane.on_trial:  # drafting as a whole is tried first
        controller._step = controller._next_decision
        controller._budget.passed(1.0)
        found = decide()
    assert found == PROBE_ROWS
    for row in rows:
        if row.num_drafts:
            row.proposed_by = 0
            controller.verified({row: [(1, 1)]})
    controller._step += 1
    controller._budget._enough = controller._budget._earned + 1.0  # somebody was refused
    assert decide() == SURPRISED_ROWS


def test_what_cannot_ever_be_paid_is_not_asked_for_again_and_again():
    controller = Controller([NEURAL], 4)
    rows = [RowState(controller.lane((b"a", False))) for _ in range(2)]
    lane = rows[0].lane
    for row in rows:
        row.limit = 4
    controller.costs.add_step(2, 2, 0.001)
    controller.costs.add_draft(0, DraftSize(2, 1), 0.001)
    controller._mode.drafting = False
    for row in rows:
        row.lag = 10**6
    controller._modes.enter(2, 0)
    controller._mode.drafting = False
    lane.surprising = 0
    controller._step = 3000
    controller.decide(rows, 0)
    assert not lane.on_trial
    assert lane.surprising == -1


def test_in_a_trial_of_none_new_requests_begin_with_none():
    """However unusual those are that run."""
    controller = Controller([NEURAL], 4)
    row = controller.new_row((b"a", False))
    controller.lane((b"a", False)).num_drafts = 3
    rates = row.rates_of(0)
    rates.count([0.9] * 4, [(4, 0)])
    rates.count([0.9] * 4, [(4, 0)])
    assert not row.is_usual
    controller._trial_of_the_other = lambda *args: False
    row.limit = 4
    for _ in range(2):
        controller.costs.add_step(1, 5, 0.001)
    controller.decide([row], 0)
    assert controller.drafting
    assert controller.new_row((b"a", False)).num_drafts == 0
