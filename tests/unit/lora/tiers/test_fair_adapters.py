"""Adapters under the fair policy, on the real scheduler: the order of accounts changes while requests wait for rows."""

import random

import pytest
import torch

from outrider.lora.manager import AdapterManager
from outrider.lora.tiers.starvation import AGING_SECONDS
from outrider.platform.core.batch import RowResult, StepResult
from outrider.platform.core.config import FairConfig, LoRAConfig, SchedulerConfig
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.request import Request
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.engine.features import PrefixNamespaces
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.scheduler import Scheduler

from ..conftest import make_linears
from ..test_manager_machine import StepLoader

STEP_SECONDS = 0.1


class Engine:
    """One place for adapters, and a clock of its own."""

    def __init__(self, folder, max_num_seqs, max_cpu_loras):
        self.now = 0.0
        config = LoRAConfig(max_loras=1, max_cpu_loras=max_cpu_loras, max_lora_rank=4)
        self.manager = AdapterManager(make_linears(), config, torch.float32, "cpu", clock=lambda: self.now)
        self.manager._transfers._threads = StepLoader()
        pool = BlockPool(400)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=64, policy="fair", fair=FairConfig()
            ),
            pool,
            PrefixCache(pool, 4),
            [self.manager, PrefixNamespaces(self.manager.namespace)],
        )
        self.paths = {name: folder(name) for name in "xyz"}
        self.num_added = 0
        self.finished = {}
        """Request -> when."""

    def add(self, tenant, adapter=None, num_tokens=3, num_prompt_tokens=4):
        lora = LoRARequest(adapter, path=self.paths[adapter]) if adapter is not None else None
        request = Request(
            f"{tenant}{self.num_added}", [self.num_added] * num_prompt_tokens, num_prompt_tokens,
            SamplingParams(max_tokens=num_tokens, temperature=0), 0, lora=lora, tenant=tenant,
        )  # fmt: skip
        self.num_added += 1
        self.manager.resolve(request)
        self.scheduler.add(request)
        return request

    def step(self):
        """As `EngineCore.step`; a transfer ends with it."""
        self.now += STEP_SECONDS
        plan = self.scheduler.schedule()
        results = [RowResult([1] if row.samples else []) for row in plan.rows]
        requests = {row.request.request_id: row.request for row in plan.rows}
        for delta in self.scheduler.commit(plan, StepResult(results)):
            assert delta.error is None
            if delta.finish_reason is not None:
                self.finished[requests[delta.request_id]] = self.now
        self.manager.wait(1)

    def check(self):
        self.scheduler.check_integrity()
        self.manager.check_integrity()


@pytest.fixture
def make_engine(folder):
    """Engines that are idle and whose books agree after the test."""
    made = []

    def make(max_num_seqs=2, max_cpu_loras=4):
        made.append(Engine(folder, max_num_seqs, max_cpu_loras))
        return made[-1]

    yield make
    for engine in made:
        engine.check()
        assert not engine.scheduler.has_work()
        engine.manager.close()


def test_two_tenants_with_one_adapter_slot_are_served_alike(make_engine):
    """Each has requests for an adapter of its own in every step: both are served, about the same."""
    engine = make_engine(max_num_seqs=4)
    added = {}
    for number in range(400):
        for tenant, adapter in (("a", "x"), ("b", "y")):
            if sum(request.tenant == tenant for request in engine.scheduler.waiting) < 4:
                added[engine.add(tenant, adapter, num_tokens=4)] = engine.now
        engine.step()
        if number % 20 == 0:
            engine.check()
    served = {tenant: sum(request.tenant == tenant for request in engine.finished) for tenant in "ab"}
    assert min(served.values()) > 0.5 * max(served.values())
    assert max(engine.now - since for request, since in added.items() if request not in engine.finished) < 15
    for _ in range(200):
        engine.step()


@pytest.mark.parametrize("max_cpu_loras", [1, 4])
def test_a_refused_adapter_is_retried_when_accounts_change_order(make_engine, max_cpu_loras):
    """b's adapter finds no room while c, who is served less, waits for the one that is there. c's requests without any
    adapter then cost it its place; when they end, b has waited too long for c's to start, and must be looked at."""
    engine = make_engine(max_cpu_loras=max_cpu_loras)
    engine.add("b", num_tokens=30)
    while engine.scheduler.has_work():
        engine.step()
    long = [engine.add("c", num_tokens=40, num_prompt_tokens=1) for _ in range(2)]
    engine.step()
    waiting = [engine.add("c", "x")]
    for _ in range(4):
        engine.step()
    waiting.append(engine.add("b", "y"))
    for _ in range(400):
        engine.step()
    assert all(request in engine.finished for request in (*long, *waiting))
    assert AGING_SECONDS < 40 * STEP_SECONDS


@pytest.mark.parametrize("seed", range(6))
def test_everybody_is_served_some_day(make_engine, seed):
    """Three tenants, three adapters and none, room for one, little host memory, aborts: nothing is left in the end."""
    chance = random.Random(seed)
    engine = make_engine(max_num_seqs=chance.choice([1, 2, 4]), max_cpu_loras=chance.choice([1, 2, 3]))
    for _ in range(150):
        for tenant in "abc":
            if chance.random() < 0.15:
                engine.add(tenant, chance.choice([None, None, "x", "y", "z"]), num_tokens=chance.choice([1, 3, 30]))
        if chance.random() < 0.05 and engine.scheduler.num_waiting:
            engine.scheduler.abort([chance.choice(engine.scheduler.waiting).request_id])
        engine.step()
        engine.check()
    for _ in range(3000):
        if not engine.scheduler.has_work():
            break
        engine.step()
