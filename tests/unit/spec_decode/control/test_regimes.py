"""Regimes in which drafting must not lose: rounds that draft, and the time of a token over that without drafts."""

from __future__ import annotations

import pytest

from .simulated import HOST, LOOKUP, Costs, World

pytestmark = pytest.mark.slow

BASE = b""
HEAD = Costs(0.3, 0.2, catch_up=0.01)
"""An EAGLE head on a small model."""


def demo(rows: int, tokens: int) -> float:
    """The demo model of 3.5M parameters on a CPU: each token costs a tenth of a step of one."""
    return 1.6 + 0.2 * tokens


def saturating(rows: int, tokens: int) -> float:
    """A step that reads weights up to eight tokens, and computes beyond."""
    return 8.0 + max(0, tokens - 8) * 1.5


def outcome(world: World, num_steps: int) -> tuple[float, float]:
    """(share of rounds that ask for drafts, time of a token over that without drafts at the machine's full speed)."""
    world.counts.clear()
    goodput = world.run(num_steps)
    rows = len(world.adapters)
    without = rows / (world.curve(rows, rows) + HOST)
    return sum(any(counts) for counts in world.counts) / num_steps, without / goodput


@pytest.mark.parametrize("rows", [1, 8])
def test_useless_drafts_are_hardly_ever_made(rows):
    """Nor are they when all are right: each costs more than it saves."""
    world = World(lambda rows, tokens: 0.2 + 0.8 * tokens, {(BASE, 0): 0.98, (BASE, 1): 0.98}, [BASE] * rows,
                  [Costs(2.0, 1.0, catch_up=0.05), LOOKUP], noise=0.05, length=70).warm_up()  # fmt: skip
    drafted, cost = outcome(world, 1000)
    assert drafted < 0.03
    assert cost < 1.03


@pytest.mark.parametrize("rows", [1, 8])
def test_wrong_drafts_cost_little(rows):
    accept = {(BASE, 0): 0.3, (BASE, 1): 0.1}
    world = World(demo, accept, [BASE] * rows, [HEAD, LOOKUP], noise=0.05, length=70).warm_up()
    _, cost = outcome(world, 1000)
    assert cost < 1.03


def test_drafts_pay_for_one_request_and_not_for_sixteen():
    accept = {(BASE, 0): 0.6}
    few = World(saturating, accept, [BASE], [HEAD], noise=0.05).warm_up()
    drafted, cost = outcome(few, 1500)
    assert drafted > 0.9
    assert cost < 0.75
    many = World(saturating, accept, [BASE] * 16, [HEAD], noise=0.05).warm_up()
    drafted, cost = outcome(many, 500)
    assert drafted < 0.05
    assert cost < 1.03


@pytest.mark.parametrize("factor", [3.0, 10.0])
def test_slow_first_rounds_are_forgotten(factor):
    """Kernels are compiled, memory is taken: everything that was measured at the start is too long."""
    world = World(saturating, {(BASE, 0): 0.7}, [BASE], [Costs(4.0, 1.0)], noise=0.05, length=400)
    world.drafters = [Costs(4.0 * factor, 1.0 * factor)]
    world.warm_up().run(30)
    world.drafters = [Costs(1.0, 0.3)]
    world.run(3000)
    drafted, cost = outcome(world, 500)
    assert drafted > 0.9
    assert cost < 0.75


@pytest.mark.parametrize("factor", [1.5, 4.0])
@pytest.mark.parametrize("pays", [True, False])
def test_a_burst_of_other_load_is_forgotten(factor, pays):
    accept = {(BASE, 0): 0.7 if pays else 0.1}
    world = World(saturating if pays else demo, accept, [BASE], [HEAD], noise=0.05, length=400).warm_up()
    world.run(500)
    ends = world.now + 3000.0
    world.slowness = lambda now: factor if now < ends else 1.0
    while world.now < ends:
        world.step()
    world.run(1500)
    drafted, cost = outcome(world, 1500)
    assert (drafted > 0.9) is pays
    assert cost < (0.75 if pays else 1.03)


def test_acceptance_that_drops_costs_little_and_drafting_ends():
    world = World(demo, {(BASE, 0): 0.95}, [BASE], [HEAD], noise=0.05, length=400).warm_up()
    drafted, cost = outcome(world, 2000)
    assert drafted > 0.9
    assert cost < 0.9
    world.accept[BASE, 0] = 0.1
    world.run(1500)
    drafted, cost = outcome(world, 2000)
    assert drafted < 0.05
    assert cost < 1.03


def test_trials_of_many_adapters_cost_no_more_than_of_one():
    adapters = [b"%d" % index for index in range(8)]
    accept = {(adapter, drafter): 0.1 for adapter in adapters for drafter in (0, 1)}
    world = World(saturating, accept, adapters, [HEAD, LOOKUP], noise=0.05, length=100).warm_up()
    world.run(100)  # each is expected to accept at first
    _, cost = outcome(world, 600)
    assert cost < 1.03


def test_short_answers_do_not_pay_for_a_drafter_that_reads_long_prompts():
    """Drafting gains a quarter once the drafter has read the prompt, which takes longer than the whole answer gains."""
    world = World(saturating, {(BASE, 0): 0.5}, [BASE], [Costs(0.3, 0.2, catch_up=2.0)], noise=0.05, length=24,
                  prompt=60)  # fmt: skip
    world.warm_up().run(300)
    drafted, cost = outcome(world, 1500)
    assert drafted < 0.1
    assert cost < 1.03
