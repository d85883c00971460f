"""Models whose layers differ: their keys are cached once, and what is not served is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from outrider import LoRARequest, SamplingParams
from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.parallel import rank_config
from outrider.platform.core.errors import InvalidRequestError

from ..tiny_families import FAMILIES, build

FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module", params=["gemma3n", "gemma4"])
def folder(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    build(FAMILIES[request.param]).save_pretrained(path)
    return str(path)


def test_shared_keys_are_cached_once(folder):
    """Three of five layers have keys: 2 KV heads of 16 elements, and in Gemma 4 of 24 in the layer that sees all."""
    sizes = (16, 16, 24) if "gemma4" in folder else (16, 16, 16)
    model = load_model(folder)
    assert [(spec.num_kv_heads, spec.head_dim) for spec in model.kv_layers] == [(2, size) for size in sizes]
    assert read_facts(folder).kv_bytes_per_token == 2 * 2 * sum(sizes) * 4


@pytest.mark.parametrize(("size", "word"), [(3, "num_attention_heads 4"), (8, "num_attention_heads 4")])
def test_ranks_that_do_not_divide_a_layer_are_named(folder, size, word):
    with pytest.raises(InvalidRequestError, match=word):
        rank_config(load_model(folder).config, size)


def test_an_adapter_on_the_inputs_table_is_refused_by_name(folder, make_engine, run, tmp_path):
    name = "base_model.model.model.embed_tokens_per_layer.lora_embedding_{}"
    save_file({name.format("A"): torch.ones(2, 131), name.format("B"): torch.ones(60, 2)}, tmp_path / FILE)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["embed_tokens_per_layer"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    engine = make_engine(model=folder, max_model_len=64, enable_lora=True)
    params = SamplingParams(max_tokens=1)
    (refused,) = run(engine, [([5, 6], params, LoRARequest("a", path=str(tmp_path)))])
    assert refused.error is not None
    assert "embed_tokens_per_layer" in refused.error.message
