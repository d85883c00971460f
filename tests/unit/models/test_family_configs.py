"""Configs and tensors as families publish them, which differ from what transformers writes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.checkpoint.loader import load_model, read_facts
from outrider.models.config import config_from_hf
from outrider.platform.core.errors import InvalidRequestError, UnsupportedModelError

from ...tiny_families import FAMILIES

TOKENS = list(range(3, 33))
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 64}


def parse_config(architecture: str, **values: object) -> object:
    return config_from_hf({"architectures": [architecture], "num_key_value_heads": 4, **SIZES, **values}, torch.float32)


def test_layers_that_predict_further_tokens_are_not_loaded(save_tiny: Callable, driver: Callable) -> None:
    """GLM-4.5 stores one after the last layer, DeepSeek-V3 too."""
    folder, reference = save_tiny("Glm4Moe", **FAMILIES["glm4-moe"].config, num_nextn_predict_layers=1)
    file = folder / "model.safetensors"
    stored = load_file(file)
    extra = {f"model.layers.3.{name}.weight": torch.ones(48) for name in ("enorm", "shared_head.norm")}
    save_file(stored | extra, file)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    ours = driver(load_model(folder)).forward_once({0: TOKENS})[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    save_file(stored | {"model.layers.4.enorm.weight": torch.ones(48)}, file)
    with pytest.raises(InvalidRequestError, match=r"unexpected: model.layers.4.enorm.weight"):
        load_model(folder)


def test_sparse_attention_bounds_the_context(save_tiny: Callable, tmp_path: Path) -> None:
    folder, _ = save_tiny("DeepseekV32", **FAMILIES["deepseek3.2"].config)
    assert read_facts(folder).max_position_embeddings == 128
    assert parse_config("DeepseekV32ForCausalLM").max_position_embeddings == 2048
    with pytest.raises(UnsupportedModelError, match="index_topk must be a positive integer"):
        parse_config("DeepseekV32ForCausalLM", index_topk=0)


def test_files_without_a_bias_of_the_choice(save_tiny: Callable, driver: Callable) -> None:
    folder, reference = save_tiny("Lfm2Moe", **FAMILIES["lfm2-moe"].config, use_expert_bias=False)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    ours = driver(load_model(folder)).forward_once({0: TOKENS})[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_published_configs() -> None:
    minimax = parse_config("MiniMaxM2ForCausalLM", head_dim=128, rotary_dim=64, rope_theta=5000000, num_mtp_modules=3)
    assert (minimax.rope.rotary_dim, minimax.rope.theta, minimax.experts.num_experts) == (64, 5e6, 256)
    glm = parse_config("Glm4MoeForCausalLM", n_routed_experts=160, use_qk_norm=True, partial_rotary_factor=0.5)
    assert (glm.qk_norm, glm.rope.rotary_dim, glm.experts.num_experts) == (True, 8, 160)
    assert glm.experts.layers == {1, 2, 3}
    assert not parse_config("Glm4MoeForCausalLM").qk_norm
    ernie = parse_config("Ernie4_5_MoeForCausalLM", moe_layer_start_index=2, moe_layer_end_index=3, moe_num_experts=8)
    assert (ernie.experts.layers, ernie.experts.num_experts) == ({2, 3}, 8)
    lfm = parse_config("Lfm2MoeForCausalLM", layer_types=[*["conv"] * 3, "full_attention"], intermediate_size=100)
    assert (lfm.intermediate_size, lfm.experts.layers) == (100, {2, 3})
    ministral = parse_config("Ministral3ForCausalLM")
    assert (ministral.query_scaling, ministral.max_position_embeddings) == ((0.1, 16384.0), 262144)
    assert ministral.rope.attention_factor == 1.0
    assert parse_config("MinistralForCausalLM", sliding_window=7).windows == (7,) * 4


PUBLISHED = {"head_dim": 10, "num_heads": 4, "short_conv_kernel_size": 4}


def test_kimi_linear_as_it_is_published(save_tiny: Callable, driver: Callable) -> None:
    """Sizes and lists of layers in an object of their own, and the dense layer's MLP by its usual name."""
    folder, reference = save_tiny("KimiLinear", **FAMILIES["kimi-linear"].config)
    config = json.loads((folder / "config.json").read_text())
    for key in [key for key in config if key.startswith("linear_")] + ["layer_types", "mlp_layer_types"]:
        del config[key]
    config |= {
        **{"linear_attn_config": {**PUBLISHED, "kda_layers": [1, 2, 4], "full_attn_layers": [3]}, "rope_theta": 1e4},
        **{"rope_scaling": None, "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
        **{"first_k_dense_replace": 1, "use_grouped_topk": True, "num_nextn_predict_layers": 0, "head_dim": 72},
    }
    (folder / "config.json").write_text(json.dumps(config))
    file, dense = folder / "model.safetensors", "model.layers.0.block_sparse_moe."
    tensors = {name.replace(dense, "model.layers.0.mlp."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    ours = driver(load_model(folder)).forward_once({0: TOKENS})[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_kimi_linear_without_groups_of_experts() -> None:
    sizes = {"num_hidden_layers": 5, "num_expert_group": 8, "topk_group": 4}
    assert parse_config("KimiLinearForCausalLM", **sizes).experts.num_groups == 8
    plain = parse_config("KimiLinearForCausalLM", use_grouped_topk=False, **sizes)
    assert (plain.experts.num_groups, plain.experts.top_groups) == (1, 1)


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("Cohere2ForCausalLM", "sliding_window", None),
        ("Ernie4_5_MoeForCausalLM", "use_bias", True),
        ("MiniMaxM2ForCausalLM", "use_qk_norm", False),
        ("Glm4MoeLiteForCausalLM", "mlp_layer_types", ["dense", "sparse"]),
        ("Glm4MoeLiteForCausalLM", "mlp_layer_types", ["thick"] * 4),
        ("KimiLinearForCausalLM", "mla_use_nope", False),
        ("KimiLinearForCausalLM", "moe_router_activation_func", "softmax"),
        ("KimiLinearForCausalLM", "linear_attn_config", {"kda_layers": [1, 2, 3], "full_attn_layers": [3]}),
        ("KimiLinearForCausalLM", "linear_attn_config", []),
    ],
)
def test_unsupported_fields_are_named(architecture: str, field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        parse_config(architecture, **{field: value})
