"""Steps for which nobody is asked for drafts: planned as without speculation, until the sequences that run change."""

import pytest

from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.config import SchedulerConfig
from outrider.platform.core.request import Drafts, Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.engine.block_pool import BlockPool
from outrider.platform.engine.gates import DraftLimits
from outrider.platform.engine.prefix_cache import PrefixCache
from outrider.platform.engine.scheduler import Scheduler

BLOCK = 4


def make(num_drafts=3, num_blocks=64):
    pool = BlockPool(num_blocks)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, policy="fcfs")
    return Scheduler(config, pool, PrefixCache(pool, BLOCK), drafts=DraftLimits(num_drafts, extra_slots=True))


def request(name, max_tokens=20):
    return Request(name, [1, 2, 3], 3, SamplingParams(max_tokens=max_tokens), seed_key=1)


def step(scheduler, rest=0, drafts=()):
    plan = scheduler.schedule()
    found = Drafts(list(drafts))
    results = [RowResult([7], 0, drafts=found if row.max_new_drafts else Drafts([])) for row in plan.rows]
    scheduler.commit(plan, StepResult(results, rest=rest))
    return plan


@pytest.fixture
def resting():
    """Two sequences that run, and rest for five steps."""
    scheduler = make()
    for name in "ab":
        scheduler.add(request(name))
    assert not step(scheduler, rest=5).rests
    return scheduler


def test_resting_steps_are_those_without_speculation(resting):
    plain = make(num_drafts=0)
    for name in "ab":
        plain.add(request(name))
    assert step(plain).rests, "without speculation nobody is ever asked"
    for _ in range(5):
        ours, theirs = step(resting), step(plain)
        assert ours.rests
        assert theirs.rests
        assert [(r.num_tokens, r.num_drafts, r.max_new_drafts) for r in ours.rows] == [(1, 0, 0)] * 2
    after = step(resting)
    assert not after.rests
    assert [row.max_new_drafts for row in after.rows] == [3, 3]


def test_a_rest_ends_when_a_sequence_joins_or_is_aborted(resting):
    assert step(resting).rests
    resting.abort(["a"])
    assert not step(resting, rest=5).rests
    assert step(resting).rests
    resting.add(request("c"))
    joined = step(resting)
    assert not joined.rests
    assert [row.max_new_drafts for row in joined.rows] == [3, 3], "who runs is asked for, too"
    resting.add(request("d"))
    step(resting, rest=5)
    assert step(resting).rests, "all seats are taken: nobody joins"


def test_a_rest_ends_when_a_sequence_gives_way():
    scheduler = make(num_blocks=5)
    for name in "ab":
        scheduler.add(request(name))
    step(scheduler, rest=50)
    while not scheduler.num_preemptions:
        assert step(scheduler).rests
    assert not step(scheduler).rests


def test_a_rest_ends_with_a_sequence_that_has_all_its_tokens():
    scheduler = make()
    scheduler.add(request("short", max_tokens=3))
    scheduler.add(request("long"))
    step(scheduler, rest=50)
    assert [step(scheduler).rests for _ in range(3)] == [True, True, False]
