"""Two ranks whose passes are captured, sums over ranks included, write the text of one process without graphs."""

from __future__ import annotations

from pathlib import Path
from threading import RLock
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton")

from outrider import LoRARequest, SamplingParams
from outrider.models.pass_graphs import PassGraphs
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.executor import rank_process
from outrider.platform.engine.executor.collectives import ProcessRanks

from ..thread_ranks import ranks_as_threads
from .call_tape import CallTape, record
from .test_graphs_engine import files, graphs  # noqa: F401  (fixtures)


@pytest.fixture
def tapes(device: str, monkeypatch: pytest.MonkeyPatch) -> list[CallTape]:
    """The graphs of the rank that is a thread of this process, as those of rank 0 are in `graphs`."""
    if device == "cuda":
        pytest.skip("NCCL wants a GPU for each rank")
    from triton.runtime.interpreter import GridExecutor

    made: list[CallTape] = []
    ranks_as_threads(monkeypatch)
    monkeypatch.setattr(rank_process, "CudaGraphs", lambda device: made.append(CallTape()) or made[-1])
    call, turn = GridExecutor.__call__, RLock()

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        with turn:  # the interpreter has one place for the number of the block that it computes
            call(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    add, gather = ProcessRanks.sum, ProcessRanks.gather

    def recorded_sum(ranks: ProcessRanks, x: Tensor) -> Tensor:
        record(lambda: add(ranks, x))
        return x

    def recorded_gather(ranks: ProcessRanks, x: Tensor) -> Tensor:
        found = x.new_empty(ranks.size, *x.shape)
        record(lambda: found.copy_(gather(ranks, x)))
        return found

    monkeypatch.setattr(ProcessRanks, "sum", recorded_sum)
    monkeypatch.setattr(ProcessRanks, "gather", recorded_gather)
    return made


def run(files: dict[str, Path], method: str | None = None, **options: Any) -> list[list[int]]:  # noqa: F811
    """Tokens of requests of several lengths, two of them with adapters."""
    speculative = None
    if method is not None:
        speculative = {"method": method, "num_speculative_tokens": 2, "model": str(files[method])}
    engine = EngineCore(
        EngineArgs(
            model=str(files["target"]), device="cpu", dtype="float32", load_format="dummy", max_model_len=64,
            max_num_seqs=4, num_gpu_blocks_override=40, enable_lora=True, max_loras=2, max_lora_rank=20, seed=0,
            speculative_config=speculative, async_scheduling=False, **options,
        )
    )  # fmt: skip
    adapters = [LoRARequest(name, path=str(files[name])) for name in ("narrow", "wide")]
    for lora in adapters:
        engine.adapters.load(lora, pinned=True)
    outputs: dict[str, list[int]] = {}
    prompts = [[5, 6, 7, 8] * 2, [9, 3, 9], [40, 41, 40]]
    for index, (prompt, lora) in enumerate(zip(prompts, [adapters[0], None, adapters[1]], strict=True)):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.add_request(EngineRequest(str(index), prompt, params, lora=lora))
        outputs[str(index)] = []
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            outputs[delta.request_id] += delta.token_ids
    engine.check_integrity()
    engine.shutdown()
    return list(outputs.values())


def test_every_rank_replays_what_rank_0_replays(
    files: dict[str, Path],  # noqa: F811
    graphs: PassGraphs,  # noqa: F811
    tapes: list[CallTape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a drafter, whose embeddings and head all ranks compute between the graphs."""
    found = run(files, "eagle3", tensor_parallel_size=2)
    assert graphs.num_replayed > graphs.num_captured > 1
    (other,), first = tapes, graphs.backend
    assert isinstance(first, CallTape)
    assert len(other.num_calls) == len(first.num_calls) == graphs.num_captured
    assert min(other.num_calls) > 20, "whole passes"
    monkeypatch.undo()
    assert found == run(files)  # without ranks, graphs and drafts
