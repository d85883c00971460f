"""Bounds of the fair policy, on the real scheduler with a simulated device and generated workloads.

Service is counted from the scheduler's plans and deltas, never read from its counters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.config import FairConfig, SchedulerConfig
from outrider.platform.core.request import Drafts, Request, Status
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.scheduler import DraftLimits, Scheduler

pytestmark = pytest.mark.slow

BLOCK = 4
TENANTS = "abcd"


@dataclass(frozen=True)
class Setup:
    """A machine, and its tenants' requests."""

    weights: tuple[float, ...]
    prices: FairConfig
    num_seqs: int
    num_blocks: int
    budget: int
    num_drafts: int
    seed: int
    longest_prompt: int
    longest_output: int

    @property
    def bound(self) -> float:
        """U of the paper (equation 1), before weights: max(w_p * L, w_q * M)."""
        output_cost = self.prices.output_cost + self.num_drafts * self.prices.rejected_draft_cost
        return max(self.prices.prompt_cost * self.longest_prompt, output_cost * self.num_blocks * BLOCK)


costs = st.sampled_from([0.0, 0.5, 1.0, 3.0])
setups = st.builds(
    Setup,
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0, 5.0]), min_size=2, max_size=4).map(tuple),
    prices=st.builds(
        FairConfig,
        prompt_cost=st.sampled_from([0.0, 0.5, 1.0]),
        output_cost=st.sampled_from([1.0, 2.0, 3.0]),
        rejected_draft_cost=costs,
    ),
    num_seqs=st.sampled_from([1, 2, 5, 8]),
    num_blocks=st.integers(12, 60),
    budget=st.integers(3, 40),
    num_drafts=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 10**6),
    longest_prompt=st.integers(1, 30),
    longest_output=st.integers(1, 15),
)


@dataclass
class Run:
    """A scheduler that is stepped, and the service of every tenant at each moment: [(services, queued), ...]."""

    setup: Setup
    scheduler: Scheduler = field(init=False)
    moments: list[tuple[dict[str, float], set[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        setup = self.setup
        config = SchedulerConfig(
            max_num_seqs=setup.num_seqs, max_num_batched_tokens=setup.budget, max_model_len=48, policy="fair",
            fair=setup.prices,
        )  # fmt: skip
        pool = BlockPool(setup.num_blocks)
        limits = DraftLimits(setup.num_drafts, extra_slots=setup.seed % 2 == 0)
        self.scheduler = Scheduler(config, pool, PrefixCache(pool, BLOCK), (), limits)
        self.weights = dict(zip(TENANTS, setup.weights, strict=False))
        self.services = dict.fromkeys(self.weights, 0.0)
        self.random = random.Random(setup.seed)
        self.num_added = 0
        self.started: set[str] = set()

    def add(self, tenant: str) -> None:
        prompt = [self.random.randrange(3)] * self.random.randint(1, self.setup.longest_prompt)
        params = SamplingParams(max_tokens=self.random.randint(1, self.setup.longest_output), temperature=0)
        name, weight, priority = f"{tenant}{self.num_added}", self.weights[tenant], self.random.randint(0, 2)
        request = Request(name, prompt, len(prompt), params, 0, tenant=tenant, weight=weight, priority=priority)
        self.scheduler.add(request)
        self.num_added += 1

    def step(self) -> None:
        plan = self.scheduler.schedule()
        for row in plan.rows:
            if row.request.request_id not in self.started:
                self.started.add(row.request.request_id)
                self.serve(row.request, self.setup.prices.prompt_cost * row.request.num_prompt_tokens)
        self.note()
        results = []
        for row in plan.rows:
            accepted = self.random.randint(0, row.num_drafts)
            results.append(RowResult([1] * (accepted + 1), accepted) if row.samples else RowResult([]))
        rejected = {
            row.request.request_id: row.num_drafts - got.num_accepted
            for row, got in zip(plan.rows, results, strict=True)
        }
        requests = {row.request.request_id: row.request for row in plan.rows}
        for delta in self.scheduler.commit(plan, StepResult(results)):
            cost = self.setup.prices.output_cost * len(delta.token_ids)
            cost += self.setup.prices.rejected_draft_cost * rejected[delta.request_id]
            self.serve(requests[delta.request_id], cost)
        for row in plan.rows:
            if row.samples and row.request.status is Status.RUNNING:
                row.request.drafts = Drafts([1] * self.random.randint(0, row.max_new_drafts))
        self.note()
        self.scheduler.check_integrity()

    def serve(self, request: Request, cost: float) -> None:
        self.services[request.tenant] += cost / self.weights[request.tenant]

    def note(self) -> None:
        self.moments.append((dict(self.services), {request.tenant for request in self.scheduler.waiting}))

    def bound_of(self, *tenants: str) -> float:
        return self.setup.bound / min(self.weights[tenant] for tenant in tenants)


def keep_queued(run: Run, tenants: str, number: int) -> None:
    """Let each of these tenants have at least `number` requests queued."""
    queued = [request.tenant for request in run.scheduler.waiting]
    for tenant in tenants:
        for _ in range(number - queued.count(tenant)):
            run.add(tenant)


def come_and_go(run: Run, num_steps: int = 80) -> None:
    """Tenants flood, trickle and are idle, each in phases of its own; then the queues are drained."""
    rates = dict.fromkeys(run.weights, 0.0)
    for _ in range(num_steps):
        for tenant in run.weights:
            if run.random.random() < 0.1:
                rates[tenant] = run.random.choice([0.0, 0.1, 3.0])
            for _ in range(int(rates[tenant] + run.random.random())):
                run.add(tenant)
        run.step()
    while run.scheduler.has_work():
        run.step()


def most_ahead(run: Run, one: str, other: str, both_queued: bool) -> float:
    """The most by which `other` was served more than `one` over any interval in which `one` had requests queued all
    the time, and `other` too if `both_queued`."""
    most, least = 0.0, None
    for services, queued in run.moments:
        ahead = services[other] - services[one]
        if one not in queued or (both_queued and other not in queued):
            least = None
            continue
        least = ahead if least is None else min(least, ahead)
        most = max(most, ahead - least)
    return most


@settings(max_examples=30)
@given(setups)
def test_queued_tenants_get_equal_service_and_no_less_than_others(setup):
    """Theorem 4.4: over any interval in which two have some queued, they are served the same within 2 U. Theorem 4.6:
    no other, whatever it does, is served more than one that has some queued, within 4 U."""
    run = Run(setup)
    come_and_go(run)
    for one, other in permutations(run.weights, 2):
        bound = run.bound_of(one, other) + 1e-6
        assert most_ahead(run, one, other, both_queued=True) <= 2 * bound
        assert most_ahead(run, one, other, both_queued=False) <= 4 * bound


@settings(max_examples=30)
@given(setups)
def test_nothing_waits_while_there_is_room(setup):
    """After every step something is used up: the budget, the seats, or the blocks that the next one needs."""
    run = Run(setup)
    scheduler, plan_step = run.scheduler, run.scheduler.schedule

    def schedule():
        before = scheduler.num_preemptions
        plan = plan_step()
        if plan.num_tokens == setup.budget or scheduler.num_preemptions > before:
            return plan
        planned = {row.request for row in plan.rows}
        assert planned == set(scheduler.running)
        assert all(row.samples for row in plan.rows), "a prompt was cut short"
        if scheduler.num_waiting and scheduler.num_running < setup.num_seqs:
            following = next(scheduler._queue.candidates())
            assert -(-(len(following.tokens) + 1) // BLOCK) > scheduler.pool.num_free
        return plan

    scheduler.schedule = schedule
    come_and_go(run, 60)
