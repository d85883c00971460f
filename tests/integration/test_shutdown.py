"""An engine frees all memory at shutdown, even if it is still referenced."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider import LLM, LoRARequest, SamplingParams
from outrider.kernels.graphs import Captured, Work
from outrider.models.demo import demo_adapters, demo_eagle3_path
from outrider.models.pass_graphs import PassGraphs
from outrider.platform.core.errors import ShuttingDownError
from outrider.platform.engine import setup
from outrider.platform.engine.runner.graphs import pass_limits

OPTIONS: dict[str, Any] = {
    **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, "max_num_seqs": 4, "max_model_len": 256},
    "speculative_config": {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 2},
}
CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("Hello", use_tqdm=False),
    "add_request": lambda llm: llm.llm_engine.add_request("0", "Hello"),
    "step": lambda llm: llm.llm_engine.step(),
    "stats": lambda llm: llm.stats(),
    "get_metrics": lambda llm: llm.get_metrics(),
    "sleep": lambda llm: llm.sleep(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "adapters": lambda llm: llm.list_loras(),
    "profiler": lambda llm: llm.llm_engine.engine_core.start_profile("/nowhere", "x"),
    "engine": lambda llm: llm.llm_engine.engine_core.has_work(),
}


class NoGraphs:
    """A GraphBackend that keeps what it was given, as a recording does."""

    def capture(self, work: Work) -> Captured:
        """See GraphBackend."""
        return Captured(work(), lambda: work() and None)


def device_bytes(device: str) -> int:
    """Bytes of all tensors on the device; on a CPU of those of 4 kB or more that Python knows."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and not found.is_mkldnn]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for size in storages.values() if size >= 4096)


def used(llm: LLM) -> str:
    name, path = next(iter(demo_adapters().items()))
    (output,) = llm.generate(
        "Hello", SamplingParams(max_tokens=8, temperature=0), LoRARequest(name, path=str(path)), use_tqdm=False
    )
    return output.outputs[0].text


@pytest.mark.usefixtures("engines_collect")
def test_nothing_of_an_engine_outlives_its_shutdown(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, KV, adapters' rows, the drafter and the holder of graphs."""
    if device != "cuda":
        monkeypatch.setattr(setup, "make_graphs", lambda config: PassGraphs(NoGraphs(), pass_limits(config)))
    before = device_bytes(device)
    llm = LLM(device=device, **OPTIONS)
    text = used(llm)
    engine = llm.llm_engine.engine_core
    runner = engine._runner
    held = (runner, runner.model, runner._drafter, engine._adapters, engine.scheduler)
    alive = [weakref.ref(part) for part in (*held, *(part for layer in engine._kv for part in layer))]
    del engine, runner, held
    while_serving = device_bytes(device)
    llm.shutdown()
    assert [ref() for ref in alive if ref() is not None] == []
    assert while_serving - before > 10 << 20
    assert device_bytes(device) - before < 1 << 20
    llm.shutdown()
    with LLM(device=device, **OPTIONS) as other:
        assert used(other) == text


@pytest.mark.parametrize("call", CALLS)
def test_calls_after_shutdown_raise_shutting_down(closed: LLM, call: str) -> None:
    with pytest.raises(ShuttingDownError, match="shut down"):
        CALLS[call](closed)


@pytest.fixture(scope="module")
def closed() -> LLM:
    llm = LLM(max_num_seqs=2, max_model_len=64, device="cpu", enable_lora=True)
    llm.shutdown()
    return llm


def test_a_part_that_cannot_close_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_num_seqs=2, max_model_len=64, device="cpu")
    engine = llm.llm_engine.engine_core
    model = weakref.ref(engine.model)

    def fail() -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(engine._profiler, "close", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        llm.shutdown()
    gc.collect()
    assert model() is None
