"""Measurements before the first request: decode steps of whole batches, nothing else."""

from __future__ import annotations

import pytest

from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.config import SchedulerConfig
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.scheduler import Scheduler
from outrider.platform.engine.runner import warm_up as warming
from outrider.platform.engine.runner.warm_up import warm_up

NUM_BLOCKS = 64


class Drafter:
    """Records its calls in order; `None` once it may choose again."""

    choices = ((0, 0), (0, 1))

    def __init__(self):
        self.held = []

    def hold(self, drafter, num_drafts):
        self.held.append((drafter, num_drafts))

    def release(self):
        self.held.append(None)


class Runner:
    """Steps of one token a row, by the drafter's call for them."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.steps = []  # (number of the order to the drafter, tokens of each row)

    def launch(self, plan):
        return plan

    def draft(self, plan, result):
        return 1.0

    def collect(self, plan):
        self.steps.append((len(self.drafter.held), [row.num_tokens for row in plan.rows]))
        return StepResult([RowResult([7] if row.samples else []) for row in plan.rows])


@pytest.fixture
def scheduler():
    """Steps of 16 tokens: four prompts of 16 take four of them."""
    pool = BlockPool(NUM_BLOCKS)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, policy="fcfs")
    yield Scheduler(config, pool, PrefixCache(pool, 4))
    assert pool.num_free == NUM_BLOCKS


def test_prompts_are_computed_before_anything_is_measured(scheduler):
    drafter = Drafter()
    runner = Runner(drafter)
    warm_up(scheduler, runner, drafter, seconds=1.0, clock=lambda: 0.0)
    per_batch = 1 + len(drafter.choices)  # one order for the prompts
    measured = [(order, tokens) for order, tokens in runner.steps if (order - 1) % per_batch]
    assert all(set(tokens) == {1} for _, tokens in measured)
    assert {len(tokens) for _, tokens in measured} == {1, 2, 3, 4}
    orders = [order for order, _ in measured]
    assert all(orders.count(order) == warming._STEPS for order in orders), "each choice for as many steps"
    assert max(orders) == len(drafter.held) - 1
    assert drafter.held[-1] is None
    assert not scheduler.has_work()


def test_short_sequences_are_measured_in_several_requests():
    pool = BlockPool(NUM_BLOCKS)
    longest = warming.PROMPT + 1 + warming._tokens(2) + 2 * 2 + 1
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=longest, policy="fcfs")
    scheduler, drafter = Scheduler(config, pool, PrefixCache(pool, 4)), Drafter()
    drafter.choices = ((0, 0), (0, 2), (0, 1), (1, 2))
    runner = Runner(drafter)
    warm_up(scheduler, runner, drafter, seconds=1.0, clock=lambda: 0.0)
    measured = dict.fromkeys(drafter.choices, 0)
    for order, tokens in runner.steps:
        held = drafter.held[order - 1]
        if set(tokens) == {1}:
            measured[held] += 1
    batches = warming._PASSES * 2  # of one and of two
    assert all(measured[held] >= batches * warming._STEPS for held in drafter.choices)
    assert pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_warm_up_ends_when_its_time_is_over(scheduler, num_steps):
    drafter = Drafter()
    runner = Runner(drafter)
    warm_up(scheduler, runner, drafter, seconds=num_steps, clock=lambda: len(runner.steps))
    assert len(runner.steps) == num_steps
    assert not scheduler.has_work()
    assert drafter.held[-1] is None


def test_the_rehearsal_runs_all_kinds_in_batches_and_leaves_nothing(scheduler):
    runner = Runner(Drafter())
    warming.rehearse(scheduler, runner)
    decodes = [tokens for _, tokens in runner.steps if set(tokens) == {1}]
    assert max(map(len, decodes)) == 4
    assert len(warming._REHEARSED) * warming._REHEARSED_TOKENS >= sum(map(len, decodes)) >= len(warming._REHEARSED)
    assert not scheduler.has_work()


def test_rehearsed_requests_are_preempted_and_not_measured():
    """Steps that two decodes fill, and that take a second each: kernels are being compiled."""
    pool = BlockPool(NUM_BLOCKS)
    config = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=2, max_model_len=64, policy="fcfs", prompt_pacing=True
    )
    scheduler, runner = Scheduler(config, pool, PrefixCache(pool, 4)), Runner(Drafter())
    seconds, observe = [], scheduler.observe
    scheduler.observe = lambda plan, its: seconds.append(its) or observe(plan, its)
    warming.rehearse(scheduler, runner)
    needed = len(warming._REHEARSED) * (warming.PROMPT + warming._REHEARSED_TOKENS)
    assert len(runner.steps) <= needed
    assert not any(seconds)
    assert pool.num_free == NUM_BLOCKS


def test_no_rehearsal_without_room_for_its_requests():
    pool = BlockPool(NUM_BLOCKS)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=warming.PROMPT + 2, policy="fcfs")
    runner = Runner(Drafter())
    warming.rehearse(Scheduler(config, pool, PrefixCache(pool, 4)), runner)
    assert not runner.steps
