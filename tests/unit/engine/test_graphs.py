"""Which engines capture graphs, and what is captured before the first request."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.models.pass_graphs import MAX_GRAPHS, MAX_TOKENS
from outrider.platform.core.batch import RowResult, StepPlan, StepResult
from outrider.platform.core.config import EngineArgs, EngineConfig, Hardware, ModelFacts, SchedulerConfig, resolve
from outrider.platform.core.errors import ErrorInfo
from outrider.platform.core.request import Drafts
from outrider.platform.engine.memory.block_pool import BlockPool
from outrider.platform.engine.memory.prefix_cache import PrefixCache
from outrider.platform.engine.queue.scheduler import DraftLimits, Scheduler
from outrider.platform.engine.runner import graphs
from outrider.platform.engine.runner.graphs import capture_ahead, make_graphs

FACTS = ModelFacts(
    path="/model", architecture="LlamaForCausalLM", dtype="bfloat16", vocab_size=100, max_position_embeddings=4096,
    kv_bytes_per_token=64,
)  # fmt: skip
MACHINE = Hardware(device="cuda", free_memory_bytes=1 << 34, total_memory_bytes=1 << 34)


def config(**options: object) -> EngineConfig:
    return resolve(EngineArgs(**options), FACTS, MACHINE)  # type: ignore[arg-type]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Where graphs would be captured, without a device."""
    devices: list[torch.device] = []
    monkeypatch.setattr(graphs, "CudaGraphs", lambda device: devices.append(device) or device)
    return devices


def test_graphs_are_a_gpus_and_can_be_switched_off(cuda: list[torch.device]) -> None:
    assert make_graphs(config(enforce_eager=True)) is None
    assert make_graphs(dataclasses.replace(config(), device="cpu")) is None
    assert make_graphs(dataclasses.replace(config(), batch_invariant=True)) is None
    assert cuda == []
    assert make_graphs(config()) is not None
    assert cuda == [torch.device("cuda")]


def test_graphs_are_sized_for_what_may_come(cuda: list[torch.device]) -> None:
    small = make_graphs(config(max_num_seqs=5, max_model_len=1000))
    assert small is not None
    assert small.limits == (5, 1000, MAX_TOKENS, MAX_GRAPHS, 6)
    drafting = make_graphs(config(max_num_seqs=5, speculative_config={"method": "ngram", "num_speculative_tokens": 4}))
    assert drafting is not None
    assert drafting.limits.max_verified == 6 * 6
    large = make_graphs(config(max_num_seqs=1024))
    assert large is not None
    assert large.limits.max_tokens == MAX_TOKENS


class Runner:
    """Answers every step, drafts included; remembers the rows of those without prompts, and of the others."""

    def __init__(self, num_drafts: int, broken: bool = False) -> None:
        self.num_drafts, self.broken = num_drafts, broken
        self.steps: list[list[int]] = []
        self.prompts: list[list[int]] = []

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        if all(row.samples and row.num_tokens == 1 + row.num_drafts for row in plan.rows):
            self.steps.append([row.num_tokens for row in plan.rows])
        else:
            self.prompts.append([row.num_tokens for row in plan.rows])
        if self.broken:
            return StepResult([RowResult([], error=ErrorInfo("InternalServerError", "broken")) for _ in plan.rows])
        return StepResult([RowResult([7] if row.samples else []) for row in plan.rows])

    def draft(self, plan: StepPlan, result: StepResult) -> float:
        for row in plan.rows:
            row.request.drafts = Drafts([7] * min(self.num_drafts, row.max_new_drafts))
        return 0.0


def make_scheduler(
    num_seqs: int,
    num_drafts: int = 0,
    num_blocks: int = 512,
    max_model_len: int = 256,
    max_num_batched_tokens: int = 64,
) -> Scheduler:
    pool = BlockPool(num_blocks)
    limits = SchedulerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len, policy="fcfs"
    )
    return Scheduler(limits, pool, PrefixCache(pool, 16), drafts=DraftLimits(num_drafts))


def done(scheduler: Scheduler) -> bool:
    """Whether nothing is left of the dummies."""
    scheduler.check_integrity()
    return not scheduler.has_work() and scheduler.pool.num_free == scheduler.pool.num_blocks


def test_every_size_comes_the_largest_first() -> None:
    scheduler, runner = make_scheduler(10), Runner(0)
    capture_ahead(scheduler, runner, 0)  # type: ignore[arg-type]
    assert [len(rows) for rows in runner.steps] == [size for size in (10, 8, 6, 4, 3, 2, 1) for _ in range(2)]
    assert done(scheduler)


def test_prompts_come_beside_requests_that_decode() -> None:
    scheduler, runner = make_scheduler(20, max_num_batched_tokens=1000), Runner(0)
    capture_ahead(scheduler, runner, 0)  # type: ignore[arg-type]
    beside = [(len(rows), sum(rows)) for rows in runner.prompts if max(rows) > 16]
    assert beside == [(rows, tokens) for rows in (16, 4, 1) for tokens in (128, 64)]  # of at most 256
    assert done(scheduler)


def test_drafters_verify_too() -> None:
    scheduler, runner = make_scheduler(3, num_drafts=2), Runner(2)
    capture_ahead(scheduler, runner, 2)  # type: ignore[arg-type]
    assert {(len(rows), max(rows)) for rows in runner.steps} == {(3, 3), (2, 3), (1, 3)}
    assert done(scheduler)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"num_blocks": 8}, {4, 3, 2, 1}),  # two blocks each
        ({"max_model_len": 20}, set()),
    ],
)
def test_only_what_fits(options: dict[str, int], sizes: set[int]) -> None:
    scheduler, runner = make_scheduler(8, **options), Runner(0)
    capture_ahead(scheduler, runner, 0)  # type: ignore[arg-type]
    assert {len(rows) for rows in runner.steps} == sizes
    assert scheduler.num_preemptions == 0
    assert done(scheduler)


def test_it_ends_in_time_and_when_the_model_is_broken() -> None:
    clock = iter(range(1000))
    scheduler, runner = make_scheduler(8), Runner(0)
    capture_ahead(scheduler, runner, 0, seconds=4.0, clock=lambda: next(clock))  # type: ignore[arg-type]
    assert len(runner.steps) <= 4
    assert done(scheduler)
    broken = Runner(0, broken=True)
    capture_ahead(scheduler, broken, 0)  # type: ignore[arg-type]
    assert done(scheduler)
