"""Steps for which nobody is asked for drafts: planned as without speculation, as long as each says that it goes on."""

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
    """Two sequences that run, and rest."""
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
    for rest in (4, 3, 2, 1, 0):
        ours, theirs = step(resting, rest), step(plain)
        assert ours.rests
        assert theirs.rests
        assert [(r.num_tokens, r.num_drafts, r.max_new_drafts) for r in ours.rows] == [(1, 0, 0)] * 2
    after = step(resting)
    assert not after.rests
    assert [row.max_new_drafts for row in after.rows] == [3, 3]


def test_sequences_come_and_go_in_a_rest(resting):
    """Whoever says that it goes on has seen who runs."""
    resting.add(request("c"))
    resting.abort(["a"])
    joined = step(resting, rest=4)
    assert joined.rests
    assert [(row.num_tokens, row.max_new_drafts) for row in joined.rows] == [(1, 0), (3, 0)]
    assert step(resting, rest=0).rests
    after = step(resting)
    assert not after.rests
    assert [row.max_new_drafts for row in after.rows] == [3, 3]


def test_a_rest_goes_on_where_a_sequence_gives_way_and_where_there_is_nothing_to_compute():
    scheduler = make(num_blocks=5)
    for name in "ab":
        scheduler.add(request(name))
    step(scheduler, rest=1)
    while not scheduler.num_preemptions:
        assert step(scheduler, rest=1).rests
    scheduler.abort("ab")
    assert not step(scheduler).rows
    scheduler.add(request("c"))
    assert step(scheduler).rests
