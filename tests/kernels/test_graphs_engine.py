"""An engine whose passes are replayed writes the text of one that launches them piece by piece on the CPU's own path:
with adapters that change from step to step, with drafters, and with drafts that are cut short."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("triton")

from outrider import LoRARequest, SamplingParams
from outrider.kernels import noise as kernels_noise
from outrider.kernels import penalties as kernels_penalties
from outrider.kernels import sampling as kernels_sampling
from outrider.kernels import verification as kernels_verification
from outrider.kernels.device_outcome import OnDevice
from outrider.kernels.sampling import triton as kernels_sampling_triton
from outrider.lora.device import arena, batching, vectors
from outrider.models import attention, decoder
from outrider.models.attention import triton as triton_attention
from outrider.models.attention.triton import TritonAttention
from outrider.models.batch import SequenceRows
from outrider.models.pass_graphs import PassGraphs
from outrider.models.pass_grid import PassLimits
from outrider.platform.core.batch import RowPlan, StepPlan
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine import setup
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.runner.model_runner import Launched, ModelRunner
from outrider.platform.engine.runner.warm_up import dummy, rehearse, step
from outrider.platform.engine.sampling import sampler
from outrider.spec_decode.control.policy import SpeculationPolicy
from outrider.spec_decode.verify import draft_sampling as drawing

from .call_tape import CallTape, graph_backend, without_native_kernels

VOCAB, HIDDEN, INNER = 96, 32, 48
SHAPE = {
    **{"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"hidden_act": "silu", "dtype": "float32", "model_type": "llama"},
}
SIZES = {"q_proj": (HIDDEN, HIDDEN), "v_proj": (HIDDEN, HIDDEN // 2), "down_proj": (INNER, HIDDEN)}
SIZES |= {"o_proj": (HIDDEN, HIDDEN), "0.0.linear": (HIDDEN, HIDDEN), "1.0.linear": (HIDDEN, HIDDEN)}


def write_model(folder: Path, layers: int, **more: Any) -> Path:
    """A config.json alone, for dummy weights."""
    folder.mkdir()
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers} | more
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(
    folder: Path, rank: int, layers: int, names: list[str], *, head: bool = False, prefix: str = "model."
) -> Path:
    generator = torch.Generator().manual_seed(rank)
    modules = {name: SIZES[name] for name in names if not layers}
    for layer in range(layers):
        for name in names:
            part = "mlp" if name == "down_proj" else "self_attn"
            modules[f"{prefix}layers.{layer}.{part}.{name}"] = SIZES[name]
    if head:
        modules["lm_head"] = (HIDDEN, VOCAB)
    tensors = {}
    for module, (width, out) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * 0.4
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.4
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [*names, "lm_head"] if head else names
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("graphs")
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB, "target_hidden_size": HIDDEN}
    made = {
        "target": write_model(root / "target", 2),
        "draft_model": write_model(root / "draft", 2),  # the target's own weights, without its adapters
        "eagle3": write_model(root / "eagle3", 1, **eagle3, eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        "medusa": write_heads(root / "medusa"),
        # One layer of two: Triton's interpreter takes half of the time for adapters.
        "narrow": write_adapter(root / "narrow", 3, 1, ["q_proj", "down_proj"]),
        "wide": write_adapter(root / "wide", 17, 1, ["q_proj", "v_proj"], head=True),
    }
    write_adapter(root / "narrow" / "draft" / "draft_model", 2, 1, ["v_proj"])
    write_adapter(root / "narrow" / "draft" / "eagle3", 2, 1, ["o_proj"], prefix="")
    write_adapter(root / "wide" / "draft" / "draft_model", 4, 1, ["q_proj"])
    write_adapter(root / "wide" / "draft" / "medusa", 5, 0, ["0.0.linear", "1.0.linear"])
    return made


def write_heads(folder: Path) -> Path:
    """Two Medusa heads, for dummy weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    return folder


Drafted = dict[tuple[str, tuple[int, ...]], list[int]]
"""By request and its tokens so far."""


def watch_drafts(engine: EngineCore, drafted: Drafted) -> None:
    """Keep what is drafted."""
    runner = engine._runner
    draft = runner.draft

    def watched(launched: Any, result: Any) -> float:
        seconds = draft(launched, result)
        for row in launched.plan.rows:
            if row.samples and row.max_new_drafts:
                drafted[row.request.request_id, tuple(row.request.tokens)] = list(row.request.drafts.token_ids)
        return seconds

    runner.draft = watched  # type: ignore[method-assign]


def take(engine: EngineCore, outputs: dict[str, list[int]]) -> None:
    """One step's tokens."""
    for delta in engine.step():
        assert delta.error is None
        outputs[delta.request_id] += delta.token_ids


def run(
    files: dict[str, Path],
    device: str,
    method: str | None,
    *,
    adapted: bool,
    overlapping: bool = False,
    adaptive: bool = False,
    penalties: dict[str, float] | None = None,
    cache: str = "auto",
) -> tuple[list[list[int]], Drafted]:
    """Requests of several lengths, one of them without an adapter; their tokens, and what was drafted for them."""
    speculative = None
    if method is not None:
        speculative = {"method": method, "num_speculative_tokens": 2, "adaptive": adaptive}
        speculative |= {"model": str(files[method])} if method in files else {}
    engine = EngineCore(
        EngineArgs(
            model=str(files["target"]), device=device, dtype="float32", load_format="dummy", max_model_len=64,
            max_num_seqs=4, num_gpu_blocks_override=40, enable_lora=adapted, max_loras=2, max_lora_rank=20, seed=0,
            speculative_config=speculative, async_scheduling=overlapping, kv_cache_dtype=cache,
        )
    )  # fmt: skip
    adapters = [LoRARequest(name, path=str(files[name])) for name in ("narrow", "wide")]
    for lora in adapters if adapted else ():
        engine.adapters.load(lora, pinned=True)  # there from the first step on: which shapes come is not left to chance
    outputs: dict[str, list[int]] = {}
    drafted: Drafted = {}
    watch_drafts(engine, drafted)
    prompts = [[5, 6, 7, 8] * 2, [9, 3, 9], [40, 41, 40]]
    choices = [adapters[0], None, adapters[1]] if adapted else [None] * 3
    for index, (prompt, lora) in enumerate(zip(prompts, choices, strict=True)):
        heat, seed = (0.8, index) if index == 0 else (0.0, None)
        params = SamplingParams(
            temperature=heat, seed=seed, max_tokens=(8, 8, 5)[index], ignore_eos=True, **(penalties or {})
        )
        engine.add_request(EngineRequest(str(index), prompt, params, lora=lora))
        outputs[str(index)] = []
    while engine.has_work():
        take(engine, outputs)
    engine.check_integrity()
    if adapted and method is not None:
        assert "loaded" in {info.draft for info in engine.adapters.list()}
    engine.shutdown()
    return list(outputs.values()), drafted


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> Callable[[], list[list[int]]]:
    """Tokens of the requests with adapters, without graphs and without drafts; made once, when nothing is patched."""
    return functools.cache(lambda: run(files, "cpu", None, adapted=True)[0])


@pytest.fixture
def graphs(device: str, monkeypatch: pytest.MonkeyPatch) -> PassGraphs:
    """The path of a CUDA device, on a CPU too: Triton's kernels, and graphs or their double."""
    made = PassGraphs(
        graph_backend(device, lazily=True), PassLimits(4, 64, max_tokens=16, max_drafts=2, graphs_per_shape=3)
    )
    monkeypatch.setattr(setup, "make_graphs", lambda config: made)
    monkeypatch.setattr(drawing, "stays_on_device", lambda logits: True)
    if device == "cuda":
        return made
    for module in (arena, batching, vectors):
        monkeypatch.setattr(module, "is_grouped", lambda dtype, device: True)
    monkeypatch.setattr(attention, "best_backend", lambda spec, *, batch_invariant: TritonAttention)
    monkeypatch.setattr(decoder, "adds_residuals", lambda device: True)
    planner = triton_attention.Planner
    monkeypatch.setattr(
        triton_attention, "Planner", lambda shape, size, gpu, _, *rest: planner(shape, size, gpu, 1, *rest)
    )
    without_native_kernels(monkeypatch)
    return made


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling and verification by the device's rules; the host does not read the starts of late rows."""
    for module in (sampler, kernels_penalties):
        monkeypatch.setattr(module, "use_triton", lambda x: True)

    def asked(rows: SequenceRows) -> SequenceRows:
        raise AssertionError("the host waits for what was accepted")

    monkeypatch.setattr(SequenceRows, "settled", asked)


def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No steps before the first request: their drafts are known to the host, and they take what a test decides."""
    monkeypatch.setattr(setup, "rehearse_engine", lambda *args: None)


@pytest.mark.parametrize(("method", "overlapping"), [("eagle3", False), ("draft_model", True), (None, True)])
def test_text_is_the_same(
    files: dict[str, Path],
    graphs: PassGraphs,
    device: str,
    method: str | None,
    overlapping: bool,
    plain: Callable[[], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if overlapping:
        as_on_a_gpu(monkeypatch)
    found, drafted = run(files, device, method, adapted=True, overlapping=overlapping)
    assert graphs.num_replayed >= 4
    if isinstance(graphs.backend, CallTape):
        assert len(graphs.backend.num_calls) < graphs.num_replayed
        assert min(graphs.backend.num_calls) > 10, "whole passes"
    monkeypatch.undo()
    assert found == plain()
    if method is not None:
        assert any(drafted.values())
        wanted = run(files, "cpu", method, adapted=True)[1]
        if not overlapping:
            assert drafted == wanted
            return
        # Near their ends sequences may get fewer drafts while the host does not know how long they are.
        pairs = [(drafted[key], wanted[key]) for key in drafted.keys() & wanted.keys()]
        assert all(got[: len(want)] == want[: len(got)] for got, want in pairs)
        assert sum(min(len(got), len(want)) for got, want in pairs) > 10


@pytest.mark.parametrize("method", [None, "draft_model"])
def test_penalties_are_counted_on_the_device(
    files: dict[str, Path], graphs: PassGraphs, device: str, method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap, and the host does not read the drafts, accepted counts or tokens of the step before."""
    as_on_a_gpu(monkeypatch)
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.2}
    launch, late = ModelRunner.launch, []

    def noted(runner: ModelRunner, plan: StepPlan, before: Launched | None = None) -> Launched:
        late.extend(row for row in plan.rows if row.awaits_token)
        return launch(runner, plan, before)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    monkeypatch.setattr(sys.modules[__name__], "watch_drafts", lambda *args: None)  # which reads them
    monkeypatch.setattr(OnDevice, "known", lambda source: pytest.fail("the host waits for drafts"))
    without_warm_up(monkeypatch)
    found, _ = run(files, device, method, adapted=False, overlapping=True, penalties=penalties)
    assert len(late) > 4
    monkeypatch.undo()
    assert found == run(files, "cpu", None, adapted=False, penalties=penalties)[0]


def test_an_fp8_cache_in_graphs(
    files: dict[str, Path], graphs: PassGraphs, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of the same kernels without graphs; the CPU's path rounds a query's products in another order."""
    found, _ = run(files, device, "eagle3", adapted=False, cache="fp8")
    assert graphs.num_replayed >= 4
    monkeypatch.setattr(setup, "make_graphs", lambda config: None)
    assert found == run(files, device, None, adapted=False, cache="fp8")[0]


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_numbers_of_drafts_that_change_from_step_to_step(
    files: dict[str, Path],
    graphs: PassGraphs,
    device: str,
    method: str,
    plain: Callable[[], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps overlap, and the host never waits for the starts of rows; some steps have no drafts."""
    as_on_a_gpu(monkeypatch)
    decisions = itertools.cycle([(2, 1, 2), (1, 2, 2), (0, 0, 0), (0, 0, 0), (2, 2, 0), (2, 2, 1)])

    def choose(policy: SpeculationPolicy, rows: Sequence[RowPlan], *, requests_wait: bool) -> None:
        for row, count in zip(rows, next(decisions), strict=False):
            row.drafter, row.max_new_drafts = 0, min(count, row.max_new_drafts)

    monkeypatch.setattr(SpeculationPolicy, "choose", choose)
    monkeypatch.setattr(SpeculationPolicy, "plans_no_drafts", property(lambda policy: False))
    without_warm_up(monkeypatch)
    beside = []
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, plan: StepPlan, before: Launched | None = None) -> Launched:
        beside.extend(row.num_drafts for row in plan.rows if row.awaits_token)
        return launch(runner, plan, before)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    found, drafted = run(files, device, method, adapted=True, overlapping=True, adaptive=True)
    assert graphs.num_replayed >= 4
    assert set(beside) == {0, 1, 2}
    assert any(drafted.values())
    monkeypatch.undo()
    assert found == plain()


def test_nothing_of_sampling_is_left_to_compile_after_the_rehearsal(
    files: dict[str, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with other numbers launch no kernel that the dummies have not, with the same constants."""
    if device == "cuda":
        pytest.skip("launches are noted by the interpreter")
    from triton.runtime.interpreter import GridExecutor

    as_on_a_gpu(monkeypatch)
    for module in (kernels_noise, kernels_sampling, kernels_verification):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    # The interpreter is done sooner with small blocks.
    monkeypatch.setattr(kernels_sampling_triton, "DEFAULT", replace(kernels_sampling_triton.DEFAULT, block=128))
    call, launched = GridExecutor.__call__, set()

    def noted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add((executor.fn.__name__, *sorted((name, repr(of)) for name, of in kwargs.items() if name.isupper())))
        return call(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    speculative = {"method": "eagle3", "num_speculative_tokens": 2, "model": str(files["eagle3"])}
    parts = setup.build(
        EngineArgs(
            model=str(files["target"]), device="cpu", dtype="float32", load_format="dummy", max_model_len=64,
            max_num_seqs=4, num_gpu_blocks_override=40, seed=0, speculative_config=speculative,
        )
    )  # fmt: skip
    rehearse(parts.scheduler, parts.runner)
    assert not parts.scheduler.has_work()
    rehearsed = set(launched)
    assert len({name for name, *_ in rehearsed}) > 5
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.3, "top_p": 0.5},
        {"temperature": 1.5, "top_k": 40, "seed": 3, "frequency_penalty": 0.5},
        {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.3, "logprobs": 3},
    ]
    requests = [dummy(str(i), i, SamplingParams(ignore_eos=True, max_tokens=4, **k)) for i, k in enumerate(kinds)]
    for request in requests:
        parts.scheduler.add(request)
    while parts.scheduler.has_work():
        step(parts.scheduler, parts.runner)
    assert [request.num_output_tokens for request in requests] == [4] * 3
    assert launched - rehearsed == set()
