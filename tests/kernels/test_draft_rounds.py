"""Work that a round of drafting and verification asks of the host: launches, captures and waits, counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from outrider import LoRARequest, SamplingParams
from outrider.kernels import ngram as kernels_ngram
from outrider.kernels import noise as kernels_noise
from outrider.kernels import sampling as kernels_sampling
from outrider.kernels import verification as kernels_verification
from outrider.kernels.sampling import triton as kernels_sampling_triton
from outrider.models.pass_graphs import PassGraphs
from outrider.models.pass_grid import PassLimits
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine import setup
from outrider.platform.engine.engine_core import EngineCore
from outrider.spec_decode.drafters import ngram_device

from .launch_counts import Counts, count_steps
from .test_graphs_engine import as_on_a_gpu, files, graphs, without_warm_up  # noqa: F401  (fixtures)

DRAFTS = 3
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "seed": 7}
SAMPLED = {"temperature": 0.9, "top_k": 20}


def rounds(
    files: dict[str, Path],  # noqa: F811
    graphs: PassGraphs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    rows: int,
    params: dict[str, Any],
    *,
    adapted: bool = False,
) -> list[Counts]:
    """Counts of the steps of an engine whose requests begin and end together."""
    as_on_a_gpu(monkeypatch)
    without_warm_up(monkeypatch)
    monkeypatch.setattr(ngram_device, "runs_on", lambda device: True)
    for module in (kernels_ngram, kernels_noise, kernels_sampling, kernels_verification):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    # The interpreter is done sooner with small blocks.
    monkeypatch.setattr(kernels_sampling_triton, "DEFAULT", replace(kernels_sampling_triton.DEFAULT, block=128))
    model = {"model": str(files[method])} if method in files else {}
    engine = EngineCore(
        EngineArgs(
            model=str(files["target"]), device="cpu", dtype="float32", load_format="dummy", max_model_len=64,
            max_num_seqs=rows, num_gpu_blocks_override=10 * rows, enable_lora=adapted, max_loras=2, max_lora_rank=20,
            seed=0, async_scheduling=True,
            speculative_config={"method": method, "num_speculative_tokens": DRAFTS, "adaptive": False} | model,
        )
    )  # fmt: skip
    loras = [LoRARequest(name, path=str(files[name])) for name in ("narrow", "wide")] if adapted else [None]
    for lora in loras:
        if lora is not None:
            engine.adapters.load(lora, pinned=True)
    steps = count_steps(monkeypatch, graphs)
    for index in range(rows):
        of_row = params | ({"seed": index} if "seed" in params else {})
        request = SamplingParams(max_tokens=14, ignore_eos=True, **of_row)
        engine.add_request(EngineRequest(str(index), [5, 6, 7, 8] * 2, request, lora=loras[index % len(loras)]))
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
    engine.shutdown()
    return steps


CASES = [
    ("eagle3", 1, GREEDY, False, 2, 58),
    ("eagle3", 4, SEEDED, False, 2, 63),
    ("eagle3", 2, GREEDY, True, 1 + DRAFTS, 77),
    ("draft_model", 2, SAMPLED, False, 2, 59),
    ("ngram", 2, GREEDY, False, 1, 34),
]
"""(method, rows, sampling parameters, with adapters, most launches of graphs and most single ones in a round). Adapters
that have weights of the drafter need a graph for each of its passes."""


@pytest.mark.parametrize(("method", "rows", "params", "adapted", "launches", "single"), CASES)
def test_launches_of_a_round(
    files: dict[str, Path],  # noqa: F811
    graphs: PassGraphs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    method: str,
    rows: int,
    params: dict[str, Any],
    adapted: bool,
    launches: int,
    single: int,
) -> None:
    """A pass of the target that verifies drafts, and the loop that makes the next ones; the host waits for neither."""
    if device == "cuda":
        pytest.skip("launches are counted by the interpreter")
    limits = PassLimits(rows, 64, max_tokens=32, max_drafts=DRAFTS, has_loops=method != "ngram")
    graphs = PassGraphs(graphs.backend, limits)
    monkeypatch.setattr(setup, "make_graphs", lambda config: graphs)
    steps = rounds(files, graphs, monkeypatch, method, rows, params, adapted=adapted)
    settled = [step for step in steps[1:] if not step.recordings]  # the prompts come first
    assert len(settled) >= 2
    assert max(step.graphs for step in settled) == launches
    assert [name for step in settled for name in step.waits] == []
    assert max(step.single for step in settled) <= single, max(settled, key=lambda step: step.single).names
