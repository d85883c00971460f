"""The choice of drafts against an exhaustive search, budgets of trials, and what the controller remembers."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.spec_decode import controller as controller_module
from outrider.spec_decode.controller import Controller, DrafterTraits
from outrider.spec_decode.goodput import STAY, Offer, Prices, best_plan
from outrider.spec_decode.lanes import LEAST_OUTLOOK, MAX_LANES, MOST_OUTLOOK, Before, RowState
from outrider.spec_decode.pace import DECIDING_SHARE, DISTURBANCE, EARLY, MOST_PERIOD
from outrider.spec_decode.probing import (
    CALM,
    CALM_SHARE,
    CALM_SHORT_SHARE,
    CHARGED,
    HEAD_START,
    MAX_INTERVAL,
    MOST_CHARGED,
    SHARE,
    Backoff,
    Budget,
)
from outrider.spec_decode.step_costs import Curve, DraftSize

NEURAL = DrafterTraits("draft_model", True)
LOOKUP = DrafterTraits("ngram", False)


def prices(offers, slope=0.2, draft=0.5, row=0.05, rows=None):
    served = [sum(offer.drafter == d for offer in offers) for d in (0, 1)]
    curves = [
        (
            Curve([0.0, 8.0], [0.0, 8 * draft], draft),
            Curve([0.0, 8.0], [0.0, 8 * (draft + row)], draft + row),
        ),
        (Curve([0.0, 1.0, 8.0], [0.0, 0.05, 0.05], 0.0), Curve([0.0, 1.0, 8.0], [0.0, 0.2, 0.2], 0.0)),
    ]
    base = rows or len(offers)
    target = Curve([1.0, 8.0, 40.0], [5.0, 5.0 + 3 * slope, 5.0 + 35 * slope], slope)
    drafts = [(*curves[d], served[d]) for d in (0, 1)]
    return Prices(base, base, 0.3, target, drafts, (True, False))


def goodput_of(offers, counts, at):
    """The formula, written down plainly."""
    tokens, size, seconds = float(at.base_rows), float(at.base_tokens), at.host + at.extra
    for offer, count in zip(offers, counts, strict=True):
        tokens += sum(c * a for c, a in list(zip(offer.cumulative, offer.available, strict=True))[:count])
        size += sum(offer.available[:count])
    seconds += at.target(size)
    for drafter, (few, many, rows) in enumerate(at.drafts):
        used = [count for offer, count in zip(offers, counts, strict=True) if offer.drafter == drafter and count]
        if not used:
            continue
        passes = max(used) if at.has_passes[drafter] else max(len(offer.cumulative) for offer in offers)
        low, high = few(passes), many(passes)
        seconds += low + (high - low) / max(rows - 1, 1) * (len(used) - 1)
    return tokens / seconds


probabilities = st.lists(st.floats(0.05, 0.98), min_size=1, max_size=4)


@st.composite
def offer_lists(draw, most=4):
    offers = []
    for _ in range(draw(st.integers(1, most))):
        p = draw(probabilities)
        found = list(itertools.accumulate(p, lambda a, b: a * b))
        drafter = draw(st.integers(0, 1))
        offers.append(Offer(drafter, found, [draw(st.sampled_from([1.0, 0.5]))] * len(p)))
    return offers


@settings(max_examples=60)
@given(offer_lists(), st.floats(0.0, 2.0), st.floats(0.01, 2.0))
def test_the_plan_is_as_good_as_the_best_of_all(offers, slope, draft):
    at = prices(offers, slope, draft)
    plan = best_plan(offers, at)
    choices = itertools.product(*[range(len(offer.cumulative) + 1) for offer in offers])
    best = max(goodput_of(offers, counts, at) for counts in choices if any(counts))
    got = goodput_of(offers, plan.num_drafts, at)
    assert any(plan.num_drafts)
    assert all(0 <= k <= len(offer.cumulative) for k, offer in zip(plan.num_drafts, offers, strict=True))
    assert got >= plan.goodput * (1 - 1e-9)  # a pass that no row reaches is not paid
    # The sweep takes drafts by their chance alone, whoever makes them, though another of the same chance that is made
    # less often may lose less: less is asked where drafting loses.
    assert got >= best * (0.97 if best > plan.off_goodput else 0.9)
    assert plan.off_goodput == pytest.approx(at.base_rows / at.idle_seconds)


def test_rows_that_accept_more_get_more():
    def row(p):
        return Offer(0, list(itertools.accumulate([p] * 6, lambda a, b: a * b)), [1.0] * 6)

    plan = best_plan([row(0.95), row(0.6), row(0.1)], prices([row(0.5)] * 3, slope=0.4, draft=0.1))
    high, middle, low = plan.num_drafts
    assert high > middle > low


def test_the_present_number_of_passes_is_kept_when_another_is_hardly_better():
    offer = Offer(0, [0.8, 0.64, 0.512, 0.41], [1.0] * 4)
    at = prices([offer], slope=0.1, draft=0.3)
    goodputs = {k: goodput_of([offer], [k], at) for k in range(1, 5)}
    for k, goodput in goodputs.items():
        chosen = best_plan([offer], at, passes=k).num_drafts[0]
        assert (chosen == k) == (goodput * STAY >= max(goodputs.values()))


def test_trials_never_cost_more_than_their_share():
    budget = Budget()
    for _ in range(10_000):
        budget.passed(1.0)
        budget.spend(0.7, 1.0)
    assert budget.spent <= SHARE * budget.elapsed + HEAD_START
    assert budget.spent > 0.9 * SHARE * budget.elapsed


def test_what_was_refused_is_asked_for_again_when_it_can_be_paid():
    budget = Budget()
    budget.passed(100.0)
    assert budget.may_suffice
    assert not budget.spend(HEAD_START + 4.0, 1.0)
    assert not budget.spend(HEAD_START + 2.0, 1.0)
    steps = 0
    while not budget.may_suffice:
        budget.passed(1.0)
        steps += 1
    assert steps == pytest.approx(2.0 / SHARE - 100.0, abs=1.0)  # for the cheaper one
    budget.forget_refusals()
    assert budget.spend(HEAD_START + 2.0, 1.0)


def test_what_was_spent_in_any_case_is_waited_for():
    budget = Budget()
    budget.passed(10_000.0)
    budget.charge(5.0, 1.0)
    assert budget.may_suffice, "there is enough"
    while budget.spend(1.0, 1.0):
        pass
    budget.forget_refusals()
    budget.passed(1.0 / SHARE)
    budget.charge(MOST_CHARGED, 1.0)
    assert not budget.may_suffice
    steps = 0
    while not budget.may_suffice:
        budget.passed(1.0)
        steps += 1
    budget.passed(1.0)
    assert budget.spend(0.5 * SHARE, 1.0)
    assert steps > 1.0 / SHARE


def test_however_much_is_spent_in_any_case_trials_keep_their_part():
    budget, tried = Budget(), 0
    for _ in range(20_000):
        budget.passed(1.0)
        budget.charge(0.1, 1.0)
        budget.forget_refusals()
        tried += budget.spend(1.0, 1.0)
    assert tried == pytest.approx((1.0 - CHARGED) * SHARE * 20_000, rel=0.1)
    while budget.spend(1.0, 1.0):
        pass
    budget.charge(1e6, 1.0)
    assert not budget.may_suffice
    budget.passed((MOST_CHARGED + 2.0) / SHARE)
    assert budget.may_suffice, "one that took for ever is not waited for so long"


@pytest.mark.parametrize("seconds", [0.0, 0.004])
def test_another_number_of_rows_is_decided_for_when_that_is_worth_its_time(seconds):
    """Steps of a millisecond: a decision of four is made after 1200 of them, one that costs nothing at once."""
    controller = Controller([NEURAL], 4)
    controller._step = EARLY
    rows = [RowState(controller.lane((b"a", False))) for _ in range(8)]

    def decide(number, steps):
        controller._next_decision = controller._step + 10**6
        controller._pace.loss = 0.0  # that of one decision is nobody's concern here
        for step in range(steps):
            if controller.due(number, False):
                for row in rows[:number]:
                    row.limit = 4
                controller.decide(rows[:number], 0)
                controller._next_decision = controller._trial_ends = 10**6
                controller.decided(seconds)
                return step
            controller.costs.add_step(number, number, 0.001)
            controller.stepped(0.001)
        return -1

    controller.decide(rows, 0)
    controller._trial_ends = 0
    assert decide(2, 400) == 0, "nothing is known of so many rows"
    controller._trial_ends = 0
    assert controller.drafting
    assert decide(8, 5000) == pytest.approx(DISTURBANCE * seconds / 0.001 / DECIDING_SHARE, abs=2)


def test_trials_are_rarer_when_nothing_has_changed_for_long():
    budget = Budget()
    budget.passed(100.0)
    assert budget._earned == pytest.approx(100.0 * SHARE)
    budget.passed(100.0, 10_000, is_calm=True)
    assert budget._earned == pytest.approx(100.0 * (SHARE + CALM_SHARE))
    budget.passed(100.0, 20_000, is_calm=True)
    assert budget._earned == pytest.approx(100.0 * (SHARE + CALM_SHARE + CALM_SHORT_SHARE)), "steps are short"
    assert CALM_SHORT_SHARE < CALM_SHARE < SHARE
    controller, told = Controller([NEURAL], 4), []
    controller._budget = SimpleNamespace(passed=lambda seconds, steps, is_calm: told.append((steps, is_calm)))
    controller.stepped(0.001, 5000)
    controller._modes.change(controller._step)
    for steps in (1, CALM - 2, 1):
        controller.stepped(0.001, steps)
    assert told == [(5000, True), (1, False), (CALM - 2, False), (1, True)]


def test_decisions_that_draft_nothing_share_the_budget_of_trials(off):
    rows = [RowState(off.controller.lane((b"a", False))) for _ in range(8)]
    off(3000, rows)
    controller = off.controller
    spent = controller._budget.spent
    controller._outlooks.clear()  # so that all is decided anew
    controller.decide(rows, 0)
    controller.decided(0.002)
    assert not controller.drafting
    assert controller._budget.spent >= spent + 0.002
    spent = controller._budget.spent
    controller.decide(rows, 0)  # finds that nothing is new
    controller.decided(0.002)
    assert controller._budget.spent == spent


@pytest.fixture
def off(monkeypatch):
    """off(steps, rows) -> the steps in which all was decided anew, of a controller whose drafts never pay."""
    controller = Controller([NEURAL], 4)
    decided = []

    def plan(*args):
        decided.append(controller._step)
        return best_plan(*args)

    monkeypatch.setattr(controller_module, "best_plan", plan)

    def run(steps, rows):
        for _ in range(steps):
            drafts = max(row.num_drafts for row in rows)
            if controller.due(len(rows), False):
                for row in rows:
                    row.limit = 4
                controller.decide(rows, 0)
            if drafts:
                controller.proposed(0, [(row, row.num_drafts, row.num_drafts) for row in rows if row.num_drafts])
            controller.costs.add_step(len(rows), len(rows) + drafts, 0.001 + 0.001 * drafts)
            for row in rows:
                controller.verified({row: [(row.num_drafts, 0)]})
            if drafts:
                controller.drafted(0.002)
            controller.stepped(0.001)
        found = decided[:]
        decided.clear()
        return found

    run.controller = controller
    return run


def test_nothing_is_decided_anew_while_nothing_is_drafted_or_learned(off):
    rows = [RowState(off.controller.lane((b"a", False))) for _ in range(8)]
    off(3000, rows)
    assert not off.controller.drafting
    decided = off(2 * MOST_OUTLOOK, rows)
    assert 1 <= len(decided) <= 2 * MOST_OUTLOOK // LEAST_OUTLOOK + 8, "two more for each trial"
    assert all(row.num_drafts == 0 for row in rows)


def test_another_adapter_or_evidence_is_a_reason_to_decide(off):
    rows = [RowState(off.controller.lane((b"a", False))) for _ in range(8)]
    off(3000, rows)
    rows[0] = off.controller.new_row((b"b", False))
    assert off(MOST_PERIOD, rows), "with the next look"
    for accepted, is_reason in ((0, False), (1, True)):
        off(3000, rows)
        trials = [trial.last for trial in (*rows[0].lane.trials, *rows[1].lane.trials, *off.controller._with.values())]
        for _ in range(30):
            rows[1].proposed_by = 0
            off.controller.verified({rows[1]: [(1, accepted)]})
        decided = off(MOST_PERIOD, rows)
        tried = [trial.last for trial in (*rows[0].lane.trials, *rows[1].lane.trials, *off.controller._with.values())]
        if trials == tried:
            assert any(decided) == is_reason, "what makes drafting look better, not what makes it look worse"


def test_a_trial_that_verified_nothing_is_no_surprise(off):
    """However good the last drafts were that could be verified."""
    rows = [RowState(off.controller.lane((b"a", False))) for _ in range(2)]
    off(3000, rows)
    lane = rows[0].lane
    for verified in (True, False):
        rows[0].proposed_by = 0
        lane.rates[0].look_again()
        lane.before[0] = Before(0.1, lane.rates[0].num_tried)
        if verified:
            off.controller.verified({rows[0]: [(1, 1)]})
        lane.end_trials(off.controller._step)
        assert lane.surprising == (0 if verified else -1)


def test_an_unknown_drafter_is_no_reason_to_use_the_other_one_for_ever():
    """It is so slow that it is never asked, and nothing is learned of it; the other is always wrong."""
    controller = Controller([NEURAL, LOOKUP], 4)
    rows = [RowState(controller.lane((b"a", False)))]
    drafted = 0
    for _ in range(1000):
        count, drafter = rows[0].num_drafts, rows[0].drafter
        if controller.due(1, False):
            rows[0].limit = 4
            controller.decide(rows, 0)
        drafted += count > 0
        controller.costs.add_step(1, 1 + count, 0.01 + 0.001 * count)
        if count:
            controller.proposed(drafter, [(rows[0], count, count)])
            controller.costs.add_draft(drafter, DraftSize(1, count), 0.0 if drafter else 0.2 * count)
            controller.verified({rows[0]: [(count, 0)]})
        controller.stepped(0.01)
    assert not controller.drafting
    assert drafted < 100


def test_a_trial_is_charged_what_it_took(off):
    rows = [RowState(off.controller.lane((b"a", False))) for _ in range(8)]
    off(20_000, rows)
    budget = off.controller._budget
    assert budget.spent <= SHARE * budget.elapsed + 0.002 + HEAD_START * 0.001
    before, trials = budget.spent, sum(row.lane.trials[0].last for row in rows[:1])
    while rows[0].lane.trials[0].last == trials:
        off(1, rows)
    assert budget.spent - before >= 0.002 - 1e-9


def test_trials_that_show_nothing_become_rare_but_never_stop():
    backoff, tried = Backoff(0), []
    for step in range(20_000):
        if backoff.due(step):
            backoff.tried(step)
            tried.append(step)
    gaps = [b - a for a, b in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_INTERVAL


def test_adapters_are_forgotten_and_bounded():
    controller = Controller([NEURAL, LOOKUP], 4)
    for index in range(MAX_LANES + 50):
        controller.lane((index, index % 2 == 0))
    assert len(controller.snapshot()) == MAX_LANES
    assert (0, True) not in controller.snapshot()
    for adapter in (MAX_LANES, MAX_LANES + 1):
        controller.forget(adapter)
    assert len(controller.snapshot()) == MAX_LANES - 2, "greedy or not"


@settings(max_examples=60)
@given(st.data())
def test_limits_hold_whatever_was_measured(data):
    controller = Controller([NEURAL, LOOKUP], 6)
    rows = [
        RowState(controller.lane((data.draw(st.integers(0, 2)), False))) for _ in range(data.draw(st.integers(1, 6)))
    ]
    for _ in range(data.draw(st.integers(1, 40))):
        for row in rows:
            row.limit = data.draw(st.integers(0, 6))
            row.lag = data.draw(st.integers(0, 50))
        controller.costs.add_step(len(rows), len(rows) * data.draw(st.integers(1, 7)), data.draw(st.floats(1e-4, 1.0)))
        limits = [row.limit for row in rows]
        controller.decide(rows, data.draw(st.sampled_from([0, 0, 30])))
        for row, limit in zip(rows, limits, strict=True):
            assert 0 <= row.num_drafts <= limit
            controller.proposed(row.drafter, [(row, row.num_drafts, row.num_drafts)])
            controller.verified({row: [(row.num_drafts, data.draw(st.integers(0, row.num_drafts)))]})
        controller.stepped(0.01)
