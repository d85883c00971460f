"""Heads for multi-token prediction in GGUF files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.platform.core.errors import InvalidRequestError

from ..gguf_files import write_gguf
from ..prediction_checkpoints import LAYOUTS, Checkpoint
from .test_prediction_heads import GREEDY, MTP, PROMPTS, counts, make_engine, serve

__all__ = ["make_engine"]

ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe"])
def test_heads_in_gguf_files(make_engine, tmp_path, name):
    """They draft what they draft from the folder."""
    layout = LAYOUTS[name]
    changes = ALTERNATING if name == "qwen3.5" else {}
    layout = layout._replace(family=replace(layout.family, config=layout.family.config | changes))
    folder, file, plain = Checkpoint(tmp_path, layout).folder, tmp_path / "m.gguf", tmp_path / "plain.gguf"
    write_gguf(with_head_as_layer(folder, tmp_path / "numbered"), file, **{f"{GGUF[name]}__nextn_predict_layers": 1})
    jobs, outcomes = [(prompt, GREEDY) for prompt in PROMPTS], []
    for model in (folder, file):
        engine = make_engine(model, speculative_config=MTP, skip_tokenizer_init=True)
        outcomes.append((serve(engine, jobs), counts(engine)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1][0] > 0
    write_gguf(without_head(folder, tmp_path / "short"), plain)
    with pytest.raises(InvalidRequestError, match=r"has none: a tensor of blk\.\d\.nextn is missing"):
        make_engine(plain, speculative_config=MTP, skip_tokenizer_init=True)


GGUF = {"qwen3.5": "qwen35", "glm4-moe": "glm4moe"}


def with_head_as_layer(folder: Path, other: Path) -> Path:
    """Copy of a checkpoint that numbers its head as a layer after the others, as llama.cpp's converter does."""
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    parts = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }
    tensors = {}
    for full, tensor in load_file(folder / "model.safetensors").items():
        name = full.replace("mtp.layers.0.", f"model.layers.{count}.")
        if name.startswith("mtp."):
            part = name.split(".")[1]
            name = f"model.layers.{count}.{parts[part]}.weight"
        tensors[name] = tensor
    return _saved(other, config | {"num_hidden_layers": count + 1}, tensors)


def without_head(folder: Path, other: Path) -> Path:
    """Copy of a checkpoint without its head."""
    config = json.loads((folder / "config.json").read_text())
    own = ("mtp.", f"model.layers.{config['num_hidden_layers']}.")
    tensors = load_file(folder / "model.safetensors")
    return _saved(other, config, {name: tensor for name, tensor in tensors.items() if not name.startswith(own)})


def _saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
