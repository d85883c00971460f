"""Numbers of captures and of passes that are launched kernel by kernel, in an engine that serves for long."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton")

from outrider import LoRARequest, SamplingParams, StructuredOutputsParams
from outrider.kernels.graphs import Captured, Work
from outrider.kernels.lora.device_rows import TritonRows
from outrider.lora.device import arena, batching, vectors
from outrider.models import attention
from outrider.models.attention import AttentionBackend, AttentionSpec
from outrider.models.demo import demo_adapters, demo_eagle3_path
from outrider.models.pass_graphs import PassGraphs
from outrider.platform.core.batch import RowPlan
from outrider.platform.core.config import EngineArgs, EngineConfig
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine import setup
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.runner import graphs as runner_graphs
from outrider.platform.engine.runner.graphs import pass_limits
from outrider.platform.engine.runner.model_runner import ModelRunner
from outrider.spec_decode.control.policy import SpeculationPolicy

STEPS, ROWS, DRAFTS = 600, 64, 4
EOS = 2
"""Token that ends an answer of the demo model."""
GRAMMARS = ({"choice": ["a very long answer without any choice", "no"]}, {"regex": "[ab]{3,20}"}, {"json": {}})


class StillGraphs:
    """A GraphBackend whose replays give the outputs that were captured."""

    def capture(self, work: Work) -> Captured:
        """See GraphBackend."""
        outputs = tuple(output.clone() for output in work())
        first = [output.clone() for output in outputs]

        def replay() -> None:
            for output, value in zip(outputs, first, strict=True):
                output.copy_(value)

        return Captured(outputs, replay)


class IdlePlan:
    """Plan of attention that reads no keys."""

    def refill(self, rows: Any) -> None:
        """Rows make no difference."""

    def settle(self, overshoot: Tensor, positions: Tensor) -> None:
        """Positions make no difference."""

    def advance(self, first: Tensor, left: Tensor, positions: Tensor, step: int) -> None:
        """Positions make no difference."""

    def attend_qkv(self, qkv: Tensor, rotation: Any, norm: Any, kv: Any, window: Any, sinks: Any = None) -> Tensor:
        """Nothing is found."""
        return qkv.new_zeros(len(qkv), self.width)

    def __init__(self, width: int) -> None:
        self.width = width


class IdleAttention(AttentionBackend):
    """Attention whose launches can be captured, and that reads no keys."""

    max_queries = 16

    def __init__(self, spec: AttentionSpec) -> None:
        self._width = spec.num_heads * spec.head_dim

    def plan(self, rows: Any, positions: Any, block_size: int) -> IdlePlan:
        """See AttentionBackend."""
        return IdlePlan(self._width)

    def max_long_tiles(self, num_tokens: int) -> int:
        """None."""
        return 0

    def reserve(self, *args: Any) -> IdlePlan:
        """See ReplayableAttention."""
        return IdlePlan(self._width)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[PassGraphs]:
    """The graphs of engines that are made as on a GPU."""
    made: list[PassGraphs] = []

    def make(config: EngineConfig) -> PassGraphs:
        made.append(PassGraphs(StillGraphs(), pass_limits(config)))
        return made[-1]

    monkeypatch.setattr(setup, "make_graphs", make)
    monkeypatch.setattr(attention, "best_backend", lambda spec, *, batch_invariant: IdleAttention)
    for module in (arena, batching, vectors):
        monkeypatch.setattr(module, "is_grouped", lambda dtype, device: True)
    for name in ("shrink", "add"):
        monkeypatch.setattr(TritonRows, name, lambda *args: None)
    return made


def make_engine(**options: Any) -> EngineCore:
    """An engine of the demo model with its adapters and its EAGLE-3 head."""
    speculative = {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": DRAFTS}
    return EngineCore(
        EngineArgs(
            device="cpu", dtype="float32", max_num_seqs=ROWS, enable_lora=True, max_loras=4, max_lora_rank=64,
            max_num_batched_tokens=1024, max_model_len=512, num_gpu_blocks_override=1200, async_scheduling=False,
            speculative_config=speculative | {"adaptive": True}, seed=0, **options,
        )
    )  # fmt: skip


def add_requests(engine: EngineCore, rng: random.Random, adapters: Sequence[LoRARequest], first: int) -> int:
    """Add requests until there are about as many as rows; returns the number of all so far."""
    while engine.scheduler.num_running + engine.scheduler.num_waiting < rng.choice((1, 3, 8, 20, 40, ROWS)):
        forced = StructuredOutputsParams(**rng.choice(GRAMMARS)) if rng.random() < 0.2 else None
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.8)), max_tokens=rng.randint(2, 60), ignore_eos=forced is None,
            structured_outputs=forced,
        )  # fmt: skip
        prompt = [rng.randrange(100, 400) for _ in range(rng.choice((3, 20, 60, 300)))]
        lora = rng.choice([None, *adapters])
        engine.add_request(EngineRequest(str(first), prompt, params, lora=lora, eos_token_ids=(EOS,)))
        first += 1
    return first


def choose_at_random(rng: random.Random) -> Callable[..., None]:
    """A choice of numbers of drafts that changes from row to row and from step to step."""

    def choose(policy: SpeculationPolicy, rows: Sequence[RowPlan], *, requests_wait: bool = False) -> None:
        most = rng.choice((0, 1, 2, DRAFTS))
        for row in rows:
            row.drafter, row.max_new_drafts = 0, min(rng.randint(0, most), row.max_new_drafts)

    return choose


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_captured_while_requests_are_served(
    graphs: list[PassGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    monkeypatch.setattr(runner_graphs, "SECONDS", math.inf)  # the interpreter is slow
    engine = make_engine()
    (made,) = graphs
    captured = made.num_captured
    assert 40 < captured <= 60
    adapters = [LoRARequest(name, path=str(path)) for name, path in demo_adapters().items()]
    monkeypatch.setattr(SpeculationPolicy, "choose", choose_at_random(rng))
    shapes: set[tuple[int, ...]] = set()
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, plan: Any, *before: Any) -> Any:
        shapes.add(tuple(row.num_tokens for row in plan.rows))
        return launch(runner, plan, *before)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    replayed, single, number = made.num_replayed, made.num_single, 0
    for _ in range(STEPS):
        number = add_requests(engine, rng, adapters, number)
        for delta in engine.step():
            assert delta.error is None, delta.error
    engine.shutdown()
    assert len(shapes) > STEPS // 2
    assert any(max(shape) > 1 + DRAFTS for shape in shapes)
    assert made.num_captured == captured
    assert made.num_single == single
    assert made.num_replayed - replayed > STEPS
