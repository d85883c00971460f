"""Which engines capture graphs, and of what size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.models.pass_graphs import PassGraphs
from outrider.platform.core.config import EngineArgs, EngineConfig, Hardware, ModelFacts, resolve
from outrider.platform.engine.runner import graphs
from outrider.platform.engine.runner.graphs import make_graphs

FACTS = ModelFacts(
    path="/model", architecture="LlamaForCausalLM", dtype="bfloat16", vocab_size=100, max_position_embeddings=4096,
    kv_bytes_per_token=64,
)  # fmt: skip
MACHINE = Hardware(device="cuda", free_memory_bytes=1 << 34, total_memory_bytes=1 << 34)
EAGLE = {"method": "eagle3", "model": "head", "num_speculative_tokens": 4}


def config(**options: object) -> EngineConfig:
    return resolve(EngineArgs(**options), FACTS, MACHINE)  # type: ignore[arg-type]


def made(**options: object) -> PassGraphs:
    graphs = make_graphs(config(**options))
    assert graphs is not None
    return graphs


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Settings under which graphs are captured, without a device."""
    devices: list[torch.device] = []
    monkeypatch.setattr(graphs, "CudaGraphs", lambda device: devices.append(device) or device)
    return devices


def test_graphs_are_captured_on_a_gpu_only_and_can_be_switched_off(cuda: list[torch.device]) -> None:
    assert make_graphs(config(enforce_eager=True)) is None
    assert make_graphs(dataclasses.replace(config(), device="cpu")) is None
    assert cuda == []
    assert make_graphs(config()) is not None
    assert make_graphs(config(batch_invariant=True)) is not None
    assert cuda == [torch.device("cuda")] * 2


def test_graphs_are_sized_for_the_largest_steps(cuda: list[torch.device]) -> None:
    small = made(max_num_seqs=5, max_model_len=1000)
    assert (small.limits.max_rows, small.limits.max_positions) == (5, 1000)
    assert small.grid.max_tokens == 5
    assert made(max_num_seqs=5, speculative_config=EAGLE).grid.max_tokens == 5 * 5
    assert made(max_num_seqs=1024).grid.max_tokens == 1024


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 1),
        ({"enable_lora": True}, 2),
        ({"enable_lora": True, "speculative_config": EAGLE}, 3),
        ({"enable_lora": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, 2),
    ],
)
def test_all_variants_of_a_shape_share_the_number_of_graphs(
    options: dict[str, object], each: int, cuda: list[torch.device]
) -> None:
    """With adapters and without, and a drafter with a network."""
    graphs = made(**options)
    assert graphs.limits.graphs_per_shape == each
    assert each * (len(graphs.grid.decodes) + len(graphs.grid.prompts)) <= graphs.limits.max_graphs == 60
