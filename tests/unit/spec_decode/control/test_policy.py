"""SpeculationPolicy in simulated time: goodput compared with fixed numbers of drafts, trials, hysteresis, adapters."""

from __future__ import annotations

import itertools

import pytest

from outrider.platform.core.batch import RowPlan, RowResult, StepPlan, StepResult
from outrider.platform.core.request import NO_DRAFTS, Status
from outrider.platform.core.sampling_params import SamplingParams

from .simulated import CURVES, HOST, LOOKUP, MAX_DRAFTS, Costs, World, bound, flat, long, short, stairs

BASE = b""
NEURAL = Costs(0.05, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "rows"), [(0.1, 1), (0.8, 8)])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_goodput_is_near_that_of_the_best_fixed_number(curve, p, rows):
    """And never much below that without drafts. A staircase of costs is drawn as a line between measured sizes."""
    world = World(curve, {(BASE, 0): p}, [BASE] * rows, [Costs(0.05, 0.05 * curve(1, 1))]).warm_up()
    goodput = world.run(600)
    assert goodput > 0.96 * world.fixed(0, 0, 60)
    assert goodput > (0.86 if curve is stairs else 0.9) * max(world.fixed(0, k, 60) for k in (0, 1, 2, 4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("curve", [flat, long], ids=["flat", "long"])
def test_the_order_of_overlapping_steps_changes_nothing(curve, overlaps):
    world = World(curve, {(BASE, 0): 0.8}, [BASE] * 4, [NEURAL], overlaps=overlaps).warm_up()
    assert world.run(600) > 0.95 * max(world.fixed(0, k, 150) for k in (0, 1, 2, 4, 8))


def test_wrong_drafts_end_drafting():
    world = World(short, {(BASE, 0): 0.05}, [BASE] * 4, [NEURAL]).warm_up()
    world.run(300)
    world.counts.clear()
    planned = []
    for _ in range(400):
        planned.append(world.policy.plans_no_drafts)
        world.step()
    assert sum(planned) > 300
    assert sum(any(counts) for counts in world.counts) < 40, "trials alone"


@pytest.mark.slow
def test_trials_cost_little_and_find_that_drafts_have_become_right():
    world = World(long, {(BASE, 0): 0.02}, [BASE] * 4, [NEURAL], length=10_000).warm_up()
    world.run(200)
    assert world.run(2000) > 0.98 * world.fixed(0, 0)
    world.accept[BASE, 0] = 0.95
    world.run(1000)
    assert world.run(100) > 1.5 * world.fixed(0, 0)


@pytest.mark.slow
def test_trials_pay_for_slow_drafting():
    """A round of this drafter takes as long as ten steps of the target."""
    world = World(flat, {(BASE, 0): 0.02}, [BASE], [Costs(100.0, 0.0)], length=10_000).warm_up()
    world.run(200)
    assert world.run(4000) > 0.97 * world.fixed(0, 0)


@pytest.mark.slow
def test_each_adapter_gets_its_drafter():
    """The network for one, prompt lookup for another, nothing for the third."""
    accept = {(b"a", 0): 0.9, (b"a", 1): 0.1, (b"b", 0): 0.1, (b"b", 1): 0.8, (b"c", 0): 0.05, (b"c", 1): 0.05}
    world = World(stairs, accept, [b"a", b"b", b"c"], [Costs(0.05, 0.6), LOOKUP]).warm_up()
    world.run(3000)
    world.counts.clear()
    world.drafters_used.clear()
    world.run(600)
    counts = [sum(column) / 600 for column in zip(*world.counts, strict=True)]
    used = [sum(column) / 600 for column in zip(*world.drafters_used, strict=True)]
    assert counts[0] > 2
    assert counts[1] > 2
    assert counts[2] < 1
    assert used[0] < 0.1
    assert used[1] > 0.9


def test_requests_of_one_adapter_have_separate_estimates():
    """One that accepts gets more drafts than the other."""
    world = World(bound, {(BASE, 0): 0.5}, [BASE] * 2, [LOOKUP], length=100_000).warm_up()
    verify = world.verify

    def by_request(row):
        world.accept[BASE, 0] = 0.97 if row.request is world.requests[0] else 0.05
        return verify(row)

    world.verify = by_request
    world.run(300)
    world.counts.clear()
    world.run(200)
    first, second = (sum(column) for column in zip(*world.counts, strict=True))
    assert first > 3 * second


@pytest.mark.slow
def test_noise_does_not_switch_drafting_on_and_off():
    world = World(long, {(BASE, 0): 0.5}, [BASE] * 8, [Costs(0.05, 6.0)], noise=0.03, length=10_000).warm_up()
    world.run(200)
    world.counts.clear()
    world.run(800)
    drafting = [sum(counts) > 0 for counts in world.counts]
    assert sum(one != other for one, other in itertools.pairwise(drafting)) < 40


def drafting_cost(curve, p, gain):
    """Milliseconds of a draft with which the best number of drafts has this goodput, over that without drafts."""

    def best(each):
        return max(
            sum(p**j for j in range(k + 1)) * (curve(1, 1) + HOST) / (curve(1, 1 + k) + HOST + k * each)
            for k in range(1, MAX_DRAFTS + 1)
        )

    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if best(middle) > gain else (low, middle)
    return low


@pytest.mark.slow
@pytest.mark.parametrize("curve", [long, short], ids=["each row", "a class of batch sizes"])
def test_drafting_starts_at_three_per_cent_and_stops_below_half(curve):
    for gain, begins in ((1.02, False), (1.04, True)):  # the acceptance is the expected one at first
        world = World(curve, {(BASE, 0): 0.6}, [BASE], [Costs(0.0, drafting_cost(curve, 0.6, gain))]).warm_up()
        world.plan()
        assert (world.counts[-1][0] > 0) is begins, gain
    for gain, goes_on in ((1.015, True), (0.98, False)):
        world = World(curve, {(BASE, 0): 1.0}, [BASE], [Costs(0.0, 0.5)], length=100_000).warm_up()
        world.run(300)
        world.drafters = [Costs(0.0, drafting_cost(curve, 1.0, gain))]
        world.run(2500)
        world.counts.clear()
        world.run(300)
        drafting = sum(count > 0 for (count,) in world.counts)
        assert drafting == 300 if goes_on else drafting <= 8, gain  # a trial or two


@pytest.mark.slow
def test_noise_does_not_change_the_drafter_back_and_forth():
    """Of two drafters that are equally good, an adapter keeps the one that it has."""
    accept, drafters = {(BASE, 0): 0.7, (BASE, 1): 0.7}, [Costs(0.05, 0.6)] * 2
    world = World(long, accept, [BASE] * 8, drafters, noise=0.03, length=10_000_000).warm_up()
    world.run(300)
    world.drafters_used.clear()
    world.run(1500)
    most_used = [2 * sum(used) > len(used) for used in world.drafters_used]  # trials have two rows
    assert sum(one != other for one, other in itertools.pairwise(most_used)) < 3


@pytest.mark.slow
def test_with_short_steps_a_class_of_batch_sizes_has_one_number():
    """It is chosen about once a second, and the same for all rows of an adapter."""
    world = World(short, {(BASE, 0): 0.8}, [BASE] * 4, [LOOKUP]).warm_up()
    began = world.now
    world.run(4000)
    chosen = [counts[0] for counts in world.counts if len(set(counts)) == 1]
    assert len(chosen) > 0.97 * len(world.counts)
    changes = sum(one != other for one, other in itertools.pairwise(chosen))
    assert changes < 10 + 2 * (world.now - began) / 1000


def test_a_choice_never_exceeds_the_room():
    world = World(flat, {(BASE, 0): 0.95}, [BASE] * 2, [LOOKUP]).warm_up()
    world.run(100)
    rows = [
        RowPlan(request, len(request.tokens) - 1, 1, 0, True, limit)
        for request, limit in zip(world.requests, (0, 2), strict=True)
    ]
    world.policy.choose(rows)
    assert [row.max_new_drafts for row in rows] == [0, 2]


@pytest.mark.slow
def test_drafts_of_quick_rows_are_worth_less_while_a_batch_drains():
    """No requests wait: the rows whose drafts are wrong determine when the batch is done."""
    made = {}
    for waiting in (True, False):
        world = World(bound, {(b"a", 0): 0.85, (b"b", 0): 0.02}, [b"a", *[b"b"] * 7], [LOOKUP], waiting=waiting)
        world.warm_up().run(400)
        world.counts.clear()
        world.run(200)
        made[waiting] = sum(map(sum, world.counts))
    assert made[False] <= made[True]


def test_numbers_are_held_for_measuring_and_nothing_is_learned_meanwhile():
    world = World(flat, {(BASE, 0): 0.0}, [BASE] * 2)
    for drafter, count in world.policy.choices:
        world.policy.hold(drafter, count)
        world.run(3)
        assert world.counts[-1] == [count, count]
        assert not world.policy.plans_no_drafts
    assert world.policy.choices[0] == (0, 0)
    assert (0, MAX_DRAFTS) in world.policy.choices
    world.policy.release()
    assert world.policy.snapshot() == {}


def test_acceptance_is_kept_by_adapter_and_kind_of_sampling_and_forgotten_with_the_adapter():
    world = World(flat, {(b"a", 0): 0.9, (b"b", 0): 0.1}, [b"a", b"b"]).warm_up()
    world.run(200)
    world.params = SamplingParams(temperature=1.0)
    for index, request in enumerate(world.requests):
        request.status = Status.FINISHED
        world.requests[index] = world.fresh(request.text_namespace[1])
    world.run(200)
    known = world.policy.snapshot()
    assert set(known) == {"61 greedy", "61 sampled", "62 greedy", "62 sampled"}
    assert known["61 greedy"]["acceptance"][0] > 0.8 > 0.3 > known["62 greedy"]["acceptance"][0]
    world.policy.forget(b"a")
    assert set(world.policy.snapshot()) == {"62 greedy", "62 sampled"}


def test_a_new_request_starts_from_its_adapters_estimate():
    world = World(long, {(b"a", 0): 0.02}, [b"a"] * 4, [NEURAL]).warm_up()
    world.run(600)
    for index, request in enumerate(world.requests):
        request.status = Status.FINISHED
        world.requests[index] = world.fresh(b"a")
    world.counts.clear()
    world.run(4)
    assert sum(map(sum, world.counts)) <= 16, "at most a trial of two rows"


def test_drafts_of_a_row_that_was_planned_before_its_request_ended_were_made():
    """If steps overlap it is still computed; the request has no drafts any more."""
    world = World(long, {(BASE, 0): 1.0}, [BASE], overlaps=True, length=100_000).warm_up()
    world.run(400)
    policy, request = world.policy, world.requests[0]
    rows = world.planned.rows
    assert rows[0].num_drafts > 1
    chosen = world.counts[-1]
    request.status, request.drafts = Status.FINISHED, NO_DRAFTS
    for _ in range(100):
        policy.observe(StepPlan(rows, can_overlap_next=True), StepResult([RowResult([], rows[0].num_drafts)], 0.05))
    world.requests, world.planned = [world.fresh(BASE)], None
    world.plan()
    assert world.counts[-1] == chosen, "a new request gets as many"


def test_forced_tokens_do_not_count_for_a_drafter():
    """A grammar's forced tokens are always right, and no drafter has made them."""
    world = World(flat, {(BASE, 0): 0.3}, [BASE], [LOOKUP], length=100_000).warm_up()
    world.run(300)
    known, [request] = world.policy.snapshot(), world.requests
    for _ in range(50):
        rows = [RowPlan(request, len(request.tokens) - 1, 5, 4, True, MAX_DRAFTS, is_forced=True)]
        world.policy.choose(rows)
        request.tokens += [0] * 5
        world.policy.observe(StepPlan(rows), StepResult([RowResult([0] * 5, 4)], 0.01))
    assert world.policy.snapshot() == known


def test_a_trial_whose_row_has_gone_ends():
    """No other request comes; the one that stays gets a trial again."""
    world = World(long, {(BASE, 0): 0.02}, [BASE] * 2, [NEURAL], length=100_000).warm_up()
    world.run(400)
    assert world.counts[-1] == [0, 0]
    while 0 in world.counts[-1]:  # until both have a trial
        world.step()
    world.requests.pop().status = Status.FINISHED
    world.run(500)
    world.accept[BASE, 0] = 0.95
    world.run(1000)
    world.counts.clear()
    world.run(200)
    assert sum(map(sum, world.counts)) > 200


@pytest.mark.slow
@pytest.mark.parametrize(("p", "match"), [(0.5, 0.0), (0.3, 0.6)], ids=["silent", "worse"])
def test_trials_of_a_fallback_that_does_not_help_become_rare(p, match):
    accept = {(BASE, 0): 0.8, (BASE, 1): p}
    world = World(flat, accept, [BASE], [Costs(0.05, 0.5), Costs(0.02, 0.0, match)], length=100_000).warm_up()
    world.run(1000)
    world.drafters_used.clear()
    world.run(2000)
    assert sum(map(sum, world.drafters_used)) < 60


def test_slow_drafting_has_a_price():
    world = World(lambda rows, tokens: 400.0 + 5.0 * tokens, {(BASE, 0): 0.15}, [BASE], [Costs(20.0, 60.0)]).warm_up()
    world.run(200)
    assert world.run(400) > 0.96 * world.fixed(0, 0)


def test_a_step_without_a_time_is_not_measured():
    world = World(long, {(BASE, 0): 0.5}, [BASE]).warm_up()
    for seconds in (*[0.05] * 6, 0.0, 0.0, 0.05, 0.05):
        plan = world.plan()
        world.policy.observe(plan, StepResult([world.verify(row) for row in plan.rows], seconds))
    world.run(50)
    assert world.run(400) > 0.97 * world.best_fixed()
