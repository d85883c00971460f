"""Two ranks whose passes are captured, sums over ranks included, write the text of one process without graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Event, RLock, get_ident
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton")

from outrider import LoRARequest, SamplingParams
from outrider.kernels.graphs import Captured, Work
from outrider.models.pass_graphs import PassGraphs
from outrider.models.pass_grid import make_grid
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import EngineDeadError
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.executor import collectives, rank_process
from outrider.platform.engine.executor.collectives import ProcessRanks

from ..thread_ranks import ranks_as_threads
from .call_tape import CallTape, _Recorder, record
from .test_graphs_engine import files, graphs  # noqa: F401  (fixtures)


@pytest.fixture
def tapes(
    device: str,
    graphs: PassGraphs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> list[CallTape]:
    """The graphs of the rank that is a thread of this process, as those of rank 0 are in `graphs`."""
    if device == "cuda":
        pytest.skip("NCCL wants a GPU for each rank")
    from triton.runtime.interpreter import GridExecutor

    made: list[CallTape] = []
    first = graphs.backend
    assert isinstance(first, CallTape)
    ranks_as_threads(monkeypatch)
    monkeypatch.setattr(
        rank_process, "CudaGraphs", lambda device: made.append(CallTape(lazily=first.lazily)) or made[-1]
    )
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


def run(
    files: dict[str, Path],  # noqa: F811
    method: str | None = None,
    names: tuple[str, ...] = ("narrow", "wide"),
    **options: Any,
) -> list[list[int]]:
    """Tokens of requests of several lengths, one without an adapter and one with each of `names`."""
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
    adapters = [LoRARequest(name, path=str(files[name])) for name in names]
    for lora in adapters:
        engine.adapters.load(lora, pinned=True)
    outputs: dict[str, list[int]] = {}
    prompts = [[5, 6, 7, 8] * 2, [9, 3, 9], [40, 41, 40]]
    choices = [adapters[0], None, adapters[1]] if names else [None] * 3
    for index, (prompt, lora) in enumerate(zip(prompts, choices, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=(8 if names else 4) - index, ignore_eos=True)
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
    first = graphs.backend
    found = run(files, "eagle3", tensor_parallel_size=2)
    (other,) = tapes
    assert isinstance(first, CallTape)
    assert graphs.num_replayed > len(first.num_calls) == len(other.num_calls) > 1
    assert min(other.num_calls) > 20, "whole passes"
    monkeypatch.undo()
    assert found == run(files)  # without ranks, graphs and drafts


def test_every_rank_captures_all_shapes_at_the_start(
    files: dict[str, Path],  # noqa: F811
    graphs: PassGraphs,  # noqa: F811
    tapes: list[CallTape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And none later."""
    graphs.limits = graphs.limits._replace(max_drafts=0, max_graphs=4, graphs_per_shape=2)
    graphs.grid = make_grid(graphs.limits)
    assert isinstance(graphs.backend, CallTape)
    graphs.backend.lazily = False
    found = run(files, names=(), tensor_parallel_size=2)
    assert graphs.num_captured == len(tapes[0].num_calls) == 4
    assert graphs.num_replayed > 2
    monkeypatch.undo()
    assert found == run(files, names=())


@pytest.mark.parametrize("fails", [0, 1])
def test_a_pass_that_one_rank_cannot_capture(
    fails: int,
    files: dict[str, Path],  # noqa: F811
    graphs: PassGraphs,  # noqa: F811
    tapes: list[CallTape],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All ranks use the one that they have captured before it."""
    first, capture = graphs.backend, CallTape.capture
    assert isinstance(first, CallTape)
    first.lazily = False
    tried: Counter[bool] = Counter()  # by whether it is rank 0's

    def refuse(tape: CallTape, work: Work) -> Captured:
        captured = capture(tape, work)
        tried[tape is first] += 1
        if tried[tape is first] == 2 and (tape is first) == (fails == 0):
            raise RuntimeError("no memory")
        return captured

    monkeypatch.setattr(CallTape, "capture", refuse)
    found = run(files, names=(), tensor_parallel_size=2)
    assert graphs.num_captured == 1 < graphs.num_replayed
    assert tried == {True: 2, False: 2}
    assert [caplog.text.count(f"no more are tried ({why})") for why in ("no memory", "another rank could not")] == [
        1,
        1,
    ]
    monkeypatch.undo()
    assert found == run(files, names=())


def test_a_rank_that_dies_within_a_replay(
    files: dict[str, Path],  # noqa: F811
    graphs: PassGraphs,  # noqa: F811
    tapes: list[CallTape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's kernels wait for it forever, unless they are aborted; then their results are not used."""
    replay, finish = _Recorder.replay, collectives._finish
    of_engine, replays, ended = get_ident(), Counter[int](), Event()
    step, told = EngineCore.step, []

    def counted(recorder: _Recorder) -> None:
        replays[get_ident()] += 1
        replay(recorder)

    def wait_or_die(work: Any) -> None:
        if replays[get_ident()] < 2:
            finish(work)
        elif get_ident() != of_engine:
            raise EOFError
        elif not ended.wait(20):
            pytest.fail("rank 0 waits forever")

    monkeypatch.setattr(_Recorder, "replay", counted)
    monkeypatch.setattr(collectives, "_finish", wait_or_die)
    monkeypatch.setattr(ProcessRanks, "abort", lambda ranks: ended.set())
    monkeypatch.setattr(EngineCore, "step", lambda engine: told.append(step(engine)) or told[-1])
    with pytest.raises(EngineDeadError, match="rank 1 of 2 is gone"):
        run(files, names=(), tensor_parallel_size=2)
    assert (len(tapes), len(told)) == (1, 2)
