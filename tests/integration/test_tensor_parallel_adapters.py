"""Adapters that are more than rank rows, on two ranks: magnitudes, biases, rows of their own, added tokens."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LoRARequest, SamplingParams
from outrider.lora.device.own_rows import OwnRowSites

from ..thread_ranks import ranks_as_threads
from ..unit.lora.parity.reference import VOCAB, load_base, save_base, train

ENDS = ("embed_tokens", "lm_head")
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": [*ENDS, "q_proj", "v_proj", "dense", "o_proj", "fc1", "down_proj"], "use_dora": True},
    "lora-bias": {"target_modules": ["lm_head", "k_proj", "o_proj", "dense", "fc2", "up_proj"], "lora_bias": True},
    "biases": {"target_modules": ["v_proj", "down_proj"], "bias": "all"},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": [*ENDS]},
    "saved-table": {"target_modules": ["q_proj"], "modules_to_save": [*ENDS[:1]]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [9, 3, 77, 130]},
    "copies": {"target_modules": [*ENDS, "q_proj"]},
}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def save_kinds(folder: Path, family: str, tied: bool, **more: Any) -> dict[str, Path]:
    """Folders of a model, "base", and of an adapter of each kind that PEFT makes for it."""
    paths = {name: folder / name for name in ("base", *KINDS)}
    save_base(paths["base"], family, tied, **more)
    for seed, (name, options) in enumerate(copy.deepcopy(KINDS).items()):  # PEFT changes lists
        train(paths["base"], seed, r=4, lora_alpha=8, **options).save_pretrained(paths[name])
    return paths


def logprobs(outcome: Any) -> list[float]:
    """Log-probabilities of a text's tokens."""
    return [entry.logprobs[0] for entry in outcome.logprobs]


@pytest.mark.parametrize(("family", "tied"), [("Qwen2", True), ("Phi", False)])
def test_two_ranks_write_the_text_of_one(
    family: str, tied: bool, make_engine: Any, run: Any, prompts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter's text is of its own; two are on the device at once, so that they leave it for each other."""
    ranks_as_threads(monkeypatch)
    paths = save_kinds(tmp_path, family, tied, **({"num_key_value_heads": 4} if family == "Phi" else {}))
    adapters = [None, *(LoRARequest(name, path=str(paths[name])) for name in KINDS)]
    jobs = [([token % VOCAB for token in prompt], GREEDY, a) for prompt in prompts[:2] for a in adapters]
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    one = make_engine(model=str(paths["base"]), **LORA)
    two = make_engine(model=str(paths["base"]), tensor_parallel_size=2, speculative_config=speculation, **LORA)
    texts = [run(engine, jobs) for engine in (one, two)]
    for name, expected, found in zip([None, *KINDS] * 2, *texts, strict=True):
        assert found.token_ids == expected.token_ids, name
        # A text may be the same with a wrong bias: it prefers the same token at all places.
        assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-4), name
    distinct = {tuple(outcome.token_ids) for outcome in texts[0][: len(adapters)]}
    assert len(distinct) == len(adapters), "adapters change texts"


def test_added_tokens(
    make_engine: Any, run: Any, prompts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    ranks_as_threads(monkeypatch)
    save_base(tmp_path / "base", "Llama", False)
    torch.manual_seed(3)
    model = load_base(tmp_path / "base")
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=[*ENDS])
    )
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data[VOCAB:] = 2 * parameter.data[20:24]
    model.save_pretrained(tmp_path / "more")
    more = LoRARequest("more", path=str(tmp_path / "more"))
    jobs = [([5, VOCAB, 9, VOCAB + 3], GREEDY, more), ([token % VOCAB for token in prompts[0]], GREEDY, None)]
    engines = [make_engine(model=str(tmp_path / "base"), tensor_parallel_size=size, **LORA) for size in (1, 2)]
    texts = [[outcome.token_ids for outcome in run(engine, jobs)] for engine in engines]
    assert texts[1] == texts[0]
    assert max(texts[0][0]) >= VOCAB > max(texts[0][1])


@pytest.mark.parametrize("name", ENDS)
def test_an_inconsistent_modules_to_save_copy_is_refused(
    name: str, make_engine: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_as_threads(monkeypatch)
    save_base(tmp_path / "base", "Llama", False)
    train(tmp_path / "base", 1, r=4, **KINDS["copies"]).save_pretrained(tmp_path / "copy")
    file = tmp_path / "copy" / "adapter_model.safetensors"
    tensors = load_file(file)
    (key,) = (key for key in tensors if name in key and "lora" not in key)
    tensors[key][-1] += 1
    save_file(tensors, file)
    engine = make_engine(model=str(tmp_path / "base"), tensor_parallel_size=2, **LORA)
    (outcome,) = run(engine, [([3, 4], GREEDY, LoRARequest("copy", path=str(tmp_path / "copy")))])
    assert re.match(f".*{name}.*modules_to_save does not name it", outcome.error.message)


def test_an_unloaded_adapter_leaves_all_ranks(
    make_engine: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own rows are as large as the vocabulary, and are not counted from then on."""
    ranks_as_threads(monkeypatch)
    save_base(tmp_path / "base", "Llama", False)
    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": [*ENDS]}
    train(tmp_path / "base", 1, **options).save_pretrained(tmp_path / "saved")
    engine = make_engine(model=str(tmp_path / "base"), tensor_parallel_size=2, **LORA)
    run(engine, [([3, 4], GREEDY)])  # the other rank may still be starting
    gc.collect()  # engines of other tests
    sites = [found for found in gc.get_objects() if isinstance(found, OwnRowSites)]
    num_before = sum(map(len, sites))
    saved = LoRARequest("saved", path=str(tmp_path / "saved"))
    first = run(engine, [([3, 4], GREEDY, saved)])[0].token_ids
    assert sum(map(len, sites)) == num_before + 2
    engine.adapters.unload("saved")
    run(engine, [([3, 4], GREEDY)])  # ranks work in order
    assert sum(map(len, sites)) == num_before
    assert run(engine, [([3, 4], GREEDY, saved)])[0].token_ids == first
