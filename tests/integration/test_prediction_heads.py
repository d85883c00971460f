"""Heads for multi-token prediction in the target's checkpoint, in engines with tiny models of each layout."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LoRARequest, SamplingParams
from outrider.models.checkpoint.loader import read_facts
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.speculative_config import parse_speculative
from outrider.platform.engine.engine_core import EngineCore
from outrider.spec_decode.control import adapters, trials
from outrider.spec_decode.drafters.factory import draft_kv_bytes_per_token

from ..prediction_checkpoints import HIDDEN, LAYOUTS, Checkpoint
from ..quantized_files import CASES, write_quantized
from ..thread_ranks import ranks_as_threads
from ..tiny_families import Family, build
from .drafted import counts, serve


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """checkpoints(layout, exact) -> its checkpoint, made once."""
    return cache(lambda name, exact=False: Checkpoint(tmp_path_factory.mktemp(name), LAYOUTS[name], exact=exact))


def build_engine(folder, **options) -> EngineCore:
    values = {"model": str(folder), "dtype": "float32", "max_model_len": 96, "max_num_seqs": 6, "block_size": 8}
    return EngineCore(EngineArgs(**(values | options)))


@pytest.fixture
def make_engine():
    """Engines that are checked and shut down at the end of the test."""
    engines = []

    def make(folder, **options):
        engines.append(build_engine(folder, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
        engine.shutdown()


GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, top_k=20, max_tokens=14, ignore_eos=True)
PROMPTS = [[5 + (7 * i + n) % 120 for i in range(n)] for n in (3, 9, 17, 33)]
JOBS = [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SEEDED)]
MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def plain_texts():
    """plain_texts(folder) -> the texts of `JOBS` without drafts, made once."""

    @cache
    def plain_texts(folder):
        engine = build_engine(folder)
        texts = serve(engine, JOBS)
        engine.shutdown()
        return texts

    return plain_texts


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_reference_and_change_no_text(checkpoints, make_engine, plain_texts, name):
    """Twice: the second time prompts come from the prefix cache, with the KV and the hidden states of the head."""
    checkpoint = checkpoints(name)
    expected = plain_texts(checkpoint.folder)
    engine = make_engine(checkpoint.folder, speculative_config=MTP, max_num_batched_tokens=48)
    checked: list[int] = []

    def check(request) -> None:
        drafts = list(request.drafts.token_ids)
        if request.params.temperature == 0 and drafts and len(checked) < limit:
            checked.append(len(drafts))
            assert checkpoint.misses(list(request.tokens), drafts) == 0

    for limit in (12, 24):
        assert serve(engine, JOBS, check) == expected
        assert len(checked) == limit
        assert max(checked) == 3
    assert engine.stats().prefix_cache_hits > 0
    drafted, accepted = counts(engine)
    assert drafted > accepted


@pytest.mark.parametrize("name", ["qwen3.5", "mimo", "nemotron-h", "ernie4.5-moe"])
def test_all_drafts_of_a_perfect_head_are_accepted(monkeypatch, checkpoints, make_engine, name):
    """By one of vLLM's names, with a fixed number of drafts and with the policy's."""
    folder, jobs = checkpoints(name, True).folder, [(prompt, GREEDY) for prompt in PROMPTS]
    expected = serve(make_engine(folder), jobs)
    engine = make_engine(folder, speculative_config={"method": "qwen3_5_mtp", "num_speculative_tokens": 3})
    assert serve(engine, jobs) == expected
    drafted, accepted = counts(engine)
    assert drafted == accepted > 0
    monkeypatch.setattr(adapters, "FIRST_TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(trials, "TRIAL_SHARE", math.inf)  # it drafts although steps are short
    engine = make_engine(folder, speculative_config={"method": "mtp"})
    for _ in range(3):
        assert serve(engine, jobs) == expected
    assert counts(engine)[1] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 15, "enable_prefix_caching": False},
        {"async_scheduling": True, "max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 15, "swap_space": 0.01, "preemption_mode": "swap"},
        {"num_gpu_blocks_override": 15, "tensor_parallel_size": 2},
    ],
    ids=["preempted", "overlapped", "swapped", "divided"],
)
def test_scheduling_of_a_hybrid_model_changes_no_text(checkpoints, make_engine, plain_texts, options, monkeypatch):
    folder = checkpoints("qwen3.5").folder
    expected = plain_texts(folder)
    ranks_as_threads(monkeypatch)
    engine = make_engine(folder, speculative_config=MTP, **options)
    assert serve(engine, JOBS) == expected
    assert serve(engine, JOBS) == expected
    assert (engine.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert counts(engine)[0] > 0


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], size: float) -> dict[str, Tensor]:
    """A PEFT adapter of rank 4; returns what it adds to the weight of each module."""
    generator = torch.Generator().manual_seed(4)
    tensors, deltas = {}, {}
    for module, (inputs, outputs) in modules.items():
        a, b = torch.randn(4, inputs, generator=generator), size * torch.randn(outputs, 4, generator=generator)
        tensors |= {f"base_model.model.{module}.lora_{part}.weight": x for part, x in (("A", a), ("B", b))}
        deltas[module] = b @ a
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def test_an_adapter_brings_draft_weights(checkpoints, make_engine, tmp_path):
    """The adapter changes the head alone: the target's part is 0."""
    checkpoint = checkpoints("qwen3.5")
    write_adapter(tmp_path, {"model.layers.2.self_attn.o_proj": (64, HIDDEN)}, 0.0)
    own = {"fc": (2 * HIDDEN, HIDDEN), "layers.0.self_attn.q_proj": (HIDDEN, 128)}
    deltas = write_adapter(tmp_path / "draft" / "mtp", own, 0.1)
    tuned = copy.deepcopy(checkpoint)
    tuned.fc.weight.data += deltas["fc"]
    tuned.head.model.layers[0].self_attn.q_proj.weight.data += deltas["layers.0.self_attn.q_proj"]
    engine = make_engine(checkpoint.folder, speculative_config=MTP, enable_lora=True, max_lora_rank=4)
    lora, jobs = LoRARequest("tuned", path=str(tmp_path)), [(prompt, GREEDY) for prompt in PROMPTS]
    misses = {"own": 0, "other": 0}

    def check(request) -> None:
        drafts, tokens = list(request.drafts.token_ids), list(request.tokens)
        own, other = (tuned, checkpoint) if request.lora else (checkpoint, tuned)
        if drafts and len(tokens) < 20:
            misses["own"] += own.misses(tokens, drafts)
            misses["other"] += other.misses(tokens, drafts)

    outputs = serve(engine, [*jobs, *((*job, lora) for job in jobs)], check)
    assert outputs[: len(jobs)] == outputs[len(jobs) :] == serve(make_engine(checkpoint.folder), jobs)
    assert misses["own"] == 0 < misses["other"]
    assert [info.draft for info in engine.adapters.list()] == ["loaded"]


def test_prediction_head_kv_is_counted_in_the_cache_size(checkpoints):
    for name, elements in (("qwen3.5", 2 * 2 * 16), ("deepseek3", 24 + 8)):
        folder = checkpoints(name).folder
        num_bytes = draft_kv_bytes_per_token(parse_speculative(MTP), "float32", model_path=folder)
        assert num_bytes == 4 * (elements + HIDDEN)
        assert draft_kv_bytes_per_token(parse_speculative(MTP | {"model": str(folder)}), "float32") == num_bytes
        assert read_facts(folder).kv_bytes_per_token == 4 * elements * (3 if name == "deepseek3" else 1)


def test_heads_of_another_folder_and_random_ones(checkpoints, make_engine):
    checkpoint, other = checkpoints("mimo"), checkpoints("mimo", True)
    jobs = [(PROMPTS[1], GREEDY)]
    expected = serve(make_engine(checkpoint.folder), jobs)
    config = MTP | {"model": str(other.folder)}
    assert serve(make_engine(checkpoint.folder, speculative_config=config), jobs) == expected
    engine = make_engine(checkpoint.folder, speculative_config=MTP, load_format="dummy")
    serve(engine, jobs)
    assert counts(engine)[0] > 0


def test_heads_of_multimodal_checkpoints(checkpoints, make_engine, tmp_path):
    checkpoint = checkpoints("qwen3.5", True)
    raw = json.loads((checkpoint.folder / "config.json").read_text())
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": raw, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(checkpoint.folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    assert any(name.startswith("mtp.") for name in renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    engine = make_engine(tmp_path, speculative_config=MTP)
    serve(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    drafted, accepted = counts(engine)
    assert drafted == accepted > 0


@pytest.mark.parametrize("is_packed", [True, False])
def test_heads_of_quantised_checkpoints(checkpoints, make_engine, tmp_path, is_packed):
    """Formats often leave the head in full precision."""
    write_quantized(checkpoints("mimo").folder, tmp_path, CASES["fp8-blocks"])
    if not is_packed:
        file = tmp_path / "model.safetensors"
        plain = {name: t for name, t in load_file(tmp_path / "dense" / file.name).items() if "mtp_layers" in name}
        save_file({name: t for name, t in load_file(file).items() if "mtp_layers" not in name} | plain, file)
    engine = make_engine(tmp_path, speculative_config=MTP)
    assert serve(engine, JOBS) == serve(make_engine(tmp_path), JOBS)
    assert counts(engine)[0] > 0


def test_a_checkpoint_without_a_head_is_refused(checkpoints, make_engine, tmp_path):
    for name, missing in (("qwen3.5", "mtp.fc.weight"), ("deepseek3", "model.layers.3.eh_proj.weight")):
        checkpoints(name).target.save_pretrained(tmp_path / name)
        with pytest.raises(InvalidRequestError, match=f"{missing} is missing") as caught:
            make_engine(tmp_path / name, speculative_config=MTP)
        assert caught.value.param == "speculative_config"
    build(Family("Llama", {"vocab_size": 140})).save_pretrained(tmp_path / "llama")
    with pytest.raises(InvalidRequestError, match="not read from LlamaForCausalLM; served are DeepseekV32ForCausalLM"):
        make_engine(tmp_path / "llama", speculative_config=MTP)
    with pytest.raises(InvalidRequestError, match=r"vocab_size of .* is 131, the target's 140"):
        make_engine(tmp_path / "llama", speculative_config=MTP | {"model": str(checkpoints("qwen3.5").folder)})


def test_a_damaged_head_is_refused(checkpoints, make_engine, tmp_path):
    folder = checkpoints("mimo").folder
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.mtp_layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    serve(make_engine(tmp_path), [(PROMPTS[0], GREEDY)])  # without the method it is not read
    folder = checkpoints("ernie4.5").folder
    serve(make_engine(folder, model_impl="transformers"), [(PROMPTS[0], GREEDY)])
    with pytest.raises(InvalidRequestError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        make_engine(tmp_path, speculative_config=MTP)
