"""GGUF files of models with recurrent states, of Gemma 3n and 4, and of Llama 4: a file gives the logits of the folder
that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.checkpoint.loader import load_model

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
