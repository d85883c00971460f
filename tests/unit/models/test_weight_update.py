"""New weights for a model in use: it computes, bit for bit, what one computes that was loaded from the new files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.checkpoint.loader import ModelOptions, load_model
from outrider.models.checkpoint.weight_update import WeightUpdate
from outrider.models.model import LanguageModel
from outrider.platform.core.errors import InvalidRequestError, NotFoundError

from ...tiny_families import FAMILIES

KINDS = (
    "gemma2",
    "gpt2",
    "qwen3-moe",
    "deepseek3",
    "gemma4",
    "gemma3n",
    "qwen3.5",
    "bamba",
    "lfm2",
    "gpt-oss",
    "falcon",
)
"""Families that differ in the classes of their layers."""
TOKENS = {0: list(range(3, 40)), 1: [5, 6, 7]}


def noisy(folder: Path, target: Path, *, only: str = "") -> Path:
    """A copy of a checkpoint whose tensors are others."""
    shutil.copytree(folder, target)
    file, generator = target / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if only in name and tensor.is_floating_point():
            tensors[name] = tensor * (1.2 + 0.3 * torch.rand(tensor.shape, generator=generator)).to(tensor.dtype)
    save_file(tensors, file, {"format": "pt"})
    return target


@pytest.fixture
def logits(driver: type) -> Callable[[LanguageModel], torch.Tensor]:
    return lambda model: torch.cat(list(driver(model).forward_once(TOKENS).values()))


@pytest.fixture(scope="module")
def llama(save_tiny: Callable) -> Path:
    return save_tiny("Llama", tie_word_embeddings=False)[0]


def check(folder: Path, new: Path, source: Path, logits: Callable, **options: object) -> WeightUpdate:
    """Compare a model that was updated after it had been used, and one that was loaded from the same files."""
    chosen = ModelOptions(quantization=options.pop("quantization", None))  # type: ignore[arg-type]
    model = load_model(folder, options=chosen, **options)  # type: ignore[arg-type]
    before = logits(model)
    update = WeightUpdate(model, folder, [source], chosen)
    assert torch.equal(logits(model), before)
    update.apply()
    after = logits(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(load_model(new, options=chosen, **options)))  # type: ignore[arg-type]
    return update


@pytest.mark.parametrize("name", KINDS)
def test_families(name: str, save_tiny: Callable, logits: Callable, tmp_path: Path) -> None:
    family = FAMILIES[name]
    folder, _ = save_tiny(family.prefix, **family.config)
    new = noisy(folder, tmp_path / "new")
    assert check(folder, new, new, logits).is_whole


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"batch_invariant": True}], ids=str
)
def test_forms_of_weights(options: dict[str, object], llama: Path, logits: Callable, tmp_path: Path) -> None:
    new = noisy(llama, tmp_path / "new")
    check(llama, new, new, logits, **options)


def test_a_file_with_some_layers(llama: Path, logits: Callable, tmp_path: Path) -> None:
    new = noisy(llama, tmp_path / "new", only="layers.1.")
    tensors = {name: t for name, t in load_file(new / "model.safetensors").items() if "layers.1." in name}
    file = tmp_path / "part.safetensors"
    save_file(tensors, file)
    assert not check(llama, new, file, logits).is_whole


def edited(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"missing: {NORM}"),
        (lambda tensors: tensors.update({"model.extra": torch.ones(2)}), "unexpected: model.extra"),
        (lambda tensors: tensors.update({NORM: torch.ones(7)}), rf"wrong shape: {NORM} \[7\] instead of"),
        (
            lambda tensors: tensors.update({NORM: torch.full((48,), torch.nan)}),
            f"{NORM} has numbers that are not finite",
        ),
        (lambda tensors: tensors.update({NORM: torch.ones(48, dtype=torch.int32)}), f"{NORM} is int32"),
    ],
)
def test_refused_tensors_change_nothing(
    change: Callable, message: str, llama: Path, logits: Callable, tmp_path: Path
) -> None:
    model = load_model(llama)
    before = logits(model)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        WeightUpdate(model, llama, [edited(noisy(llama, tmp_path / "a"), tmp_path / "b", change)], ModelOptions())
    assert caught.value.param == "path"
    assert torch.equal(logits(model), before)


def test_a_part_of_a_layer_is_refused(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "part.safetensors"
    save_file({QUERY: load_file(llama / "model.safetensors")[QUERY]}, file)
    with pytest.raises(InvalidRequestError, match=r"lacks model\.layers\.1\.input_layernorm"):
        WeightUpdate(load_model(llama), llama, [file], ModelOptions())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rms_norm_eps", 1e-3, "its rms_norm_eps is 0.001"),
        ("num_hidden_layers", 1, "its num_layers is 1"),
        ("architectures", ["MistralForCausalLM"], "its architecture is 'MistralForCausalLM'"),
        ("tie_word_embeddings", True, None),  # it has a head of its own, which is used
    ],
)
def test_another_config(field: str, value: object, message: str | None, llama: Path, tmp_path: Path) -> None:
    new = noisy(llama, tmp_path / "new")
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(config | {field: value}))
    model = load_model(llama)
    if message is None:
        WeightUpdate(model, llama, [new], ModelOptions())
        return
    with pytest.raises(InvalidRequestError, match=message):
        WeightUpdate(model, llama, [new], ModelOptions())


def test_a_model_in_other_code(llama: Path) -> None:
    options = ModelOptions("transformers")
    with pytest.raises(InvalidRequestError, match="not replaced while it runs"):
        WeightUpdate(load_model(llama, options=options), llama, [llama], options)


def test_files_that_are_not_there(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        WeightUpdate(load_model(llama), llama, [tmp_path], ModelOptions())
    assert caught.value.param == "path"
