"""GGUF files of models with recurrent states, of Gemma 3n and 4, and of Llama 4: a file gives the logits of the folder
that it was made of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from outrider.kernels.quantized_linear import QuantizedWeight
from outrider.models.checkpoint.loader import load_model
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.engine.engine_core import EngineCore

from ...gguf_files import write_gguf
from ...tiny_families import FAMILIES, Family, build

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
INTERVAL = {"layer_types": ["linear_attention", "full_attention"] * 2}
FREE_STEPS: dict[str, Any] = {"time_step_limit": (0.0, float("inf"))}
# What the files do not state has the value that llama.cpp assumes, and published models have.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": ("qwen3-next", {**INTERVAL, "mlp_only_layers": []}),
    "qwen35": ("qwen3.5", INTERVAL),
    "qwen35moe": ("qwen3.5-moe", {}),
    "mamba2": ("mamba2", FREE_STEPS),
    "bamba": ("bamba", FREE_STEPS),
    "granitehybrid": ("granite4", FREE_STEPS),
    "granitehybrid-dense": ("granite4", {**FREE_STEPS, "num_local_experts": 0}),
    "falcon-h1": ("falcon-h1", FREE_STEPS),
    "nemotron_h": (
        "nemotron-h",
        {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "time_step_min": 0.001},
    ),
    "nemotron_h_moe": (
        "nemotron-h",
        {
            **{"layers_block_type": ["mamba", "moe", "attention", "mamba"], "time_step_min": 0.001},
            **{"n_group": 1, "topk_group": 1},
        },
    ),
    "gemma3n": ("gemma3n", {"vocab_size_per_layer_input": 131}),
    "gemma4": ("gemma4", {}),
    "gemma4-experts": ("gemma4-experts", {}),
    "llama4": (
        "llama4",
        {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    ),
}  # fmt: skip


def saved(name: str, folder: Path, **more: Any) -> tuple[Path, Any]:
    """Folder of the case's model, and the model in transformers."""
    family, changes = CASES[name]
    made = FAMILIES[family]
    model = build(Family(made.prefix, {**made.config, **changes, **more}))
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def logits(driver: Callable) -> Callable:
    def compute(path: Path) -> torch.Tensor:
        return driver(load_model(path, "float32"), prompt_lens={0: len(TOKENS)}).forward_once({0: TOKENS})[0]

    return compute


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_logits_of_its_folder(name: str, tmp_path: Path, logits: Callable) -> None:
    folder, theirs = saved(name, tmp_path / "model")
    write_gguf(folder, tmp_path / "m.gguf")
    found = logits(tmp_path / "m.gguf")
    torch.testing.assert_close(
        found, logits(folder), rtol=1e-4, atol=1e-4
    )  # w + 1 - 1, log(exp(a)), products of factors
    with torch.inference_mode():
        torch.testing.assert_close(found, theirs(torch.tensor([TOKENS])).logits[0], rtol=1e-3, atol=2e-3)


WIDE = {"hidden_size": 64, "intermediate_size": 64}
QUANTISED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3next": ({"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}, ("in_proj_", "gate_proj")),
    "qwen35": ({"linear_value_head_dim": 32}, ("in_proj_qkv", "in_proj_z", "linear_attn.out_proj")),
    "granitehybrid": (
        {"intermediate_size": 32, "shared_intermediate_size": 64, "mamba_n_heads": 8},
        ("input_linear", "output_linear", "in_proj", "q_proj"),
    ),
    "gemma4-experts": ({"moe_intermediate_size": 32}, ("experts", "q_proj")),
    "llama4": ({"intermediate_size_mlp": 64}, ("experts", "gate_proj")),
    "falcon-h1": ({"mamba_d_ssm": 128, "mamba_n_heads": 8}, ("in_proj", "down_proj", "lm_head")),
}
"""Sizes that fill blocks, and parts of names of quantised matrices."""


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_matrices(name: str, tmp_path: Path, logits: Callable) -> None:
    """Rows and columns of blocks are moved, stacked and parted as those of plain numbers."""
    sizes, parts = QUANTISED[name]
    folder, _ = saved(name, tmp_path / "model", **{**WIDE, **sizes})
    held = write_gguf(
        folder, tmp_path / "m.gguf", lambda full: Type.Q8_0 if any(part in full for part in parts) else Type.F32
    )
    rounded = shutil.copytree(folder, tmp_path / "rounded")
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, rounded / "model.safetensors")
    found = logits(tmp_path / "m.gguf")
    assert not torch.allclose(found, logits(folder), atol=1e-3)
    torch.testing.assert_close(found, logits(rounded), rtol=1e-4, atol=1e-4)


def test_tiled_columns_stay_packed_unless_a_group_is_parted() -> None:
    def weight(group: int) -> QuantizedWeight:
        scales = torch.rand(3, 64 // group) + 0.5
        return QuantizedWeight(
            bits=8, codes=torch.randint(-9, 9, (3, 64), dtype=torch.int8), scales=scales, group=group
        )

    index = torch.arange(64).view(2, 2, 16).transpose(0, 1).flatten()
    packed = weight(16)
    moved = packed.take_columns(index)
    assert moved is not None
    assert moved.dequantized().equal(packed.dequantized()[:, index])
    assert weight(32).take_columns(index) is None
    assert weight(64).take_columns(index) is not None
    assert packed.has_form_of(weight(16))
    assert not packed.has_form_of(weight(32))


def test_adapters_need_the_factors_of_falcon_h1(tmp_path: Path) -> None:
    folder, _ = saved("falcon-h1", tmp_path / "model")
    write_gguf(folder, tmp_path / "m.gguf")
    options = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True}
    with pytest.raises(InvalidRequestError, match="GGUF file of FalconH1ForCausalLM: its factors") as caught:
        EngineCore(EngineArgs(model=str(tmp_path / "m.gguf"), enable_lora=True, **options))
    assert caught.value.param == "enable_lora"
    EngineCore(EngineArgs(model=str(folder), enable_lora=True, **options)).shutdown()
