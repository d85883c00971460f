"""The queue of requests: counters, lifts, charges and victims, in hand-made cases."""

from __future__ import annotations

import math

import pytest

from outrider import SamplingParams
from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.config import EngineArgs, FairConfig, SchedulerConfig, check_args
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.request import NO_DRAFTS, Drafts, Request, Status
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.gates import DraftLimits
from outrider.platform.engine.queue.request_queue import POLICIES, RequestQueue
from outrider.platform.engine.queue.scheduler import Scheduler

PRICES = FairConfig(prompt_cost=1.0, output_cost=2.0, rejected_draft_cost=0.5)


def request(name, length=10, weight=1.0, priority=0, max_tokens=40, **params):
    """Request of the tenant whose letter its name begins with."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, **params)
    return Request(
        name, [1] * length, length, params, seed_key=0, tenant=name[0], weight=weight, priority=priority,
        namespace=name[0].encode(),
    )  # fmt: skip


def turns(policy="fair", credit_tokens=0):
    return RequestQueue(POLICIES[policy], PRICES, credit_tokens)


def start(queue, *names, length=10, **fields):
    """Sequences that run, whose prompts are charged."""
    made = [request(name, length, **fields) for name in names]
    for one in made:
        queue.add(one)
        queue.start(one, length)
    return made


def counter(queue, tenant):
    return queue._accounts[tenant].counter


def names(requests):
    return [one.request_id for one in requests]


def test_charges_are_prices_over_weight():
    queue = turns()
    [one] = start(queue, "a", length=12, weight=4.0)
    queue.charge(one, 5, 6)
    assert counter(queue, "a") == (12 * 1.0 + 5 * 2.0 + 6 * 0.5) / 4


@pytest.mark.parametrize(
    ("params", "prompt", "token"),
    [
        ({"allowed_token_ids": [1] * 16_384}, 1, 2),
        ({"bad_words_token_ids": [[1]] * 1024, "logit_bias": dict.fromkeys(range(1024), 1.0)}, 1, 1.125),
        ({"logprobs": 16}, 1, 1.5),
        ({"prompt_logprobs": 1}, 2, 1),
    ],
)
def test_the_cost_of_choosing_a_token_is_charged(params, prompt, token):
    """As multiples of a plain one's."""
    queue = turns()
    [one] = start(queue, "a", length=12, **params)
    assert counter(queue, "a") == 12 * prompt
    queue.charge(one, 5, 0)
    assert counter(queue, "a") == 12 * prompt + 5 * 2.0 * token


def test_a_new_account_is_lifted_to_the_smallest_queued_counter():
    queue = turns()
    for one, length in (("a1", 30), ("b1", 50)):
        start(queue, one, length=length)
        queue.add(request(one[0] + "2"))
    queue.add(request("c"))
    assert counter(queue, "c") == 30


def test_a_new_account_in_an_empty_queue_starts_at_the_last_counter():
    queue = turns()
    start(queue, "b", length=70)
    [last] = start(queue, "a", length=5)
    queue.charge(last, 10, 0)
    queue.add(request("c"))
    assert counter(queue, "c") == counter(queue, "a") > 5


def test_counters_never_fall_and_queued_accounts_are_not_lifted():
    queue = turns()
    queue.add(request("a1"))
    start(queue, "b1", length=50)
    queue.add(request("b2"))
    queue.add(request("a2"))
    assert (counter(queue, "a"), counter(queue, "b")) == (0, 50)


def test_credit_is_bounded_and_does_not_add_up():
    queue = turns(credit_tokens=3)
    start(queue, "a1", length=100)
    queue.add(request("a2"))
    for tenant in "bcd":
        queue.add(request(tenant, weight=2.0 if tenant == "d" else 1.0))
    assert [counter(queue, tenant) for tenant in "bcd"] == [94, 94, 97]


def test_the_smallest_counter_is_next_after_each_start():
    queue = turns()
    for name in ("a1", "a2", "a3", "b1", "b2"):
        queue.add(request(name))
    given = []
    for one in queue.candidates():
        given.append(one.request_id)
        queue.start(one, 10 if one.tenant == "a" else 15)
    assert given == ["a1", "b1", "a2", "b2", "a3"]


def test_a_blocked_request_lets_others_of_its_account_pass():
    queue = turns()
    for name in ("a1", "a2", "b1"):
        queue.add(request(name))
    assert names(queue.candidates()) == ["a1", "a2", "b1"]


def test_priorities_count_inside_a_tenant_only():
    queue = turns()
    for name, priority in (("a1", 9), ("a2", -9), ("b1", -99), ("b2", 5)):
        queue.add(request(name, priority=priority))
    assert names(queue.waiting) == ["a2", "a1", "b1", "b2"]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a1", "b1", "a2"]), ("priority", ["a2", "a1", "b1"])])
def test_other_policies_know_one_account(policy, order):
    queue = turns(policy)
    for name, priority in (("a1", 0), ("b1", 0), ("a2", -1)):
        queue.add(request(name, priority=priority))
    assert names(queue.waiting) == names(queue.candidates()) == names(queue.upcoming(9)) == order
    start(queue, "c")
    assert queue.displaced_by(queue.waiting[0]) is None


def test_the_upcoming_are_of_all_tenants():
    queue = turns()
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.add(request(name))
    assert names(queue.upcoming(5)) == ["a1", "b1", "c1", "a2", "c2"]


def test_the_least_urgent_sequence_of_the_account_served_most_is_preempted_first():
    queue = turns()
    start(queue, "a1", "a2", length=10)
    start(queue, "b1", priority=1, length=30)
    start(queue, "b2", priority=0, length=30)
    assert queue.least_urgent().request_id == "b1"


def test_a_newcomer_preempts_one_of_many_but_never_a_tenants_last():
    queue = turns()
    flood = start(queue, "a1", "a2", "a3")
    queue.add(request("b1"))
    assert queue.displaced_by(queue.waiting[0]) is flood[-1]
    for one in flood[1:]:
        queue.remove(one, running=True)
    assert queue.displaced_by(queue.waiting[0]) is None


def test_no_account_preempts_one_that_was_served_less_or_would_then_have_fewer():
    queue = turns()
    start(queue, "a1", "a2", "a3", length=1)
    start(queue, "b0", length=99)
    queue.add(request("b1"))
    assert queue.displaced_by(queue.waiting[0]) is None  # served more
    queue.charge(queue.running[0], 500, 0)
    victim = queue.displaced_by(queue.waiting[0])
    assert victim.request_id == "a3"
    queue.remove(victim, running=True)
    assert queue.displaced_by(queue.waiting[0]) is None  # two against one


def test_an_account_with_running_sequences_waits_until_it_is_behind_by_the_recompute_cost():
    queue = turns()
    [own] = start(queue, "b1", length=10)
    queue.add(request("b2"))
    flood = start(queue, "a1", "a2", "a3", "a4", length=10)
    flood[-1].num_computed_tokens = 40
    assert counter(queue, "a") - counter(queue, "b") == 40
    assert queue.displaced_by(queue.waiting[0]) is None
    queue.charge(flood[0], 1, 0)
    assert queue.displaced_by(queue.waiting[0]) is flood[-1]
    queue.charge(own, 50, 0)
    assert queue.displaced_by(queue.waiting[0]) is None


def test_a_tenant_is_behind_one_that_was_served_more_and_runs_more():
    queue = turns()
    flood = start(queue, "a1", "a2", "a3", length=10)
    queue.add(request("a4"))
    queue.add(request("b1"))
    queue.charge(flood[0], 50, 0)
    newcomer = queue.waiting[0]
    assert queue.is_behind(newcomer)
    assert not queue.is_behind(queue.waiting[1])
    queue.start(newcomer, 10)
    newcomer.status = Status.RUNNING
    assert queue.is_behind(newcomer)  # its prompt continues as it began
    queue.remove(flood[-1], running=True)
    assert queue.is_behind(newcomer)
    queue.remove(queue.waiting[0], running=False)
    assert not queue.is_behind(newcomer)  # no account floods
    queue.add(request("a5"))
    assert queue.is_behind(newcomer)
    queue.remove(flood[-2], running=True)
    assert not queue.is_behind(newcomer)


def test_orders_compare_as_accounts_stand_and_with_infinities():
    queue = turns()
    a, b = request("a"), request("b")
    for one in (a, b):
        queue.add(one)
    assert a.order < b.order
    queue.start(a, 10)
    assert b.order < a.order
    for order in (a.order, b.order):
        assert (-math.inf, -math.inf) < order < (math.inf, math.inf)
        assert not order >= (math.inf, math.inf)


def test_idle_tenants_are_forgotten_without_gaining_by_it():
    queue = turns()
    for index in range(1000):
        one = request(f"{chr(1000 + index)}")
        queue.add(one)
        queue.start(one, 10)
        queue.remove(one, running=True)
    assert len(queue._accounts) < 200
    before = queue._last_left.counter
    queue.add(request(chr(1000)))
    assert counter(queue, chr(1000)) == before
    queue.check_integrity()


def scheduler(num_blocks=64, limits=None, **config):
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "policy": "fair"} | config
    pool = BlockPool(num_blocks)
    return Scheduler(SchedulerConfig(fair=PRICES, **values), pool, PrefixCache(pool, 4), drafts=limits)


def step(one):
    plan = one.schedule()
    one.commit(plan, StepResult([RowResult([7] if row.samples else []) for row in plan.rows]))
    one.check_integrity()
    return plan


def planned(plan):
    return {row.request.request_id: row.num_tokens for row in plan.rows}


def test_a_quiet_tenant_gets_its_first_token_at_once_though_all_seats_are_taken():
    one = scheduler()
    for index in range(50):
        one.add(request(f"a{index}", 2))
    for _ in range(5):
        step(one)
    one.add(request("b", 3))
    assert planned(step(one))["b"] == 3
    assert one.num_running == 4
    assert one.num_preemptions == 1


def test_prompts_are_throttled_for_decodes_but_not_in_a_flood():
    one = scheduler(
        num_blocks=400, max_num_seqs=8, max_num_batched_tokens=200, max_model_len=256, prompt_pacing=True
    )  # fmt: skip
    for index in range(50):
        one.add(request(f"a{index}", 2))
    for _ in range(5):
        step(one)
    one.add(request("b1", 100))
    assert planned(step(one))["b1"] == 100
    one.abort([each.request_id for each in one.waiting])
    one.abort([each.request_id for each in one.running if each.tenant == "a"][:4])
    one.add(request("a99", 100))
    assert planned(step(one))["a99"] < 100


def test_a_queue_makes_prompts_impatient_unless_another_tenant_has_none():
    queue = turns()
    start(queue, "a1", "a2")
    for index in range(20):
        queue.add(request(f"a{index + 3}"))
    assert queue.num_wanted(2) == 20
    start(queue, "b1")
    assert queue.num_wanted(2) == 2
    queue.add(request("b2"))
    assert queue.num_wanted(2) == 2
    queue.add(request("b3"))
    assert queue.num_wanted(2) == 22
    for one in (*queue.waiting[:21],):
        queue.remove(one, running=False)
    assert queue.num_wanted(2) == 1


def test_a_quiet_tenant_gets_blocks_though_all_are_taken():
    one = scheduler(num_blocks=12)
    for index in range(4):
        one.add(request(f"a{index}", 8))
    for _ in range(3):
        step(one)
    one.add(request("b", 9))
    assert planned(step(one))["b"] >= 1


def test_prompts_are_charged_once_without_cached_tokens():
    one = scheduler(num_blocks=40)
    one.add(request("a1", 9, max_tokens=1))
    step(one)
    assert counter(one._queue, "a") == 9 + 2
    one.add(request("a2", 9))
    step(one)
    assert counter(one._queue, "a") == 11 + 1 + 2
    one._preempt(one.running[0], type("Step", (), {"drop": lambda self, request: None})())
    step(one)
    assert counter(one._queue, "a") == 14 + 2


def test_rejected_drafts_are_charged():
    """Two tenants get as many tokens; one's drafts are all wrong, so the other one is next."""
    one = scheduler(limits=DraftLimits(3), max_num_seqs=2)
    for name in ("a1", "b1", "a2", "b2"):
        one.add(request(name, 4))
    for _ in range(2):
        plan = one.schedule()
        one.commit(plan, StepResult([RowResult([7]) for _ in plan.rows]))
        for row in plan.rows:
            row.request.drafts = Drafts([7] * 3) if row.request.tenant == "a" else NO_DRAFTS
    assert {row.request.tenant: row.num_drafts for row in plan.rows} == {"a": 3, "b": 0}
    assert names(one.waiting) == ["b2", "a2"]
    assert counter(one._queue, "a") - counter(one._queue, "b") == 3 * PRICES.rejected_draft_cost


def test_a_waiting_prompt_comes_before_the_running_prompt_of_one_served_more():
    one = scheduler()
    one.add(request("a1", 60))
    step(one)
    one.add(request("b1", 10))
    assert planned(step(one)) == {"b1": 10, "a1": 6}


def test_a_long_prompt_does_not_stop_decodes():
    one = scheduler(max_num_batched_tokens=8)
    one.add(request("a1", 2))
    step(one)
    one.add(request("b1", 60))
    for _ in range(4):
        assert planned(step(one)) == {"a1": 1, "b1": 7}


@pytest.mark.parametrize("option", ["fair_prompt_cost", "fair_output_cost", "fair_rejected_draft_cost"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "2", True])
def test_invalid_costs_are_refused(option, value):
    with pytest.raises(InvalidRequestError) as caught:
        check_args(EngineArgs(scheduling_policy="fair", **{option: value}))
    assert caught.value.param == option


def test_output_cannot_be_free():
    check_args(EngineArgs(fair_prompt_cost=0, fair_rejected_draft_cost=0))
    with pytest.raises(InvalidRequestError, match="fair_output_cost"):
        check_args(EngineArgs(fair_output_cost=0))
