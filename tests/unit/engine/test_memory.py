"""An engine's allocations at start stay within its share of a GPU's memory, including those after the KV cache."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models import pass_chain
from outrider.models.pass_graphs import PassGraphs
from outrider.models.pass_grid import PassLimits
from outrider.platform.core import config, kv_size
from outrider.platform.core.config import EngineArgs, Hardware
from outrider.platform.engine import setup
from outrider.platform.engine.engine_core import EngineCore

VOCAB, HIDDEN = 2000, 32
SHAPE = {
    **{"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    **{"hidden_act": "silu", "dtype": "float32", "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB, "target_hidden_size": HIDDEN}
FILES = {
    "target": SHAPE | {"num_hidden_layers": 2},
    "draft_model": SHAPE | {"num_hidden_layers": 1},
    "eagle3": SHAPE | EAGLE3 | {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "medusa": {"medusa_num_heads": 2, "medusa_num_layers": 1},
}
TOTAL, SHARE = 20 << 20, 0.5
SMALL = 128 << 10
"""Uncounted memory: indices of captured passes, and such."""


class Meter:
    """The memory of a GPU, in which tensors take their bytes."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._before = set(self._alive())

    def _alive(self) -> dict[int, int]:
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and not item.is_mkldnn]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {s.data_ptr(): s.nbytes() for s in storages if s.nbytes() and s.data_ptr() not in self._before}

    @property
    def used(self) -> int:
        """Bytes."""
        return sum(self._alive().values())

    def hardware(self, device: str) -> Hardware:
        """Bytes that are free now."""
        return Hardware(device="cpu", free_memory_bytes=TOTAL - self.used, total_memory_bytes=TOTAL)


class NotCaptured:
    """Passes that all run without a graph."""

    def run(self, *args: Any) -> None:
        """There is none."""

    def loop(self, *args: Any) -> None:
        """There is none."""

    def clear(self) -> None:
        """Nothing is there."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    for name, values in FILES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    return {name: str(tmp_path / name) for name in FILES}


@pytest.mark.parametrize("method", [None, "draft_model", "eagle3", "medusa"])
def test_the_cache_gets_the_memory_that_buffers_leave(
    files: dict[str, str], method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, on_gpu = Meter(), kv_size.cache_memory
    monkeypatch.setattr(setup, "find_hardware", meter.hardware)
    monkeypatch.setattr(
        config, "cache_memory", lambda args, hardware: on_gpu(args, dataclasses.replace(hardware, device="cuda"))
    )
    monkeypatch.setattr(kv_size, "_ACTIVATION_RESERVE", 0)
    monkeypatch.setattr(kv_size, "_GRAPH_RESERVE", 0)
    graphs = PassGraphs(None, PassLimits(256, 128, 512, max_drafts=2))  # type: ignore[arg-type]  # nothing is captured
    monkeypatch.setattr(setup, "make_graphs", lambda config: graphs)
    monkeypatch.setattr(PassGraphs, "captures", lambda *args: True)
    monkeypatch.setattr(PassGraphs, "of", lambda *args: NotCaptured())
    monkeypatch.setattr(pass_chain, "PassChain", lambda *args, **options: NotCaptured())
    monkeypatch.setattr(setup, "capture_ahead", lambda *args, **options: None)
    speculative = None
    if method is not None:
        speculative = {"method": method, "model": files[method], "num_speculative_tokens": 2}
    engine = EngineCore(
        EngineArgs(
            model=files["target"], device="cpu", dtype="float32", load_format="dummy", max_model_len=128,
            max_num_seqs=256, gpu_memory_utilization=SHARE, speculative_config=speculative,
        )
    )  # fmt: skip
    used = meter.used
    assert engine.info.num_kv_blocks < 257 * 8, "memory is what limits it"
    assert SHARE * TOTAL - SMALL < used < SHARE * TOTAL + SMALL
    engine.shutdown()
